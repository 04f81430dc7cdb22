-- Steps that an engine scheduled in a time: the first ones, or the longest.
--
-- Parameters: dataset, engine; since_unix_ns, until_unix_ns (ns, scheduled in [since, until)); most (count);
--   longest (boolean, false for the first)
-- Columns:
--   step, scheduled_unix_ns, begin_unix_ns, end_unix_ns (ns since the epoch, null if unknown)
--   encoder_ns              ns of encoding inside the step, null if none
--   requests, tokens, decodes, encoder_items, running, waiting, reason
SELECT
    step,
    scheduled_unix_ns,
    begin_unix_ns,
    end_unix_ns,
    encoder_end_unix_ns - encoder_begin_unix_ns AS encoder_ns,
    requests,
    tokens,
    decodes,
    encoder_items,
    running,
    waiting,
    reason
FROM steps
WHERE dataset = $dataset AND engine = $engine
    AND scheduled_unix_ns >= $since_unix_ns AND scheduled_unix_ns < $until_unix_ns
ORDER BY CASE WHEN $longest THEN end_unix_ns - begin_unix_ns END DESC NULLS LAST, scheduled_unix_ns, step
LIMIT $most
