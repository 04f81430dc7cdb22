-- The steps of its engines while one request was in the server: its own, and those that it waited for.
--
-- Parameters: dataset, request; most (count of steps, the first of them)
-- Columns:
--   engine, step
--   begin_unix_ns, end_unix_ns                  ns since the epoch
--   encoder_begin_unix_ns, encoder_end_unix_ns  likewise, null if it encoded nothing
--   own_tokens  tokens of this request in the step, null if it was not in it
--   requests, tokens, decodes, encoder_items, running, waiting  as in steps
WITH time_in_server AS (
    SELECT received_unix_ns AS since_ns, received_unix_ns + ended_ns AS until_ns
    FROM requests
    WHERE dataset = $dataset AND request = $request
),
own AS (
    SELECT engine, first_step, last_step, tokens
    FROM occupancy
    WHERE dataset = $dataset AND request = $request
)
SELECT
    steps.engine,
    steps.step,
    steps.begin_unix_ns,
    steps.end_unix_ns,
    steps.encoder_begin_unix_ns,
    steps.encoder_end_unix_ns,
    own.tokens AS own_tokens,
    steps.requests,
    steps.tokens,
    steps.decodes,
    steps.encoder_items,
    steps.running,
    steps.waiting
FROM steps
INNER JOIN time_in_server
    ON steps.end_unix_ns > time_in_server.since_ns AND steps.begin_unix_ns < time_in_server.until_ns
LEFT JOIN own ON steps.engine = own.engine AND steps.step BETWEEN own.first_step AND own.last_step
WHERE steps.dataset = $dataset AND steps.engine IN (SELECT engine FROM own)
ORDER BY steps.begin_unix_ns, steps.step
LIMIT $most
