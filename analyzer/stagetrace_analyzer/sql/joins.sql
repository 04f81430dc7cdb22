-- Analysed requests by the processes whose records were found.
--
-- Columns: joined, requests (count)
SELECT joined, count(*) AS requests
FROM classified
GROUP BY joined
ORDER BY joined
