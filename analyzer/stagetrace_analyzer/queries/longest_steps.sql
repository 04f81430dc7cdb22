-- The longest steps that an engine scheduled in a time.
--
-- Parameters: as in steps
-- Columns: as in steps, the longest first
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
ORDER BY end_unix_ns - begin_unix_ns DESC NULLS LAST, step
LIMIT $most
