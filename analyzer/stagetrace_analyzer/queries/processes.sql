-- The processes that wrote, and what they told: API servers requests, engines steps.
--
-- Columns:
--   dataset
--   role                         what it does, such as api, engine, worker; with a plus between several
--   process
--   pid, host, clock             where it ran, and the name of its monotonic clock; null where no clock
--                                was read, as by a simulation
--   service, model, version      what it said of itself, null if nothing
--   stagetrace_version           what recorded, null as above
--   records                      count that it wrote, null as above
--   requests, steps              count, null if it told none
--   first_unix_ns, last_unix_ns  ns since the epoch: first and last of them, null if it told none
--   lags                         count of times that its event loop was late, null if it is no API server
--   longest_lag_ns               ns, null if it never was
WITH written AS (
    SELECT dataset, process, any_value(role) AS role, any_value(pid) AS pid, any_value(host) AS host,
        any_value(clock) AS clock, any_value(service) AS service, any_value(model) AS model,
        any_value(version) AS version, any_value(stagetrace_version) AS stagetrace_version,
        any_value(records) AS records, min(at_unix_ns) AS opened_unix_ns
    FROM clocks
    GROUP BY dataset, process
),
parts AS (
    SELECT dataset, instance AS process, 'api' AS role, count(*) AS requests, NULL AS steps,
        min(received_unix_ns) AS first_unix_ns, max(received_unix_ns) AS last_unix_ns
    FROM requests
    GROUP BY dataset, instance
    UNION ALL
    SELECT dataset, engine, 'engine', NULL, count(*), min(scheduled_unix_ns), max(scheduled_unix_ns)
    FROM steps
    GROUP BY dataset, engine
),
told AS (
    SELECT dataset, process, string_agg(role, '+' ORDER BY role) AS role, max(requests) AS requests,
        max(steps) AS steps, min(first_unix_ns) AS first_unix_ns, max(last_unix_ns) AS last_unix_ns
    FROM parts
    GROUP BY dataset, process
),
late AS (
    SELECT dataset, instance AS process, count(*) AS lags, max(duration_ns) AS longest_lag_ns
    FROM loop_lag
    GROUP BY dataset, instance
)
SELECT dataset, coalesce(written.role, told.role) AS role, process, pid, host, clock, service, model, version,
    stagetrace_version, records, requests, steps, first_unix_ns, last_unix_ns,
    CASE WHEN list_contains(string_split(coalesce(written.role, told.role), '+'), 'api')
    THEN coalesce(lags, 0) END AS lags,
    longest_lag_ns
FROM written
FULL JOIN told USING (dataset, process)
LEFT JOIN late USING (dataset, process)
ORDER BY dataset, role, coalesce(first_unix_ns, opened_unix_ns), process
