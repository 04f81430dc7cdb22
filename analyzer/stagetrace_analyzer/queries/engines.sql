-- The engines and the time that their steps cover.
--
-- Columns:
--   dataset, engine
--   steps                        count
--   first_unix_ns, last_unix_ns  ns since the epoch, of scheduling
SELECT
    dataset,
    engine,
    count(*) AS steps,
    min(scheduled_unix_ns) AS first_unix_ns,
    max(coalesce(end_unix_ns, scheduled_unix_ns)) AS last_unix_ns
FROM steps
GROUP BY dataset, engine
ORDER BY dataset, first_unix_ns, engine
