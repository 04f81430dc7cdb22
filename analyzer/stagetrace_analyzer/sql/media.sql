-- Media items of all requests of a class, but those of a negative size.
--
-- Columns:
--   traffic_class, phase
--   items            count
--   mean_bytes       bytes an item, over items of known size; null if none is known
--   mean_pixels      pixels an item, over items of known size; null if none is known
--   processor_cache  map of the answer of the cache, or unknown, to items
--   encoder_cache    map of the answer of the cache, or unknown, to items
SELECT
    classified.traffic_class,
    classified.phase,
    count(*) AS items,
    avg(media.bytes) AS mean_bytes,
    avg(media.width::DOUBLE * media.height) AS mean_pixels,
    histogram(coalesce(media.processor_cache, 'unknown')) AS processor_cache,
    histogram(coalesce(media.encoder_cache, 'unknown')) AS encoder_cache
FROM media
INNER JOIN classified USING (dataset, request)
WHERE coalesce(least(media.bytes, media.width, media.height), 0) >= 0
GROUP BY classified.traffic_class, classified.phase
