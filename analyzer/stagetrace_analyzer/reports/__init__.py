"""Reports: an analysis as text or JSON; nothing here computes."""
