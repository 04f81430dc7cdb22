-- Counts of one thing by two witnesses, by dataset.
--
-- Columns: dataset, name (as in checks), expected, found (counts), tolerance (relative), holds
SELECT dataset, name, expected, found, tolerance, holds
FROM checks
ORDER BY dataset, name
