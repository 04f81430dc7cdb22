"""What can be chosen above a page, and what was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from stagetrace.stages import Horizon
from stagetrace_analyzer.figures.labels import HORIZONS
from stagetrace_analyzer.queries.steps import Engine
from stagetrace_dashboard.data import Data
from stagetrace_dashboard.page import Page
from stagetrace_dashboard.parts import spoken
from stagetrace_dashboard.view import View
from stagetrace_dashboard.words import clock_time, date_time

_TITLES: Final = {
    "traffic_class": "class",
    "phase": "phase",
    "model": "model",
    "arm": "arm",
    "instance": "server",
    "outcome": "outcome",
    "longest_wait": "waited longest in",
}
"""Choices among what there is."""

_NUMBERS: Final = {
    "min_ttft_ms": "TTFT ≥, ms",
    "min_completion_ms": "completion ≥, ms",
    "media_items": "media items",
}

_MOST_CHOICES: Final = 500
_CONTROL_PX: Final = 148


def filter_bar(page: Page, view: View, data: Data) -> Component:
    """Return the controls of a page with what the view has chosen; the address follows them."""
    controls = [*_time(view), *(control for name in page.filters for control in _control(name, view, data))]
    return html.Div(dmc.Group(controls, gap="sm", align="end"), role="search", **spoken("what is shown"))


def changed(view: View, name: str, value: Any) -> View:
    """Return the view with what a control says; what it cannot mean changes nothing."""
    if name == "by_phase":
        return view.choose(by_phase=bool(value))
    if name == "horizon":
        return view.choose(horizon=Horizon(value))
    if name in _NUMBERS:
        return view.choose(**{name: int(value) if isinstance(value, int | float) and value >= 0 else None})
    return view.choose(**{name: str(value).strip() or None if value is not None else None})


def _control(name: str, view: View, data: Data) -> Iterable[Component]:
    chosen = getattr(view, name)
    identity = {"filter": name}
    if name == "horizon":
        yield dmc.SegmentedControl(
            id=identity,
            data=[{"value": horizon.value, "label": title} for horizon, title in HORIZONS.items()],
            value=view.horizon.value,
            size="sm",
        )
    elif name == "by_phase":
        if data.has_phases:
            is_on = data.has_phases if chosen is None else chosen
            yield dmc.Switch(id=identity, label="phases apart", checked=is_on, pb=8)
    elif name in _NUMBERS:
        yield dmc.NumberInput(
            id=identity,
            label=_NUMBERS[name],
            value="" if chosen is None else chosen,
            min=0,
            allowDecimal=False,
            debounce=400,
            w=_CONTROL_PX,
        )
    elif name == "id":
        yield dmc.TextInput(
            id=identity,
            label="request or trace id",
            value=chosen or "",
            debounce=400,
            w=_CONTROL_PX * 1.5,
        )
    elif name == "engine":
        yield from _engine(view, data)
    else:
        yield from _select(name, chosen, data)


def engine_name(engine: Engine) -> str:
    """Return the name of an engine that is its own among all datasets."""
    return f"{engine.dataset}-{engine.engine}"


def _engine(view: View, data: Data) -> Iterable[Component]:
    engines = data.engines()
    if len(engines) > 1:
        yield dmc.Select(
            id={"filter": "engine"},
            label="engine",
            data=[
                {"value": engine_name(engine), "label": f"{engine.engine} ({engine.steps:,} steps)"}
                for engine in engines
            ],
            value=view.engine or engine_name(engines[0]),
            allowDeselect=False,
            w=_CONTROL_PX * 2,
        )


def _select(name: str, chosen: str | None, data: Data) -> Iterable[Component]:
    found = [choice for choice in data.choices() if choice.field == name]
    values = [choice.value for choice in found]
    if len(values) < 2 and chosen is None:  # noqa: PLR2004 - there is nothing to choose among one
        return
    counted: Sequence[dict[str, str]] = [
        {"value": choice.value, "label": f"{choice.value} ({choice.requests:,})"} for choice in found
    ]
    if chosen is not None and chosen not in values:
        counted = [*counted, {"value": chosen, "label": f"{chosen} (0)"}]
    yield dmc.Select(
        id={"filter": name},
        label=_TITLES[name],
        placeholder="any",
        data=list(counted[:_MOST_CHOICES]),
        value=chosen,
        clearable=True,
        searchable=len(values) > 8,  # noqa: PLR2004 - more are not read at a glance
        w=_CONTROL_PX * 1.2,
    )


def _time(view: View) -> Iterable[Component]:
    if view.since_unix_ns is None and view.until_unix_ns is None:
        return
    begin = "the begin" if view.since_unix_ns is None else clock_time(view.since_unix_ns)
    end = "the end" if view.until_unix_ns is None else clock_time(view.until_unix_ns)
    whole = view.choose(since_unix_ns=None, until_unix_ns=None)
    known = view.since_unix_ns if view.since_unix_ns is not None else view.until_unix_ns
    day = date_time(known or 0).split(" ", maxsplit=1)[0]
    yield dmc.Badge(
        [
            f"{day} {begin} to {end} UTC ",
            dcc.Link("show all", href=whole.href, style={"textDecoration": "underline", "color": "inherit"}),
        ],
        size="lg",
        variant="light",
        radius="sm",
        tt="none",
        mb=4,
    )
