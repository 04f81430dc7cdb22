-- The media items of one request.
--
-- Parameters: dataset, request
-- Columns:
--   item, scheme, host, format, bytes, width, height, tokens, hash, fetch_attempts
--   media_cache, processor_cache, encoder_cache  each cache's answer
--   begin_ns, ready_ns  ns from receipt
--   slack_ns            ns that it could have been later without delaying the request
SELECT
    item, scheme, host, format, bytes, width, height, tokens, hash, fetch_attempts,
    media_cache, processor_cache, encoder_cache, begin_ns, ready_ns, slack_ns
FROM media
WHERE dataset = $dataset AND request = $request
ORDER BY item
