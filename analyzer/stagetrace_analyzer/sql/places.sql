-- Makes the table places: where requests are, and why they wait there.
--
-- The figures of an analysis take memory by place.  So the reasons with the least time are
-- one place, other, in a stage that has more reasons than a scheduler can have.
--
-- Columns:
--   place         number from 0
--   stage, kind
--   reason        as in stages, null if none is recorded
--   named         what the reason is called in figures
CREATE TEMP TABLE places AS
SELECT dense_rank() OVER (ORDER BY stage, kind, named) - 1 AS place, *
FROM (
    SELECT
        stage,
        kind,
        reason,
        CASE
            WHEN reason IS NULL THEN NULL
            WHEN row_number() OVER (PARTITION BY stage, kind ORDER BY sum(duration_ns) DESC, reason) > 30
                THEN 'other'
            ELSE reason
        END AS named
    FROM stages
    GROUP BY stage, kind, reason
)
