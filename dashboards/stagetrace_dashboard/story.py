"""Everything about one request, as a waterfall and the facts beside it need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagetrace_analyzer.queries.requests import (
    Company,
    Mate,
    MediaItem,
    StageInterval,
    StepBeside,
    request_facts,
    request_media,
    request_stages,
    request_steps,
    step_company,
    step_mates,
)

if TYPE_CHECKING:
    import duckdb

    from stagetrace_dashboard.data import Data
    from stagetrace_dashboard.view import RequestKey

Fact = int | str | bool | None


@dataclass(frozen=True, slots=True)
class Story:
    """One request.

    Attributes:
        key: Which one.
        facts: Its row of ``requests``, by column.
        stages: Its intervals, in time.
        media: Its media items.
        steps: Steps of its engines while it was in the server, whether it was in them or not.
        company: Who else was in each of these steps, by engine and step.
        mates: The requests that shared most steps with it.
    """

    key: RequestKey
    facts: Mapping[str, Fact]
    stages: Sequence[StageInterval]
    media: Sequence[MediaItem]
    steps: Sequence[StepBeside]
    company: Mapping[tuple[str, int], Sequence[Company]]
    mates: Sequence[Mate]

    @property
    def received_unix_ns(self) -> int:
        """When it was received."""
        return int(self.facts["received_unix_ns"] or 0)

    @property
    def length_ns(self) -> int:
        """From receipt to the end of what is known of it."""
        ends = [stage.begin_ns + stage.duration_ns for stage in self.stages]
        return max([*ends, int(self.facts["completion_ns"] or 0), int(self.facts["ended_ns"] or 0)])


def read_story(data: Data, key: RequestKey) -> Story | None:
    """Read all about a request; None if there is no such request."""
    return data.remember(key, lambda: data.ask_lists(lambda connection: _read(connection, data, key)))


def _read(connection: duckdb.DuckDBPyConnection, data: Data, key: RequestKey) -> Story | None:
    facts = request_facts(connection, *key)
    if facts is None:
        return None
    steps = request_steps(connection, *key, data.limits.waterfall_steps)
    return Story(
        key=key,
        facts=facts,
        stages=request_stages(connection, *key),
        media=request_media(connection, *key),
        steps=steps,
        company=_company(connection, key, steps),
        mates=step_mates(connection, *key, data.limits.mates),
    )


def _company(
    connection: duckdb.DuckDBPyConnection, key: RequestKey, steps: Sequence[StepBeside]
) -> dict[tuple[str, int], list[Company]]:
    found: dict[tuple[str, int], list[Company]] = {}
    for engine in sorted({step.engine for step in steps}):
        numbers = [step.step for step in steps if step.engine == engine]
        for company in step_company(connection, *key, engine, (min(numbers), max(numbers))):
            found.setdefault((engine, company.step), []).append(company)
    return found
