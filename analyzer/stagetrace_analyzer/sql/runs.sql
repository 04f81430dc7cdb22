-- The phases of an experiment, with the time to first token of their requests in the
-- order of arrival.
--
-- Columns:
--   run               phase
--   requests          count
--   received_unix_ns  list of ns since the epoch, of requests with a first token
--   relative          list of time to first token over the median of the request's class
SELECT
    run,
    count(*) AS requests,
    list(received_unix_ns ORDER BY received_unix_ns) FILTER (WHERE ttft_ns IS NOT NULL) AS received_unix_ns,
    list(ttft_ns / typical_ns ORDER BY received_unix_ns) FILTER (WHERE ttft_ns IS NOT NULL) AS relative
FROM (
    SELECT *, median(greatest(ttft_ns, 1)) OVER (PARTITION BY run, traffic_class) AS typical_ns
    FROM classified
    WHERE run IS NOT NULL
)
GROUP BY run
ORDER BY min(received_unix_ns)
