"""A real browser for tests: the system's Chromium, or the one that Playwright has installed."""

from __future__ import annotations

import contextlib
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def chromium():
    """Start a Chromium; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = [path for name in NAMES if (path := shutil.which(name))]
    with playwright.sync_playwright() as started:
        try:
            running = started.chromium.launch(
                executable_path=found[0] if found else None, args=["--no-sandbox"]
            )
        except playwright.Error as error:
            pytest.skip(f"needs a Chromium: {str(error).splitlines()[0]}")
        yield running
        running.close()
