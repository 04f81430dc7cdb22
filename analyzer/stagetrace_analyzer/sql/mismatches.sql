-- Requests, of any outcome, whose stages do not add up to the horizon they reached.
--
-- Columns: horizon, requests (count)
SELECT horizon, count(*) AS requests
FROM partitions
WHERE NOT adds_up
GROUP BY horizon
