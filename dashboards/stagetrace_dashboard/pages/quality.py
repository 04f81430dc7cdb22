"""Data quality: who told, what is missing, whether two witnesses agree, and what the clocks did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from stagetrace.spool import JUMP_NS
from stagetrace_analyzer.figures.labels import HORIZONS
from stagetrace_analyzer.queries.quality import (
    Checked,
    HostClock,
    Ingested,
    Reporter,
    checks,
    clocks,
    processes,
)
from stagetrace_analyzer.reports.words import counts, title
from stagetrace_dashboard.page import Page, Table
from stagetrace_dashboard.parts import card, download, facts, stack, table
from stagetrace_dashboard.words import NOTHING, clock_time, count, date_time, duration, percent

if TYPE_CHECKING:
    from stagetrace.stages import Horizon
    from stagetrace_analyzer.figures.palette import Theme
    from stagetrace_analyzer.results import Analysis, WarmUp
    from stagetrace_dashboard.data import Data
    from stagetrace_dashboard.view import View

_ROLES: Final = {"api": "API server"}
_DRIFT: Final = {0: "not settled", 1: "ever slower", -1: "ever faster"}
"""By the trend of a warm-up."""

_NAMES: Final = {
    "about": "about",
    "records": "records read",
    "requests": "requests",
    "dropped": "records lost by the writers",
    "faults": "internal faults",
    "set_aside": "set aside",
    "hook_off": "hook not known",
    "not_sampled": "left out by sampling",
    "removed": "removed to make room",
    "stopped": "did not record",
    "cost_ns_per_step": "recording, ns a step",
    "cost_per_million": "recording, of a million ns",
}


@dataclass(frozen=True, slots=True)
class Quality:
    """What is known of the data themselves."""

    processes: Sequence[Reporter]
    clocks: Sequence[HostClock]
    clocks_in_words: Sequence[str]
    ingested: Sequence[Ingested]
    checks: Sequence[Checked]
    warm_ups: Sequence[WarmUp]
    joins: dict[str, int]
    unusable: Mapping[str, int]
    unattributed: dict[str, Mapping[Horizon, float | None]]
    partition_mismatches: Mapping[Horizon, int]


def read_quality(view: View, data: Data) -> Quality:
    """Read what is known of the data themselves."""
    analysis = data.analysis_of(view)
    found = data.ask(clocks)
    return Quality(
        data.ask(processes),
        found,
        tuple(clocks_in_words(found, len(data.folders))),
        data.ingested,
        data.ask(checks),
        analysis.warm_ups,
        dict(analysis.joins),
        analysis.unusable,
        {title(report): report.unattributed for report in analysis.classes},
        analysis.partition_mismatches,
    )


def layout(view: View, data: Data, theme: Theme) -> Component:
    """Return all of it, what needs attention first."""
    del theme
    quality = read_quality(view, data)
    return stack(
        dmc.SimpleGrid(
            [_attribution(quality, data.analysis_of(view)), _checks(quality)],
            cols={"base": 1, "md": 2},
            spacing="md",
        ),
        _processes(quality),
        dmc.SimpleGrid([_ingest(quality, view), _warm_up(quality)], cols={"base": 1, "md": 2}, spacing="md"),
        _clocks(quality),
    )


def _attribution(quality: Quality, analysis: Analysis) -> Component:
    columns = {"class": False, **dict.fromkeys(HORIZONS.values(), True)}
    rows = [
        [name, *(percent(by_horizon.get(horizon)) for horizon in HORIZONS)]
        for name, by_horizon in quality.unattributed.items()
    ]
    mismatches = sum(quality.partition_mismatches.values())
    return card(
        "Unattributed time",
        table(columns, rows),
        facts(
            [
                ("seen by", counts(quality.joins)),
                ("do not add up", f"{mismatches:,} horizons"),
                ("in no class", count(analysis.unclassified)),
                ("facts not known", counts(analysis.unknown_facts)),
                ("cannot be used", counts(quality.unusable)),
            ]
        ),
        note="Share of a horizon that no record explains; more than 2 % is too much.",
    )


def _checks(quality: Quality) -> Component:
    columns = {"what": False, "expected": True, "found": True, "": False}
    rows: list[list[Any]] = [
        [check.name, count(check.expected), count(check.found), _verdict(check)]
        for check in sorted(quality.checks, key=lambda check: check.holds)
    ]
    return card("Counted twice", table(columns, rows), note="The same thing as two witnesses tell it.")


def _verdict(check: Checked) -> Component:
    if check.holds:
        return html.Span("agrees", className="st-dimmed st-whole")
    return html.Strong("disagrees", className="st-alarm st-whole")


def _processes(quality: Quality) -> Component:
    has_several = len({process.dataset for process in quality.processes}) > 1
    columns = {
        "role": False,
        "process": False,
        "host": False,
        **({"dataset": True} if has_several else {}),
        "version": False,
        "stagetrace": False,
        "records": True,
        "told": False,
        "first, UTC": False,
        "last, UTC": False,
        "late event loop": True,
    }
    rows: list[list[Any]] = [
        [
            _whole(" + ".join(_ROLES.get(role, role) for role in process.role.split("+"))),
            process.process if process.pid is None else f"{process.process}, pid {process.pid}",
            process.host or NOTHING,
            *([str(process.dataset)] if has_several else []),
            process.version or NOTHING,
            process.stagetrace_version or NOTHING,
            count(process.records),
            ", ".join(_told(process)) or NOTHING,
            _whole(_without_zone(process.first_unix_ns)),
            _whole(NOTHING if process.last_unix_ns is None else clock_time(process.last_unix_ns)),
            f"{process.lags:,}, up to {duration(process.longest_lag_ns)}" if process.lags else NOTHING,
        ]
        for process in quality.processes
    ]
    note = "Every process that wrote. A worker tells its part of an engine's steps, and no step of its own."
    return card("Processes that reported", table(columns, rows), note=note)


def _without_zone(unix_ns: int | None) -> str:
    return NOTHING if unix_ns is None else date_time(unix_ns).removesuffix(" UTC")


def _whole(text: str) -> Component:
    """Return a cell that does not break; the table scrolls where it has no room."""
    return html.Span(text, className="st-whole")


def _told(process: Reporter) -> Iterator[str]:
    for number, what in ((process.requests, "requests"), (process.steps, "steps")):
        if number is not None:
            yield f"{number:,} {what}"


def _clocks(quality: Quality) -> Component:
    columns = {
        "host": False,
        "clock": False,
        "processes": True,
        "readings": True,
        "first, UTC": False,
        "last, UTC": False,
        "wall clock moved": True,
        "ppm": True,
        "largest jump": True,
    }
    rows: list[list[Any]] = [
        [
            ", ".join(clock.hosts),
            clock.clock,
            count(clock.processes),
            count(clock.readings),
            _whole(_without_zone(clock.first_unix_ns)),
            _whole(_without_zone(clock.last_unix_ns)),
            _gained(clock.moved_ns),
            NOTHING if clock.ppm is None else f"{clock.ppm:+.1f}",
            _gained(clock.jump_ns),
        ]
        for clock in quality.clocks
    ]
    words = [dmc.Text(text, size="sm", className="st-wrap") for text in quality.clocks_in_words]
    note = (
        "How far the wall clock moved against the host's monotonic one, as read whenever a segment was "
        "opened. What it did after the last reading is not seen."
    )
    return card("Clocks", *([table(columns, rows)] if rows else []), *words, note=note if rows else None)


def _gained(ns: int | None) -> str:
    return NOTHING if ns is None else ("+" if ns > 0 else "") + duration(ns)


def clocks_in_words(found: Sequence[HostClock], datasets: int) -> Iterator[str]:
    """Say what the clocks mean for the times that are shown, a sentence or two each."""
    if not found:
        yield "No clock was read: no process recorded these data."
        return
    yield (
        "Processes of one clock are joined on its monotonic reading, so there is no skew between them, "
        "and no duration depends on the wall clock, which only dates them."
    )
    if len(found) > 1:
        yield (
            f"There are {len(found)} clocks. Nothing is joined from one to another, and their times stand "
            "side by side as their hosts' wall clocks tell them: how far those were apart is not known."
        )
    for clock in found:
        if clock.jump_ns is not None and abs(clock.jump_ns) > JUMP_NS:
            after, before = map(_without_zone, (clock.jump_after_unix_ns, clock.jump_before_unix_ns))
            yield (
                f"The wall clock of {', '.join(clock.hosts)} jumped by {_gained(clock.jump_ns)} between "
                f"{after} and {before}: it was set, or the host slept. All times are shown by the clock as "
                "it was at the last reading, so those from before are not what it said then, nor what a "
                "client noted."
            )
    if any(clock.datasets > 1 for clock in found):
        yield (
            "Several datasets are of one clock. Each is dated by its own last reading, so against each other "
            "they are off by what the wall clock moved in between."
        )
    if sum(clock.datasets for clock in found) < datasets:
        yield "Some datasets have no reading; how their times compare with others' is not known."


def _ingest(quality: Quality, view: View) -> Component:
    columns = {"dataset": True, "what": False, "which": False, "count": True}
    rows = [
        [str(row.dataset), _NAMES.get(row.name, row.name), row.reason or NOTHING, count(row.number)]
        for row in quality.ingested
    ]
    return card(
        "What was read", table(columns, rows), actions=[download("CSV", PAGE.csv_href(view, "ingest"))]
    )


def _warm_up(quality: Quality) -> Component:
    columns = {"phase": False, "left out": True, "of": True, "by": False, "": False}
    rows: list[list[Any]] = [
        [
            warm_up.phase or NOTHING,
            count(warm_up.requests),
            count(warm_up.of),
            warm_up.rule,
            "" if warm_up.settled else html.Span(_DRIFT[warm_up.trend], className="st-alarm"),
        ]
        for warm_up in quality.warm_ups
    ]
    if not rows:
        return card("Warm-up", dmc.Text("No request was left out as warm-up.", size="sm"))
    return card("Warm-up", table(columns, rows), note="Requests that no figure counts.")


def twin(view: View, data: Data) -> Any:
    """Return what the page shows."""
    return read_quality(view, data)


def ingest_table(view: View, data: Data) -> Table:
    """Return the ingest report as a file."""
    del view
    return Table(Ingested._fields, data.ingested)


PAGE: Final = Page(
    name="quality",
    title="Data quality",
    layout=layout,
    twin=twin,
    filters=("phase", "model", "arm", "instance", "by_phase"),
    tables={"ingest": ingest_table},
    needs_requests=False,
)
