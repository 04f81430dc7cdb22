-- Intervals of requests that are not there.
--
-- Columns: number (count)
SELECT count(*) AS number
FROM stages
ANTI JOIN requests USING (dataset, request)
