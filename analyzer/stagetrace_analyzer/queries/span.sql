-- The time and the phases that the requests cover, of those that can be used.
--
-- Columns:
--   requests                      count
--   phases                        count of phases of an experiment, without warm-up
--   first_unix_ns, last_unix_ns   ns since the epoch: first receipt, last receipt
--   newest_unix_ns                ns since the epoch: the last end that is known, or the last receipt
SELECT
    count(*) AS requests,
    count(DISTINCT phase) FILTER (WHERE phase != 'warm-up') AS phases,
    min(received_unix_ns) AS first_unix_ns,
    max(received_unix_ns) AS last_unix_ns,
    max(received_unix_ns + coalesce(ended_ns, 0)) AS newest_unix_ns
FROM facts
WHERE fault IS NULL
