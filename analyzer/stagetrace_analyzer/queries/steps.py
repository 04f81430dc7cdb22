"""The steps of an engine over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stagetrace_analyzer.queries.reading import fetch

if TYPE_CHECKING:
    import duckdb


class Engine(NamedTuple):
    """An engine and the time that its steps cover, in ns since the epoch."""

    dataset: int
    engine: str
    steps: int
    first_unix_ns: int
    last_unix_ns: int


class EngineStep(NamedTuple):
    """A step, see ``steps.sql``."""

    step: int
    scheduled_unix_ns: int
    begin_unix_ns: int | None
    end_unix_ns: int | None
    encoder_ns: int | None
    requests: int
    tokens: int
    decodes: int
    encoder_items: int
    running: int
    waiting: int
    reason: str | None

    @property
    def duration_ns(self) -> int | None:
        """How long it took, None if that is not known."""
        if self.begin_unix_ns is None or self.end_unix_ns is None:
            return None
        return self.end_unix_ns - self.begin_unix_ns


class StepBucket(NamedTuple):
    """The steps of a stretch of time, see ``step_buckets.sql``."""

    begin_unix_ns: int
    steps: int
    busy_ns: int
    prompt_tokens: int
    decodes: int
    longest_ns: int | None
    longest_step: int | None
    longest_encoder_ns: int
    encoder_items: int
    running: int
    waiting: int
    reason: str | None


class _Count(NamedTuple):
    steps: int


def engines(connection: duckdb.DuckDBPyConnection) -> list[Engine]:
    """Return the engines whose steps were recorded."""
    return fetch(connection, "engines", Engine)


def step_count(connection: duckdb.DuckDBPyConnection, engine: Engine, since_ns: int, until_ns: int) -> int:
    """Return how many steps an engine scheduled in [since, until), in ns since the epoch."""
    return fetch(connection, "step_count", _Count, _stretch(engine, since_ns, until_ns))[0].steps


def steps_between(
    connection: duckdb.DuckDBPyConnection, engine: Engine, since_ns: int, until_ns: int, most: int
) -> list[EngineStep]:
    """Return the first ``most`` steps that an engine scheduled in [since, until)."""
    parameters = _stretch(engine, since_ns, until_ns) | {"most": most, "longest": False}
    return fetch(connection, "steps", EngineStep, parameters)


def longest_steps(
    connection: duckdb.DuckDBPyConnection, engine: Engine, since_ns: int, until_ns: int, most: int
) -> list[EngineStep]:
    """Return the ``most`` longest steps that an engine scheduled in [since, until)."""
    parameters = _stretch(engine, since_ns, until_ns) | {"most": most, "longest": True}
    return fetch(connection, "steps", EngineStep, parameters)


def step_buckets(
    connection: duckdb.DuckDBPyConnection, engine: Engine, since_ns: int, until_ns: int, buckets: int
) -> list[StepBucket]:
    """Return the steps of [since, until) in at most ``buckets`` equal stretches; empty ones are absent."""
    bucket_ns = max(1, -(-(until_ns - since_ns) // buckets))
    stretch = _stretch(engine, since_ns, until_ns)
    return fetch(connection, "step_buckets", StepBucket, stretch | {"bucket_ns": bucket_ns})


def _stretch(engine: Engine, since_ns: int, until_ns: int) -> dict[str, int | str]:
    return {
        "dataset": engine.dataset,
        "engine": engine.engine,
        "since_unix_ns": since_ns,
        "until_unix_ns": until_ns,
    }
