"""Figures that only the dashboard has: pure functions of rows."""
