-- Makes the tables periods and owners: a recorded dataset cut into busy periods,
-- stretches of time with at least one request in the server.
--
-- Periods with requests of the phase 'warm-up' are left out where there are others.
--
-- Columns of periods:
--   period         number from 0, in order of time
--   open_unix_ns   ns since the epoch, receipt of the first request
--   length_ns      ns until nobody is left
--   step_base      lowest number of a step in it; 0 without steps
--   step_count     how many step numbers it takes up
-- Columns of owners:
--   request     as in requests
--   period      as in periods
--   place       number of the request in its period, from 0
--   receipt_ns  ns from the begin of the period to its receipt
CREATE TEMP TABLE owners AS
WITH known AS (
    SELECT request, max(begin_ns + duration_ns) AS last_ns
    FROM stages
    GROUP BY request
),
spans AS (
    SELECT
        request,
        phase,
        received_unix_ns,
        received_unix_ns + greatest(coalesce(ended_ns, 0), coalesce(last_ns, 0)) AS left_unix_ns
    FROM requests
    LEFT JOIN known USING (request)
),
begun AS (
    SELECT
        *,
        coalesce(received_unix_ns > max(left_unix_ns) OVER (
            ORDER BY received_unix_ns, request ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), TRUE) AS is_first
    FROM spans
),
cut AS (
    SELECT *, count(*) FILTER (WHERE is_first) OVER (ORDER BY received_unix_ns, request) AS cut
    FROM begun
),
marked AS (
    SELECT *, bool_or(coalesce(phase = 'warm-up', FALSE)) OVER (PARTITION BY cut) AS warm_up
    FROM cut
)
SELECT
    request,
    dense_rank() OVER (ORDER BY cut) - 1 AS period,
    row_number() OVER (PARTITION BY cut ORDER BY received_unix_ns, request) - 1 AS place,
    received_unix_ns - min(received_unix_ns) OVER (PARTITION BY cut) AS receipt_ns,
    received_unix_ns,
    left_unix_ns
FROM marked
WHERE NOT warm_up OR NOT EXISTS (SELECT 1 FROM marked WHERE NOT warm_up);

CREATE TEMP TABLE periods AS
WITH bounds AS (
    SELECT period, min(received_unix_ns) AS open_unix_ns, max(left_unix_ns) AS close_unix_ns
    FROM owners
    GROUP BY period
),
named AS (
    SELECT period, step
    FROM steps
    ASOF JOIN bounds ON scheduled_unix_ns >= open_unix_ns
    WHERE scheduled_unix_ns <= close_unix_ns
    UNION ALL
    SELECT period, unnest([first_step, last_step]) AS step
    FROM occupancy
    INNER JOIN owners USING (request)
),
step_bounds AS (
    SELECT period, min(step) AS step_base, max(step) - min(step) + 1 AS step_count
    FROM named
    GROUP BY period
)
SELECT
    period,
    open_unix_ns,
    close_unix_ns - open_unix_ns AS length_ns,
    coalesce(step_base, 0) AS step_base,
    coalesce(step_count, 0) AS step_count
FROM bounds
LEFT JOIN step_bounds USING (period)
ORDER BY period;
