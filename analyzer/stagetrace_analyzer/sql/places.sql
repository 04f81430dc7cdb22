-- Makes the table places: where requests are, and why they wait there.
--
-- Columns:
--   place         number from 0
--   stage, kind
--   reason        as in stages, null if none is recorded
--   named         what the reason is called in figures
CREATE TEMP TABLE places AS
SELECT
    row_number() OVER (ORDER BY stage, kind, reason) - 1 AS place,
    stage,
    kind,
    reason,
    reason AS named
FROM (SELECT DISTINCT stage, kind, reason FROM stages)
