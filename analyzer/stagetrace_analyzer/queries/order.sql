-- The requests that meet all conditions, in an order.
--
-- Parameters: each null for any
--   traffic_class, phase, model, arm, instance, outcome, longest_wait  text, equal
--   since_unix_ns, until_unix_ns  ns, received in [since, until)
--   media_items                   count, equal
--   min_ttft_ns, max_ttft_ns      ns, both included; a request without a first token is above each
--   min_completion_ns, max_completion_ns  likewise
--   id                            text, equal to one of the request's ids
--   sort                          name of a column
--   sign                          1 ascending, -1 descending; unknown values are last in both
-- Columns: row (as in listed)
SELECT row
FROM listed
WHERE selected
    AND ($traffic_class IS NULL OR traffic_class = $traffic_class)
    AND ($phase IS NULL OR phase = $phase)
    AND ($model IS NULL OR model = $model)
    AND ($arm IS NULL OR arm = $arm)
    AND ($instance IS NULL OR instance = $instance)
    AND ($outcome IS NULL OR outcome = $outcome)
    AND ($longest_wait IS NULL OR longest_wait = $longest_wait)
    AND ($since_unix_ns IS NULL OR received_unix_ns >= $since_unix_ns)
    AND ($until_unix_ns IS NULL OR received_unix_ns < $until_unix_ns)
    AND ($media_items IS NULL OR media_items = $media_items)
    AND ($min_ttft_ns IS NULL OR ttft_ns IS NULL OR ttft_ns >= $min_ttft_ns)
    AND ($max_ttft_ns IS NULL OR ttft_ns <= $max_ttft_ns)
    AND ($min_completion_ns IS NULL OR completion_ns IS NULL OR completion_ns >= $min_completion_ns)
    AND ($max_completion_ns IS NULL OR completion_ns <= $max_completion_ns)
    AND ($id IS NULL OR $id IN (request_id, external_id, trace_id))
ORDER BY
    $sign * CASE $sort
        WHEN 'ttft_ns' THEN ttft_ns
        WHEN 'completion_ns' THEN completion_ns
        WHEN 'waited_ns' THEN waited_ns
        WHEN 'media_items' THEN media_items
        WHEN 'pixels' THEN pixels
        WHEN 'prompt_tokens' THEN prompt_tokens
        WHEN 'output_tokens' THEN output_tokens
        WHEN 'max_tokens' THEN max_tokens
        WHEN 'traffic_class' THEN
            CASE
                WHEN traffic_class IS NOT NULL
                    THEN list_position((SELECT list(DISTINCT traffic_class ORDER BY traffic_class) FROM listed), traffic_class)
            END
        WHEN 'phase' THEN
            CASE
                WHEN phase IS NOT NULL
                    THEN list_position((SELECT list(DISTINCT phase ORDER BY phase) FROM listed), phase)
            END
        WHEN 'outcome' THEN
            CASE
                WHEN outcome IS NOT NULL
                    THEN list_position((SELECT list(DISTINCT outcome ORDER BY outcome) FROM listed), outcome)
            END
        WHEN 'longest_wait' THEN
            CASE
                WHEN longest_wait IS NOT NULL
                    THEN list_position((SELECT list(DISTINCT longest_wait ORDER BY longest_wait) FROM listed), longest_wait)
            END
        ELSE row
    END NULLS LAST,
    row
