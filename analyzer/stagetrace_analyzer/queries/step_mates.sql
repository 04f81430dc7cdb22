-- Who shared steps with one request.
--
-- Parameters: dataset, request; most (count, those with the most steps in common)
-- Columns:
--   request, request_id, traffic_class  the other request
--   engine
--   first_step, last_step  the steps in common are between these
--   steps                  count of steps in common
WITH own AS (
    SELECT engine, first_step, last_step
    FROM occupancy
    WHERE dataset = $dataset AND request = $request
),
shared AS (
    SELECT
        others.request,
        others.engine,
        greatest(own.first_step, others.first_step) AS first_step,
        least(own.last_step, others.last_step) AS last_step
    FROM occupancy AS others
    INNER JOIN own
        ON others.engine = own.engine
        AND others.first_step <= own.last_step
        AND others.last_step >= own.first_step
    WHERE others.dataset = $dataset AND others.request != $request
),
by_request AS (
    SELECT
        request,
        engine,
        min(first_step) AS first_step,
        max(last_step) AS last_step,
        sum(last_step - first_step + 1)::BIGINT AS steps
    FROM shared
    GROUP BY request, engine
)
SELECT
    by_request.request,
    listed.request_id,
    listed.traffic_class,
    by_request.engine,
    by_request.first_step,
    by_request.last_step,
    by_request.steps
FROM by_request
INNER JOIN listed ON listed.dataset = $dataset AND listed.request = by_request.request
ORDER BY steps DESC, by_request.request
LIMIT $most
