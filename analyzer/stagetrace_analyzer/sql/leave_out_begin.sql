-- Leaves the begin of a phase out of the table classified.
--
-- Parameters: run (phase), until_unix_ns (ns since the epoch, the first that stays)
DELETE FROM classified WHERE run = $run AND received_unix_ns < $until_unix_ns
