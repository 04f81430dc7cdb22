-- Rows of the list of requests.
--
-- Parameters: rows (list of numbers in listed)
-- Columns: those of listed, but selected
SELECT * EXCLUDE (selected)
FROM listed
WHERE row IN (SELECT unnest($rows::BIGINT[]))
