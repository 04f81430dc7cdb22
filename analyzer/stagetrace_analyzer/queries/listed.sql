-- Makes the table listed: what a list of requests shows, sorts and filters by.  Requests that
-- cannot be used are not in it, as in all figures.
--
-- The expressions that class rules and selection compile to are put in the places in
-- braces; they use columns of facts.
--
-- Parameters: those of the expressions; classes (list of names, null for all)
-- Columns:
--   row               number in the order of receipt, from 0
--   dataset, request  the request
--   request_id, external_id, trace_id, instance, model, phase, label, arm
--   traffic_class     class by the rules
--   received_unix_ns  ns since the epoch
--   ttft_ns, completion_ns  ns, null if not reached
--   ended_ns          ns from receipt to the end, however it ended; null if unknown
--   waited_ns         ns in stages of kind wait on the ttft horizon; null if no stage is known
--   longest_wait      the one of them in which it was longest, null if in none
--   outcome, error_code, ended_stage
--   media_items, pixels, prompt_tokens, output_tokens, max_tokens  counts, null if unknown
--   selected          whether it is in the selection; lists have no other
CREATE OR REPLACE TABLE listed AS
WITH by_stage AS (
    SELECT dataset, request, stage, kind = 'wait' AS is_wait, sum(duration_ns) AS spent_ns
    FROM stages
    WHERE horizon IN ('both', 'ttft')
    GROUP BY dataset, request, stage, kind = 'wait'
),
waited AS (
    SELECT
        dataset,
        request,
        -- Intervals of others' making may add up to more than a number holds: that is unknown.
        try_cast(coalesce(sum(spent_ns) FILTER (WHERE is_wait), 0) AS BIGINT) AS waited_ns,
        arg_max(stage, spent_ns) FILTER (WHERE is_wait AND spent_ns > 0) AS longest_wait
    FROM by_stage
    GROUP BY dataset, request
)
SELECT
    row_number() OVER (ORDER BY received_unix_ns, facts.dataset, facts.request) - 1 AS row,
    facts.dataset,
    facts.request,
    request_id,
    external_id,
    trace_id,
    instance,
    model,
    phase,
    label,
    arm,
    {traffic_class} AS traffic_class,
    received_unix_ns,
    ttft_ns,
    completion_ns,
    ended_ns,
    waited.waited_ns,
    waited.longest_wait,
    outcome,
    error_code,
    ended_stage,
    media_items,
    pixels,
    prompt_tokens,
    output_tokens,
    max_tokens,
    {selected} AND ($classes IS NULL OR list_contains($classes, traffic_class)) AS selected
FROM facts
LEFT JOIN waited ON facts.dataset = waited.dataset AND facts.request = waited.request
WHERE fault IS NULL
ORDER BY row
