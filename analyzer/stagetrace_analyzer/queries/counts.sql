-- How many requests there are of each kind that one can choose.
--
-- Columns: field (traffic_class, phase, outcome, ...), value, requests (count)
SELECT field, value, count(*) AS requests
FROM (
    SELECT traffic_class, phase, outcome, longest_wait, model, arm, instance
    FROM listed
    WHERE selected
)
    UNPIVOT (value FOR field IN (traffic_class, phase, outcome, longest_wait, model, arm, instance))
GROUP BY field, value
ORDER BY field, value
