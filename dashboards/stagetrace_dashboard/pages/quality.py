"""Data quality: who told, what is missing, and whether two witnesses agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import dash_mantine_components as dmc
from dash.development.base_component import Component

from stagetrace_analyzer.figures.labels import HORIZONS
from stagetrace_analyzer.queries.quality import Checked, Ingested, Reporter, checks, processes
from stagetrace_analyzer.reports.words import title
from stagetrace_dashboard.page import Page, Table
from stagetrace_dashboard.parts import card, download, facts, stack, table
from stagetrace_dashboard.words import NOTHING, clock_time, count, date_time, duration, percent

if TYPE_CHECKING:
    from stagetrace.stages import Horizon
    from stagetrace_analyzer.figures.palette import Theme
    from stagetrace_analyzer.results import Analysis, WarmUp
    from stagetrace_dashboard.data import Data
    from stagetrace_dashboard.view import View

_NS_PER_MS: Final = 1_000_000
_ROLES: Final = {"api": "API server", "engine": "engine"}
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
    ingested: Sequence[Ingested]
    checks: Sequence[Checked]
    warm_ups: Sequence[WarmUp]
    joins: dict[str, int]
    unattributed: dict[str, Mapping[Horizon, float | None]]
    partition_mismatches: Mapping[Horizon, int]


def read_quality(view: View, data: Data) -> Quality:
    """Read what is known of the data themselves."""
    analysis = data.analysis_of(view)
    return Quality(
        data.ask(processes),
        data.ingested,
        data.ask(checks),
        analysis.warm_ups,
        dict(analysis.joins),
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
        card("Clocks", dmc.Text(_CLOCKS, size="sm")),
    )


_CLOCKS: Final = (
    "Processes on one host are joined on its raw monotonic clock, so there is no skew between them. "
    "These data come from one host for each dataset; times of different datasets are compared by the "
    "wall clocks of their hosts, and nothing here says how far those were apart."
)


def _attribution(quality: Quality, analysis: Analysis) -> Component:
    columns = {"class": False, **dict.fromkeys(HORIZONS.values(), True)}
    rows = [
        [name, *(percent(by_horizon.get(horizon)) for horizon in HORIZONS)]
        for name, by_horizon in quality.unattributed.items()
    ]
    joined = ", ".join(f"{number:,} {name}" for name, number in quality.joins.items()) or NOTHING
    mismatches = sum(quality.partition_mismatches.values())
    unknown = ", ".join(f"{number:,} {name}" for name, number in analysis.unknown_facts.items()) or "none"
    return card(
        "Unattributed time",
        table(columns, rows),
        facts(
            [
                ("seen by", joined),
                ("do not add up", f"{mismatches:,} horizons"),
                ("in no class", count(analysis.unclassified)),
                ("facts not known", unknown),
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
        return dmc.Text("agrees", size="sm", c="dimmed", className="st-whole")
    return dmc.Text("disagrees", size="sm", fw=700, className="st-alarm st-whole")


def _processes(quality: Quality) -> Component:
    columns = {
        "role": False,
        "process": False,
        "dataset": True,
        "told": False,
        "first, UTC": False,
        "last, UTC": False,
        "loop late": True,
        "at most": True,
    }
    rows = [
        [
            _ROLES.get(process.role, process.role),
            process.process,
            str(process.dataset),
            f"{process.things:,} {'steps' if process.role == 'engine' else 'requests'}",
            date_time(process.first_unix_ns).removesuffix(" UTC"),
            clock_time(process.last_unix_ns),
            count(process.lags),
            duration(process.longest_lag_ns),
        ]
        for process in quality.processes
    ]
    return card("Processes that reported", table(columns, rows))


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
            "" if warm_up.settled else dmc.Text("still drifted", size="sm", className="st-alarm"),
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
