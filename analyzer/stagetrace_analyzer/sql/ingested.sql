-- What was read into the datasets, and what was set aside.
--
-- Columns: name (as in ingest), reason, count
SELECT name, reason, sum(count)::BIGINT AS count
FROM ingest
GROUP BY name, reason
ORDER BY name, reason
