-- The hosts' clocks: how far the wall clock moved against the monotonic one.
--
-- Columns:
--   clock                        name of the monotonic clock; processes with equal ones share it
--   hosts                        names that its processes have for their host
--   datasets, processes          count that have readings of it
--   readings                     count
--   first_unix_ns, last_unix_ns  ns since the epoch, as all times of the data: first and last reading
--   span_ns                      ns between them
--   moved_ns                     ns that the wall clock gained between them, negative if it lost
--   ppm                          millionths of the span that it gained; null below an hour, over which the
--                                10 ms that a reading may be wrong by are 3 millionths, and if it jumped
--                                by more than those
--   jump_ns                      ns that it gained between two neighbouring readings where that is most,
--                                negative if it lost; null with one reading
--   jump_after_unix_ns           ns since the epoch: the earlier one of the two
--   jump_before_unix_ns          ns since the epoch: the later one
WITH moves AS (
    SELECT clock, monotonic_ns, at_unix_ns - monotonic_ns AS ahead_ns,
        ahead_ns - lag(ahead_ns) OVER by_time AS gained_ns, lag(monotonic_ns) OVER by_time AS since_ns
    FROM (SELECT DISTINCT clock, process, at_unix_ns, monotonic_ns FROM clocks)
    WINDOW by_time AS (PARTITION BY clock ORDER BY monotonic_ns, at_unix_ns)
),
moved AS (
    SELECT clock, count(*) AS readings, min(monotonic_ns) AS first_ns, max(monotonic_ns) AS last_ns,
        last_ns - first_ns AS span_ns, arg_max(ahead_ns, monotonic_ns) AS ahead_ns,
        arg_max(ahead_ns, monotonic_ns) - arg_min(ahead_ns, monotonic_ns) AS moved_ns,
        arg_max(gained_ns, abs(gained_ns)) AS jump_ns, arg_max(since_ns, abs(gained_ns)) AS since_ns,
        arg_max(monotonic_ns, abs(gained_ns)) AS until_ns
    FROM moves
    GROUP BY clock
),
named AS (
    SELECT clock, list(DISTINCT host ORDER BY host) AS hosts, count(DISTINCT dataset) AS datasets,
        count(DISTINCT process) AS processes
    FROM clocks
    GROUP BY clock
)
SELECT clock, hosts, datasets, processes, readings, first_ns + ahead_ns AS first_unix_ns,
    last_ns + ahead_ns AS last_unix_ns, span_ns, moved_ns,
    CASE WHEN span_ns >= 3_600_000_000_000 AND abs(jump_ns) <= 10_000_000 THEN moved_ns * 1e6 / span_ns
    END AS ppm,
    jump_ns, since_ns + ahead_ns AS jump_after_unix_ns, until_ns + ahead_ns AS jump_before_unix_ns
FROM moved
JOIN named USING (clock)
ORDER BY first_unix_ns, clock
