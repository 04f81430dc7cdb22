-- How many requests of the datasets can be used, and when the newest came.
--
-- Columns: requests (count), newest_unix_ns (ns since the epoch, null without requests)
SELECT count(*) AS requests, max(received_unix_ns) AS newest_unix_ns
FROM facts
WHERE fault IS NULL
