-- How many steps an engine scheduled in a time.
--
-- Parameters: dataset, engine; since_unix_ns, until_unix_ns (ns, scheduled in [since, until))
-- Columns: steps (count)
SELECT count(*) AS steps
FROM steps
WHERE dataset = $dataset AND engine = $engine
    AND scheduled_unix_ns >= $since_unix_ns AND scheduled_unix_ns < $until_unix_ns
