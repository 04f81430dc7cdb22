"""Figures: result objects as plotly figures; pure functions that compute and store nothing."""
