-- Makes the table classified: the requests that are analysed.
--
-- The CASE that the class rules compile to is put in the place in braces; it uses
-- columns of facts.  Warm-up is left out where there is anything else.
--
-- Parameters: those of the CASE; by_phase (boolean)
-- Columns:
--   request                 number of the request in this analysis
--   dataset, request_id     the request in the dataset
--   traffic_class           class by the rules
--   phase                   phase of an experiment; null unless by_phase
--   outcome, joined         as in requests
--   received_unix_ns        ns since the epoch
--   ttft_ns, completion_ns  ns, null if not reached
CREATE TEMP TABLE classified AS
WITH facts AS (
    SELECT
        *,
        CASE WHEN media_items > 0 THEN 'image' WHEN media_items = 0 THEN 'text' END AS modality
    FROM requests
)
SELECT
    row_number() OVER () AS request,
    dataset,
    request_id,
    {traffic_class} AS traffic_class,
    CASE WHEN $by_phase THEN phase END AS phase,
    outcome,
    joined,
    received_unix_ns,
    ttft_ns,
    completion_ns
FROM facts
WHERE phase IS DISTINCT FROM 'warm-up'
    OR NOT EXISTS (SELECT 1 FROM requests WHERE phase IS DISTINCT FROM 'warm-up')
