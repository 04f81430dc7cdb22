-- All that is known of one request.
--
-- Parameters: dataset, request
-- Columns: those of requests and dataset
SELECT *
FROM requests
WHERE dataset = $dataset AND request = $request
