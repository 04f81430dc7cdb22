-- Requests by class, phase and outcome.
--
-- Columns: traffic_class, phase, outcome, requests (count)
SELECT traffic_class, phase, outcome, count(*) AS requests
FROM classified
GROUP BY traffic_class, phase, outcome
