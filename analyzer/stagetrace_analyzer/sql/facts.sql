-- Makes the view facts: requests with what class rules and selections ask for beside their columns.
--
-- Columns: those of requests; modality (image, text, or null if unknown)
CREATE VIEW facts AS
SELECT
    *,
    CASE WHEN media_items > 0 THEN 'image' WHEN media_items = 0 THEN 'text' END AS modality
FROM requests
