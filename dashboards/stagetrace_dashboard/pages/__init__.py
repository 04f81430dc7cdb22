"""The pages, in the order of the menu."""

from __future__ import annotations

from typing import Final

from stagetrace_dashboard.page import Page
from stagetrace_dashboard.pages import classes, engine, overview, quality, requests

PAGES: Final[dict[str, Page]] = {
    page.name: page for page in (overview.PAGE, classes.PAGE, requests.PAGE, engine.PAGE, quality.PAGE)
}
"""Every page by its name; the address ``/`` is that of the first."""
