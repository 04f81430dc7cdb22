-- The intervals of one request, in time.
--
-- Parameters: dataset, request
-- Columns:
--   horizon                  ttft, completion or both
--   stage, kind, reason, holder, role
--   begin_ns, duration_ns    ns from receipt; ns
--   item                     media item, null if of none
--   first_step, last_step    steps of the engine, null if outside of it
--   recompute                whether it did again what had been done
SELECT
    horizon, stage, kind, reason, holder, role, begin_ns, duration_ns, item, first_step, last_step, recompute
FROM stages
WHERE dataset = $dataset AND request = $request
ORDER BY begin_ns, horizon, occurrence
