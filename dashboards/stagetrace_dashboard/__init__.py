"""The dashboard: see where requests wait."""

from stagetrace import __version__

__all__ = ["__version__"]

_js_dist = [{"relative_package_path": "elements.js", "namespace": "stagetrace_dashboard"}]
"""Scripts of its own components, as Dash looks for them."""
