-- Leaves the begin of a phase in a dataset out of the table classified.
--
-- Parameters: dataset; run (phase); until_unix_ns (ns since the epoch, the first that stays)
DELETE FROM classified WHERE dataset = $dataset AND run = $run AND received_unix_ns < $until_unix_ns
