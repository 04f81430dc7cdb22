-- The classes and phases there are.
--
-- Columns: traffic_class, phase, first_unix_ns (ns, earliest receipt)
SELECT traffic_class, phase, min(received_unix_ns) AS first_unix_ns
FROM classified
GROUP BY traffic_class, phase
