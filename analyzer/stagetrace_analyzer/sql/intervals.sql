-- The intervals of some requests of one dataset.
--
-- Parameters: dataset; first, last (numbers of the first and the last request)
-- Columns:
--   request      number of the request in its dataset
--   place        number in places
--   horizon      0: both, 1: ttft, 2: completion, 3: unknown
--   duration_ns  ns
SELECT
    stages.request,
    places.place::SMALLINT AS place,
    CASE stages.horizon WHEN 'both' THEN 0 WHEN 'ttft' THEN 1 WHEN 'completion' THEN 2 ELSE 3 END::TINYINT AS horizon,
    stages.duration_ns::BIGINT AS duration_ns
FROM stages
INNER JOIN places
    ON stages.stage = places.stage
    AND stages.kind = places.kind
    AND stages.reason IS NOT DISTINCT FROM places.reason
WHERE stages.dataset = $dataset AND stages.request BETWEEN $first AND $last
