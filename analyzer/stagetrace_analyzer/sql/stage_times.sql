-- Time in each stage, over the requests that ended well and whose stages add up.
-- A request that was never in the stage was in it for 0 ns.
--
-- The quantile q of n values is the one of rank ceil(q * n).
--
-- Columns:
--   traffic_class, phase
--   horizon         ttft or completion
--   stage, kind
--   requests        count of all requests behind the figures, in the stage or not
--   horizon_ns      ns, sum of the horizon over these requests
--   spent_ns        ns, sum of the time in the stage over these requests
--   p50_ns, p95_ns  ns in the stage, by request
WITH sound AS (
    SELECT request, traffic_class, phase, horizon, horizon_ns
    FROM partitions
    WHERE ok AND adds_up
),
populations AS (
    SELECT traffic_class, phase, horizon, count(*) AS requests, sum(horizon_ns) AS horizon_ns
    FROM sound
    GROUP BY traffic_class, phase, horizon
),
times AS (
    SELECT
        traffic_class,
        phase,
        horizon,
        stage,
        kind,
        sum(spent_ns) AS spent_ns,
        count(*) AS present,
        list_sort(list(spent_ns)) AS values_ns
    FROM spent
    INNER JOIN sound USING (request, horizon)
    GROUP BY traffic_class, phase, horizon, stage, kind
),
ranked AS (
    SELECT
        times.*,
        populations.requests,
        populations.horizon_ns,
        (requests * 50 + 99) // 100 - (requests - present) AS p50_rank,
        (requests * 95 + 99) // 100 - (requests - present) AS p95_rank
    FROM times
    INNER JOIN populations
        ON times.traffic_class = populations.traffic_class
        AND times.phase IS NOT DISTINCT FROM populations.phase
        AND times.horizon = populations.horizon
)
SELECT
    traffic_class,
    phase,
    horizon,
    stage,
    kind,
    requests,
    horizon_ns,
    spent_ns,
    CASE WHEN p50_rank > 0 THEN values_ns[p50_rank] ELSE 0 END AS p50_ns,
    CASE WHEN p95_rank > 0 THEN values_ns[p95_rank] ELSE 0 END AS p95_ns
FROM ranked
