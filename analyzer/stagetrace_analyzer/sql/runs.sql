-- The phases of an experiment in each dataset, with the time to first token of their requests
-- in the order of arrival.
--
-- Columns:
--   dataset           number of the dataset
--   run               phase
--   requests          count
--   received_unix_ns  list of ns since the epoch, of requests with a first token
--   relative          list of time to first token over the median of the request's class
SELECT
    dataset,
    run,
    count(*) AS requests,
    list(received_unix_ns ORDER BY received_unix_ns) FILTER (WHERE ttft_ns IS NOT NULL) AS received_unix_ns,
    list(ttft_ns / typical_ns ORDER BY received_unix_ns) FILTER (WHERE ttft_ns IS NOT NULL) AS relative
FROM (
    -- A median leaves nulls out, greatest does not.
    SELECT *, greatest(median(ttft_ns) OVER (PARTITION BY dataset, run, traffic_class), 1) AS typical_ns
    FROM classified
    WHERE run IS NOT NULL
)
GROUP BY dataset, run
ORDER BY min(received_unix_ns), dataset
