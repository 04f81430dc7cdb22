-- Datasets that give requests of theirs the same number.
--
-- Columns: dataset (number), again (count of requests with a number that another one has, too)
SELECT dataset, count(*) - count(DISTINCT request) AS again
FROM requests
GROUP BY dataset
HAVING again > 0
ORDER BY dataset
