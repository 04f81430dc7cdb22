"""The dashboard: see where requests wait."""
