-- How many intervals there are.
--
-- Columns: number (count)
SELECT count(*) AS number
FROM stages
