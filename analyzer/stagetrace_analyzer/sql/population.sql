-- The requests that are analysed, with their group, in the order of dataset and number.
--
-- Columns:
--   dataset, request   the request in its dataset
--   group              number of its class and phase in the table groups
--   run                number of its dataset and phase, the same for all that have both in common
--   good               its outcome is ok
--   received_unix_ns   ns since the epoch
--   intended_unix_ns   ns since the epoch, -1 if not told
--   ttft_ns, completion_ns  ns, -1 if not reached
--   ended_ns           ns, that of the last byte if it is all that is known; -1 if not even that is
WITH numbered AS (
    SELECT dataset, run, row_number() OVER () AS number
    FROM (SELECT DISTINCT dataset, run FROM classified)
)
SELECT
    classified.dataset::SMALLINT AS dataset,
    classified.request::BIGINT AS request,
    groups.number::INTEGER AS "group",
    numbered.number::INTEGER AS run,
    outcome = 'ok' AS good,
    received_unix_ns::BIGINT AS received_unix_ns,
    coalesce(intended_unix_ns, -1)::BIGINT AS intended_unix_ns,
    coalesce(ttft_ns, -1)::BIGINT AS ttft_ns,
    coalesce(completion_ns, -1)::BIGINT AS completion_ns,
    coalesce(ended_ns, completion_ns, -1)::BIGINT AS ended_ns
FROM classified
INNER JOIN numbered
    ON classified.dataset = numbered.dataset
    AND classified.run IS NOT DISTINCT FROM numbered.run
INNER JOIN groups
    ON classified.traffic_class = groups.traffic_class
    AND classified.phase IS NOT DISTINCT FROM groups.phase
ORDER BY classified.dataset, classified.request
