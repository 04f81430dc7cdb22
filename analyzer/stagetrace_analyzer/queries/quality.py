"""Where the data come from and what is missing of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stagetrace_analyzer.queries.reading import fetch

if TYPE_CHECKING:
    import duckdb


class Reporter(NamedTuple):
    """A process that wrote, see ``processes.sql``."""

    dataset: int
    role: str
    process: str
    pid: int | None
    host: str | None
    clock: str | None
    service: str | None
    model: str | None
    version: str | None
    stagetrace_version: str | None
    records: int | None
    requests: int | None
    steps: int | None
    first_unix_ns: int | None
    last_unix_ns: int | None
    lags: int | None
    longest_lag_ns: int | None


class HostClock(NamedTuple):
    """A host's monotonic clock, and how the wall clock moved against it, see ``clocks.sql``."""

    clock: str
    hosts: list[str]
    datasets: int
    processes: int
    readings: int
    first_unix_ns: int
    last_unix_ns: int
    span_ns: int
    moved_ns: int
    ppm: float | None
    jump_ns: int | None
    jump_after_unix_ns: int | None
    jump_before_unix_ns: int | None


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
    """Return the processes that wrote, also those that told no request and no step."""
    return fetch(connection, "processes", Reporter)


def clocks(connection: duckdb.DuckDBPyConnection) -> list[HostClock]:
    """Return the clocks of the hosts, in the order in which they were first read."""
    return fetch(connection, "clocks", HostClock)


def ingested(connection: duckdb.DuckDBPyConnection) -> list[Ingested]:
    """Return what was read into each dataset, and what was set aside."""
    return fetch(connection, "ingested", Ingested)


def checks(connection: duckdb.DuckDBPyConnection) -> list[Checked]:
    """Return the counts of one thing by two witnesses."""
    return fetch(connection, "checks", Checked)
