-- What there is to select from; unknown values are left out of the lists.
--
-- The CASE that the class rules compile to is put in the place in braces; it uses
-- columns of facts.
--
-- Parameters: those of the CASE
-- Columns:
--   requests                        count
--   faults                          map of what is wrong with a request to requests; all else is of the others
--   oldest_unix_ns, newest_unix_ns  ns since the epoch, receipt; null without requests
--   classes                         list of names
--   models, arms, instances         lists of names, sorted; null if there is none
SELECT
    (SELECT count(*) FROM facts) AS requests,
    (SELECT histogram(fault) FROM facts WHERE fault IS NOT NULL) AS faults,
    min(received_unix_ns) AS oldest_unix_ns,
    max(received_unix_ns) AS newest_unix_ns,
    list(DISTINCT {traffic_class}) AS classes,
    list_sort(list(DISTINCT model) FILTER (WHERE model IS NOT NULL)) AS models,
    list_sort(list(DISTINCT arm) FILTER (WHERE arm IS NOT NULL)) AS arms,
    list_sort(list(DISTINCT instance)) AS instances
FROM facts
WHERE fault IS NULL
