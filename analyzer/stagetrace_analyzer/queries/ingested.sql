-- What was read into each dataset, and what was set aside.
--
-- Columns: dataset, name (as in ingest), reason, number (its count)
SELECT dataset, name, reason, count AS number
FROM ingest
ORDER BY dataset, name, reason
