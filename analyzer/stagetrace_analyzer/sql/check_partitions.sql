-- Makes the table partitions: the horizons that requests reached, and whether
-- their stages add up.
--
-- Columns:
--   request               number in classified
--   traffic_class, phase  as in classified
--   horizon               ttft or completion
--   horizon_ns            ns from receipt to the end of the horizon
--   ok                    the request's outcome is ok
--   adds_up               the stages' durations add up to horizon_ns exactly
CREATE TEMP TABLE partitions AS
WITH reached AS (
    UNPIVOT classified
    ON ttft_ns AS ttft, completion_ns AS completion
    INTO NAME horizon VALUE horizon_ns
),
totals AS (
    SELECT request, horizon, sum(spent_ns) AS total_ns
    FROM spent
    GROUP BY request, horizon
)
SELECT
    request,
    traffic_class,
    phase,
    horizon,
    horizon_ns,
    outcome = 'ok' AS ok,
    coalesce(total_ns, 0) = horizon_ns AS adds_up
FROM reached
LEFT JOIN totals USING (request, horizon)
