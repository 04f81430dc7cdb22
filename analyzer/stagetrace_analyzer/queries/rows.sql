-- Rows of the list of requests.
--
-- Parameters: rows (list of numbers in listed)
-- Columns: those of listed
SELECT *
FROM listed
WHERE row IN (SELECT unnest($rows::BIGINT[]))
