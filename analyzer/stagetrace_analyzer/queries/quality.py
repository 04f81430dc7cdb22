"""Where the data come from and what is missing of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stagetrace_analyzer.queries.reading import fetch

if TYPE_CHECKING:
    import duckdb


class Reporter(NamedTuple):
    """A process that told something, see ``processes.sql``."""

    dataset: int
    role: str
    process: str
    things: int
    first_unix_ns: int
    last_unix_ns: int
    lags: int | None
    longest_lag_ns: int | None


class Ingested(NamedTuple):
    """A row of a dataset's ingest report."""

    dataset: int
    name: str
    reason: str
    number: int


class Checked(NamedTuple):
    """A thing counted by two witnesses in one dataset."""

    dataset: int
    name: str
    expected: float
    found: float
    tolerance: float
    holds: bool


def processes(connection: duckdb.DuckDBPyConnection) -> list[Reporter]:
    """Return the processes that told anything."""
    return fetch(connection, "processes", Reporter)


def ingested(connection: duckdb.DuckDBPyConnection) -> list[Ingested]:
    """Return what was read into each dataset, and what was set aside."""
    return fetch(connection, "ingested", Ingested)


def checks(connection: duckdb.DuckDBPyConnection) -> list[Checked]:
    """Return the counts of one thing by two witnesses."""
    return fetch(connection, "checks", Checked)
