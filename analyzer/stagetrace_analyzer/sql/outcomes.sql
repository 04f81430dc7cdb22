-- Requests by class, phase and outcome.
--
-- Columns: traffic_class, phase, outcome, requests (count), first_unix_ns (ns, earliest receipt)
SELECT traffic_class, phase, outcome, count(*) AS requests, min(received_unix_ns) AS first_unix_ns
FROM classified
GROUP BY traffic_class, phase, outcome
