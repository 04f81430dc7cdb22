-- Leaves the requests that were sent to warm a server up out of the table classified, if
-- there are others.
DELETE FROM classified
WHERE run = 'warm-up' AND EXISTS (SELECT 1 FROM classified WHERE run IS DISTINCT FROM 'warm-up')
