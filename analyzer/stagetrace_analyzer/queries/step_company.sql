-- Who else was in each of some steps, by class.
--
-- Parameters: dataset, request (not counted); engine, first_step, last_step (both included)
-- Columns:
--   step
--   traffic_class  of the others
--   requests       count of the others
--   tokens         of the others in the step
WITH others AS (
    SELECT request, greatest(first_step, $first_step) AS first_step, least(last_step, $last_step) AS last_step, tokens
    FROM occupancy
    WHERE dataset = $dataset AND engine = $engine AND request != $request
        AND first_step <= $last_step AND last_step >= $first_step
),
by_step AS (
    SELECT request, tokens, unnest(range(first_step, last_step + 1)) AS step
    FROM others
)
SELECT by_step.step, listed.traffic_class, count(*) AS requests, sum(by_step.tokens)::BIGINT AS tokens
FROM by_step
INNER JOIN listed ON listed.dataset = $dataset AND listed.request = by_step.request
GROUP BY by_step.step, listed.traffic_class
ORDER BY by_step.step, listed.traffic_class
