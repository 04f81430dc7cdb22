"""The table of what was damaged, what was lost by it, and what the report said."""

from __future__ import annotations

import pytest

ROWS = pytest.StashKey[list]()


@pytest.fixture
def tell(request):
    """Notes a case of damage: what was done, what was lost, what the report said."""

    def tell(done, lost, said):
        request.config.stash.setdefault(ROWS, []).append((done, lost, said))

    return tell


def pytest_terminal_summary(terminalreporter, config):
    """Print the table, as it stands in the documentation."""
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("damage")
        for row in [("what was done", "what was lost", "what the report said"), *rows]:
            terminalreporter.write_line("| " + " | ".join(row) + " |")
