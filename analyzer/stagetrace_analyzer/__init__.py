"""Reads what was recorded, and says who waits where, and because of whom."""
