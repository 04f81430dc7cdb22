-- Counts of one thing by two witnesses, over all datasets.
--
-- Columns: name (as in checks), expected, found (counts), holds (in every dataset)
SELECT name, sum(expected) AS expected, sum(found) AS found, bool_and(holds) AS holds
FROM checks
GROUP BY name
ORDER BY name
