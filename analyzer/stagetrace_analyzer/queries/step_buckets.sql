-- The steps that an engine scheduled in a time, put together into stretches of equal length.
--
-- Parameters: dataset, engine; since_unix_ns, until_unix_ns (ns, scheduled in [since, until));
--   bucket_ns (ns, length of a stretch)
-- Columns:
--   begin_unix_ns           ns since the epoch, of the stretch
--   steps                   count
--   busy_ns                 ns, sum of the steps' lengths
--   prompt_tokens, decodes  of the step with most tokens
--   longest_ns              ns, the longest step; null if no length is known
--   longest_step            its number, null likewise
--   longest_encoder_ns      ns of encoding in it, 0 if none
--   encoder_items           sum over the steps
--   running, waiting        largest
--   reason                  why requests stayed out in most of the steps that left some, null if none
WITH found AS (
    SELECT
        $since_unix_ns + (scheduled_unix_ns - $since_unix_ns) // $bucket_ns * $bucket_ns AS bucket_unix_ns,
        end_unix_ns - begin_unix_ns AS duration_ns,
        coalesce(encoder_end_unix_ns - encoder_begin_unix_ns, 0) AS encoder_ns,
        *
    FROM steps
    WHERE dataset = $dataset AND engine = $engine
        AND scheduled_unix_ns >= $since_unix_ns AND scheduled_unix_ns < $until_unix_ns
)
SELECT
    bucket_unix_ns AS begin_unix_ns,
    count(*) AS steps,
    coalesce(sum(duration_ns), 0)::BIGINT AS busy_ns,
    arg_max(tokens - decodes, tokens) AS prompt_tokens,
    arg_max(decodes, tokens) AS decodes,
    max(duration_ns) AS longest_ns,
    arg_max(step, duration_ns) AS longest_step,
    coalesce(arg_max(encoder_ns, duration_ns), 0) AS longest_encoder_ns,
    sum(encoder_items)::BIGINT AS encoder_items,
    max(running) AS running,
    max(waiting) AS waiting,
    mode(reason) AS reason
FROM found
GROUP BY bucket_unix_ns
ORDER BY bucket_unix_ns
