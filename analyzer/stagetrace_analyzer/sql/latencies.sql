-- Exact quantiles of time to first token, completion and waiting, over all
-- requests of a class.  A request that did not end well is at plus infinity.
--
-- The quantile q of n values is the one of rank ceil(q * n); it is null when
-- that rank is not reached.
--
-- Columns:
--   traffic_class, phase
--   metric                  ttft, completion, or waiting: time in wait stages on the ttft horizon
--   requests, reached       count of all requests, and of those with a finite value
--   p50_ns, p95_ns, p99_ns  ns
WITH waited AS (
    SELECT request, sum(spent_ns)::BIGINT AS waited_ns
    FROM spent
    WHERE horizon = 'ttft' AND kind = 'wait'
    GROUP BY request
),
by_request AS (
    SELECT
        traffic_class,
        phase,
        CASE WHEN outcome = 'ok' THEN ttft_ns END AS ttft,
        CASE WHEN outcome = 'ok' THEN completion_ns END AS completion,
        CASE WHEN outcome = 'ok' AND ttft_ns IS NOT NULL THEN coalesce(waited_ns, 0) END AS waiting
    FROM classified
    LEFT JOIN waited USING (request)
),
measured AS (
    FROM by_request UNPIVOT INCLUDE NULLS (value_ns FOR metric IN (ttft, completion, waiting))
),
ordered AS (
    SELECT
        traffic_class,
        phase,
        metric,
        count(*) AS requests,
        count(value_ns) AS reached,
        list_sort(list(value_ns) FILTER (WHERE value_ns IS NOT NULL)) AS values_ns
    FROM measured
    GROUP BY traffic_class, phase, metric
)
SELECT
    traffic_class,
    phase,
    metric,
    requests,
    reached,
    values_ns[(requests * 50 + 99) // 100] AS p50_ns,
    values_ns[(requests * 95 + 99) // 100] AS p95_ns,
    values_ns[(requests * 99 + 99) // 100] AS p99_ns
FROM ordered
