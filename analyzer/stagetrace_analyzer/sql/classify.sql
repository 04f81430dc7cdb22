-- Makes the table classified: the requests that can be used and were selected, with their class.
--
-- The expressions that class rules and selection compile to are put in the places in
-- braces; they use columns of facts.
--
-- Parameters: those of the expressions; by_phase (boolean); classes (list of names,
--   null for all)
-- Columns:
--   dataset, request        the request in its dataset
--   traffic_class           class by the rules
--   run                     phase of an experiment, null if none was told
--   phase                   the same, but null unless by_phase
--   outcome, joined         as in requests
--   received_unix_ns        ns since the epoch
--   intended_unix_ns        ns since the epoch, null if not told
--   ttft_ns, completion_ns  ns, null if not reached
--   ended_ns                ns, null if it is not known
CREATE TEMP TABLE classified AS
WITH selected AS (
    SELECT *, {traffic_class} AS traffic_class
    FROM facts
    WHERE fault IS NULL AND {selected}
)
SELECT
    dataset,
    request,
    traffic_class,
    phase AS run,
    CASE WHEN $by_phase THEN phase END AS phase,
    outcome,
    joined,
    received_unix_ns,
    intended_unix_ns,
    ttft_ns,
    completion_ns,
    ended_ns
FROM selected
WHERE $classes IS NULL OR list_contains($classes, traffic_class)
