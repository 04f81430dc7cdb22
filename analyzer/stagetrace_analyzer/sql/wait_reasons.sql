-- Time in each wait by reason, over the requests that ended well and whose stages add up.
--
-- Columns:
--   traffic_class, phase
--   horizon    ttft or completion
--   stage      a stage of kind wait
--   reason     why the engine did not run the request; null if not recorded
--   spent_ns   ns, sum over these requests
SELECT
    partitions.traffic_class,
    partitions.phase,
    partitions.horizon,
    stages.stage,
    stages.reason,
    sum(stages.duration_ns) AS spent_ns
FROM stages
INNER JOIN classified USING (dataset, request_id)
INNER JOIN partitions USING (request)
WHERE stages.kind = 'wait'
    AND stages.horizon IN (partitions.horizon, 'both')
    AND partitions.ok
    AND partitions.adds_up
GROUP BY
    partitions.traffic_class,
    partitions.phase,
    partitions.horizon,
    stages.stage,
    stages.reason
