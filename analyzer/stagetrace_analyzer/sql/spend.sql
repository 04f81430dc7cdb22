-- Makes the table spent: how long each request was in each stage, by horizon.
-- An interval that both horizons share counts in both.
--
-- Columns:
--   request   number in classified
--   horizon   ttft or completion
--   stage     name of the stage
--   kind      work, wait, transfer or unattributed
--   spent_ns  ns in the stage on the horizon, over all its intervals
CREATE TEMP TABLE spent AS
WITH intervals AS (
    SELECT
        classified.request,
        unnest(CASE horizon WHEN 'both' THEN ['ttft', 'completion'] ELSE [horizon] END) AS horizon,
        stage,
        kind,
        duration_ns
    FROM stages
    INNER JOIN classified USING (dataset, request_id)
)
SELECT request, horizon, stage, kind, sum(duration_ns)::BIGINT AS spent_ns
FROM intervals
GROUP BY request, horizon, stage, kind
