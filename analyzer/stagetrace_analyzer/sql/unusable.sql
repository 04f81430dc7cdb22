-- Rows that no figure is of, by what is wrong with them.
--
-- Columns: reason, number (count, above 0)
SELECT reason, number
FROM (
    SELECT 'requests ' || fault AS reason, count(*) AS number
    FROM facts
    WHERE fault IS NOT NULL
    GROUP BY fault
    UNION ALL
    SELECT 'intervals on an unknown horizon', count(*)
    FROM stages
    WHERE horizon NOT IN ('both', 'ttft', 'completion')
    UNION ALL
    SELECT 'media items of a request that is not there', count(*)
    FROM media
    ANTI JOIN requests USING (dataset, request)
    UNION ALL
    SELECT 'media items of a negative size', count(*)
    FROM media
    WHERE bytes < 0 OR width < 0 OR height < 0
    UNION ALL
    SELECT 'checks without a count', count(*)
    FROM checks
    WHERE NOT (abs(expected) < 1e18 AND abs(found) < 1e18)
    UNION ALL
    SELECT 'counts of ingest below 0', count(*)
    FROM ingest
    WHERE count < 0
)
WHERE number > 0
ORDER BY reason
