"""Engine: its steps over time, to find by eye where one stalled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dash.development.base_component import Component

from stagetrace_analyzer.figures.palette import Theme
from stagetrace_analyzer.queries.steps import (
    Engine,
    EngineStep,
    longest_steps,
    step_buckets,
    step_count,
    steps_between,
)
from stagetrace_dashboard.figures.steps import Stretch, steps_over_time, stretch_of_bucket, stretch_of_step
from stagetrace_dashboard.filters import engine_name
from stagetrace_dashboard.page import Page, Table
from stagetrace_dashboard.parts import card, download, graph, link, nothing, picture_buttons, stack, table
from stagetrace_dashboard.view import View
from stagetrace_dashboard.words import NOTHING, clock_time, count, duration

if TYPE_CHECKING:
    from stagetrace_dashboard.data import Data

_FIGURE: Final = "steps"
_COMMAND: Final = "STAGETRACE_SPOOL=spool/ vllm serve MODEL\nstagetrace dashboard spool/"


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of an engine in a time.

    Attributes:
        engine: Which one.
        since_unix_ns: Begin of the time.
        until_unix_ns: End of the time.
        steps: How many there are.
        stretches: Each of them, or several as one if there are too many.
        longest: The longest ones.
    """

    engine: Engine
    since_unix_ns: int
    until_unix_ns: int
    steps: int
    stretches: Sequence[Stretch]
    longest: Sequence[EngineStep]

    @property
    def are_single(self) -> bool:
        """Whether every stretch is one step."""
        return all(stretch.steps == 1 for stretch in self.stretches)


def layout(view: View, data: Data, theme: Theme) -> Component:
    """Return the steps over time, and the longest of them."""
    found = read_steps(view, data)
    if found is None and data.engines():
        return stack(
            nothing("No such engine", "The data have no steps of this engine; they may be of other data."),
            link("show the first engine", view.choose(engine=None).href),
        )
    if found is None:
        return nothing(
            "No steps were recorded",
            "This page needs the steps of an engine, which the plug-in records inside a vLLM server:",
            _COMMAND,
        )
    if not found.steps:
        whole = view.choose(since_unix_ns=None, until_unix_ns=None)
        return stack(
            nothing("No step in this time", "The engine scheduled nothing then."),
            link("show all", whole.href),
        )
    return stack(_over_time(found, view, theme), _longest(found, view))


def read_steps(view: View, data: Data) -> Steps | None:
    """Read the steps that a view is of; None if there is no engine, or not the one that it names."""
    engine = next((e for e in data.engines() if view.engine in {None, engine_name(e)}), None)
    if engine is None:
        return None
    begin, end = data.times(view)
    since = engine.first_unix_ns if begin is None else begin
    until = engine.last_unix_ns + 1 if end is None else end
    return data.remember((engine, since, until), lambda: _read(engine, since, until, data))


def _read(engine: Engine, since: int, until: int, data: Data) -> Steps:
    steps = data.ask(lambda connection: step_count(connection, engine, since, until))
    return Steps(
        engine,
        since,
        until,
        steps,
        _stretches(engine, since, until, data, steps),
        data.ask(
            lambda connection: longest_steps(connection, engine, since, until, data.limits.longest_steps)
        ),
    )


def _stretches(engine: Engine, since: int, until: int, data: Data, steps: int) -> list[Stretch]:
    most = data.limits.steps
    if steps <= most:
        found = data.ask(lambda connection: steps_between(connection, engine, since, until, most))
        return [stretch_of_step(step) for step in found]
    buckets = data.ask(lambda connection: step_buckets(connection, engine, since, until, most))
    bucket_ns = max(1, -(-(until - since) // most))
    return [stretch_of_bucket(bucket, bucket_ns) for bucket in buckets]


def _over_time(found: Steps, view: View, theme: Theme) -> Component:
    if found.are_single:
        note = "Every step by itself. "
    else:
        length = duration(found.stretches[0].end_unix_ns - found.stretches[0].begin_unix_ns)
        note = f"Steps of {length} put together; closer, every step is drawn by itself. "
    return card(
        f"{found.steps:,} steps of {found.engine.engine}",
        graph(_FIGURE, steps_over_time(found.stretches, theme), theme, "time"),
        actions=[*picture_buttons(_FIGURE), download("CSV", PAGE.csv_href(view, "steps"))],
        note=note + "Drag over a time to look closer. A gap while requests wait is a stall.",
    )


def _longest(found: Steps, view: View) -> Component:
    columns = {
        "step": True,
        "at, UTC": False,
        "took": True,
        "encoding": True,
        "requests": True,
        "prompt tokens": True,
        "decodes": True,
        "items encoded": True,
        "waiting": True,
        "because of": False,
    }
    rows = [_row(step, view) for step in found.longest]
    return card("Longest steps", table(columns, rows), note="A time opens the steps around it.")


def _row(step: EngineStep, view: View) -> list[Any]:
    at = step.scheduled_unix_ns if step.begin_unix_ns is None else step.begin_unix_ns
    around = max(step.duration_ns or 0, 1_000_000) * 2
    near = view.choose(since_unix_ns=_whole_ms(at - around), until_unix_ns=_whole_ms(at + 2 * around))
    return [
        str(step.step),
        link(clock_time(at), near.href),
        duration(step.duration_ns),
        duration(step.encoder_ns),
        count(step.requests),
        count(step.tokens - step.decodes),
        count(step.decodes),
        count(step.encoder_items),
        count(step.waiting),
        step.reason or NOTHING,
    ]


def _whole_ms(unix_ns: int) -> int:
    return unix_ns // 1_000_000 * 1_000_000


def twin(view: View, data: Data) -> Any:
    """Return what the page shows."""
    return {"engines": data.engines(), "steps": read_steps(view, data)}


def steps_table(view: View, data: Data) -> Table:
    """Return the steps of the view's time as a file, up to `Limits.csv_rows`."""
    found = read_steps(view, data)
    if found is None:
        return Table(EngineStep._fields, ())
    most = data.limits.csv_rows
    rows = data.ask(
        lambda connection: steps_between(
            connection, found.engine, found.since_unix_ns, found.until_unix_ns, most
        )
    )
    return Table(EngineStep._fields, rows)


PAGE: Final = Page(
    name="engine",
    title="Engine",
    layout=layout,
    twin=twin,
    filters=("engine",),
    tables={"steps": steps_table},
    needs_requests=False,
)
