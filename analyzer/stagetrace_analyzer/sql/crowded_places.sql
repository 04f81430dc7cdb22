-- Makes the table places anew where a stage has very many reasons.
--
-- The figures of an analysis take memory by place.  So the reasons with the least time are
-- one place, other, in a stage that has more reasons than a scheduler can have.
--
-- Parameters: most (count of reasons that are told apart)
-- Columns: as in places
CREATE OR REPLACE TEMP TABLE places AS
SELECT dense_rank() OVER (ORDER BY stage, kind, named) - 1 AS place, *
FROM (
    SELECT
        stage,
        kind,
        reason,
        CASE
            WHEN reason IS NULL THEN NULL
            WHEN row_number() OVER (
                PARTITION BY stage, kind, reason IS NULL ORDER BY sum(duration_ns) DESC, reason
            ) > $most
                THEN 'other'
            ELSE reason
        END AS named
    FROM stages
    GROUP BY stage, kind, reason
)
