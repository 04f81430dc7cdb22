-- The requests that are analysed, with their group, in the order of dataset and number.
--
-- Columns:
--   dataset, request   the request in its dataset
--   group              number of its class and phase in the table groups
--   good               its outcome is ok
--   received_unix_ns   ns since the epoch
--   intended_unix_ns   ns since the epoch, -1 if not told
--   ttft_ns, completion_ns, ended_ns  ns, -1 if not reached or not known
SELECT
    dataset::SMALLINT AS dataset,
    request,
    groups.number::SMALLINT AS "group",
    outcome = 'ok' AS good,
    received_unix_ns,
    coalesce(intended_unix_ns, -1) AS intended_unix_ns,
    coalesce(ttft_ns, -1) AS ttft_ns,
    coalesce(completion_ns, -1) AS completion_ns,
    coalesce(ended_ns, -1) AS ended_ns
FROM classified
INNER JOIN groups
    ON classified.traffic_class = groups.traffic_class
    AND classified.phase IS NOT DISTINCT FROM groups.phase
ORDER BY dataset, request
