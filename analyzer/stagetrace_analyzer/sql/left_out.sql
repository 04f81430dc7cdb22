-- Requests of the datasets that are not analysed, because they are warm-up.
--
-- Columns: requests (count)
SELECT (SELECT count(*) FROM requests) - (SELECT count(*) FROM classified) AS requests
