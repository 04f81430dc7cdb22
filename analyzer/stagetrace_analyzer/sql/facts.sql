-- Makes the view facts: requests with what class rules and selections ask for beside their columns.
--
-- Columns: those of requests
--   modality  image, text, or null if unknown
--   fault     why the request cannot be used, null if it can: no figure is of one that has a fault
CREATE VIEW facts AS
SELECT
    *,
    CASE WHEN media_items > 0 THEN 'image' WHEN media_items = 0 THEN 'text' END AS modality,
    CASE
        WHEN received_unix_ns <= 0 OR received_unix_ns >= 4_102_444_800_000_000_000
            THEN 'received before 1970 or after 2099'
        WHEN coalesce(ttft_ns, 0) < 0 OR coalesce(completion_ns, 0) < 0 OR coalesce(ended_ns, 0) < 0
            THEN 'that ended before they began'
        -- Longer times are not exact as floating-point numbers.
        WHEN coalesce(ttft_ns, 0) > 9_007_199_254_740_992
            OR coalesce(completion_ns, 0) > 9_007_199_254_740_992
            OR coalesce(ended_ns, 0) > 9_007_199_254_740_992
            THEN 'that took over 104 days'
    END AS fault
FROM requests
