-- The processes that told anything: API servers by their requests, engines by their steps.
--
-- Columns:
--   dataset
--   role                         api or engine
--   process
--   things                       count: requests or steps
--   first_unix_ns, last_unix_ns  ns since the epoch: first and last of them
--   lags                         count of times that the event loop was late, null for an engine
--   longest_lag_ns               ns, null if it never was
WITH servers AS (
    SELECT dataset, instance, count(*) AS things, min(received_unix_ns) AS first_unix_ns,
        max(received_unix_ns) AS last_unix_ns
    FROM requests
    GROUP BY dataset, instance
),
lags AS (
    SELECT dataset, instance, count(*) AS lags, max(duration_ns) AS longest_lag_ns
    FROM loop_lag
    GROUP BY dataset, instance
)
SELECT servers.dataset, 'api' AS role, servers.instance AS process, things, first_unix_ns, last_unix_ns,
    coalesce(lags, 0) AS lags, longest_lag_ns
FROM servers
LEFT JOIN lags ON servers.dataset = lags.dataset AND servers.instance = lags.instance
UNION ALL
SELECT dataset, 'engine', engine, count(*), min(scheduled_unix_ns), max(scheduled_unix_ns), NULL, NULL
FROM steps
GROUP BY dataset, engine
ORDER BY dataset, role, first_unix_ns, process
