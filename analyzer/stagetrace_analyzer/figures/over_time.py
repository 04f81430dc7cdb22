"""What happened when: load, latency and stages by window of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from stagetrace_analyzer.figures.labels import (
    NS_PER_MS,
    in_order,
    kind_of,
    plain,
    time_of,
)
from stagetrace_analyzer.figures.palette import (
    NEUTRAL,
    TEMPLATES,
    Theme,
    series_colour,
    series_dash,
    stage_marker,
)
from stagetrace_analyzer.results import ClassReport, Window

_NS_PER_S: Final = 1_000_000_000
_LONGEST_PHASE: Final = 22
_SHORTEST_PHASE: Final = 4
_CHARACTERS: Final = 90
"""Characters that fit above a figure of 1280 px beside its legend."""
_ABOVE: Final = 1.1
_TIMES: Final = 8


@dataclass(frozen=True, slots=True)
class OverTimeOptions:
    """Options of a figure over time."""

    theme: Theme = Theme.LIGHT


def load_over_time(
    reports: Sequence[ClassReport],
    options: OverTimeOptions = OverTimeOptions(),
) -> go.Figure:
    """Return arrivals, requests in flight and median TTFT by class, under each other, by window.

    A class keeps its colour from phase to phase; lines stop between phases.
    """
    figure = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    medians = [_ttft_ms(window) for report in reports for window in report.windows]
    slowest_ms = max((ms for ms in medians if ms is not None), default=1.0)
    by_class: dict[str, list[ClassReport]] = {}
    for report in reports:
        by_class.setdefault(report.traffic_class, []).append(report)
    for position, (name, phases) in enumerate(by_class.items()):
        windows = [window for report in phases for window in (*report.windows, None)]
        look = {"color": series_colour(position), "dash": series_dash(position), "width": 2}
        for row, (value, hover) in enumerate(_LOAD, start=1):
            figure.add_scatter(
                row=row,
                col=1,
                name=plain(name),
                legendgroup=f"class {position}",
                showlegend=row == 1,
                x=[None if window is None else _middle(window) for window in windows],
                y=[None if window is None else value(window) for window in windows],
                mode="lines+markers",
                line=look,
                marker={"size": 4},
                hovertemplate=f"%{{fullData.name}}<br>%{{x|%H:%M:%S}}<br>{hover}<extra></extra>",
            )
        _mark_not_reached(figure, [window for window in windows if window is not None], position, slowest_ms)
    figure.update_layout(
        template=TEMPLATES[options.theme],
        height=560,
        margin={"l": 10, "r": 10, "t": 30, "b": 50},
        legend={"title": {"text": "class"}},
        showlegend=True,
    )
    for row, title in enumerate(("arrivals a second", "requests in flight", "TTFT p50, ms"), start=1):
        figure.update_yaxes(
            row=row, title={"text": title}, rangemode="tozero", tickformat=",", nticks=5, zeroline=False
        )
    figure.update_xaxes(row=3, title={"text": "time of arrival (UTC)"}, nticks=_TIMES, tickangle=0)
    _mark_phases(figure, reports)
    return figure


def stages_over_time(
    report: ClassReport,
    options: OverTimeOptions = OverTimeOptions(),
) -> go.Figure:
    """Return the mean time a request of a class by stage until completion, by window, under its arrivals."""
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.25, 0.75])
    windows = report.windows
    middles = [_middle(window) for window in windows]
    widths_ms = [(window.end_unix_ns - window.begin_unix_ns) / NS_PER_MS for window in windows]
    figure.add_scatter(
        row=1,
        col=1,
        x=middles,
        y=[_arrivals_per_s(window) for window in windows],
        mode="lines+markers",
        line={"color": NEUTRAL, "width": 2},
        marker={"size": 4},
        showlegend=False,
        customdata=[window.in_flight for window in windows],
        hovertemplate="%{x|%H:%M:%S}<br>%{y:,.2f} arrivals a second<br>"
        "%{customdata:,.2f} in flight<extra></extra>",
    )
    stages = in_order({stage for window in windows for stage, ns in window.stage_ns.items() if ns > 0})
    for stage in stages:
        figure.add_bar(
            row=2,
            col=1,
            name=plain(stage),
            x=middles,
            y=[window.stage_ns.get(stage, 0.0) / NS_PER_MS for window in windows],
            width=widths_ms,
            marker=stage_marker(stage, kind_of(stage)),
            hovertemplate="%{fullData.name}<br>%{x|%H:%M:%S}<br>%{y:,.2f} ms a request<extra></extra>",
        )
    figure.update_layout(
        template=TEMPLATES[options.theme],
        barmode="stack",
        height=max(420, 110 + 20 * len(stages)),
        margin={"l": 10, "r": 10, "t": 10, "b": 50},
        legend={"title": {"text": "stage (hatched: wait)"}, "traceorder": "normal"},
        showlegend=True,
    )
    figure.update_yaxes(row=1, title={"text": "arrivals / s"}, rangemode="tozero", nticks=4, zeroline=False)
    figure.update_yaxes(row=2, title={"text": "mean time a request, ms"}, tickformat=",")
    figure.update_xaxes(row=2, title={"text": "time of arrival (UTC)"}, nticks=_TIMES, tickangle=0)
    return figure


def _middle(window: Window) -> object:
    return time_of((window.begin_unix_ns + window.end_unix_ns) // 2)


def _arrivals_per_s(window: Window) -> float | None:
    length_ns = window.end_unix_ns - window.begin_unix_ns
    return window.arrived * _NS_PER_S / length_ns if length_ns > 0 else None


def _ttft_ms(window: Window) -> float | None:
    return None if window.ttft_p50_ns is None else window.ttft_p50_ns / NS_PER_MS


_LOAD: Final = (
    (_arrivals_per_s, "%{y:,.2f} arrivals a second"),
    (lambda window: window.in_flight, "%{y:,.2f} in flight"),
    (_ttft_ms, "TTFT p50 %{y:,.1f} ms"),
)


def _mark_not_reached(figure: go.Figure, windows: Sequence[Window], position: int, slowest_ms: float) -> None:
    """Mark, above all others, windows in which so many failed that half never had a first byte."""
    lost = [window for window in windows if window.arrived and window.ttft_p50_ns is None]
    if lost:
        figure.add_scatter(
            row=3,
            col=1,
            x=[_middle(window) for window in lost],
            y=[slowest_ms * _ABOVE] * len(lost),
            mode="markers",
            marker={"symbol": "x", "size": 9, "color": series_colour(position)},
            name="p50 not reached: too few got there",
            legendgroup="not reached",
            showlegend=not any(trace.legendgroup == "not reached" for trace in figure.data),
            hovertemplate="p50 not reached: too few got there<extra></extra>",
        )


def _mark_phases(figure: go.Figure, reports: Sequence[ClassReport]) -> None:
    """Draw a line where every phase begins, with as much of its name as fits before the next one."""
    begins: dict[str, int] = {}
    for report in reports:
        if report.phase is not None and report.windows:
            first_ns = report.windows[0].begin_unix_ns
            begins[report.phase] = min(first_ns, begins.get(report.phase, first_ns))
    if not begins:
        return
    end_ns = max(window.end_unix_ns for report in reports for window in report.windows)
    in_order = sorted(begins.items(), key=lambda item: item[1])
    ends_ns = [*(begin_ns for _, begin_ns in in_order[1:]), end_ns]
    for (phase, begin_ns), next_ns in zip(in_order, ends_ns, strict=True):
        at = time_of(begin_ns)
        line = {"color": NEUTRAL, "width": 1, "dash": "dot"}
        figure.add_shape(type="line", x0=at, x1=at, y0=0, y1=1, xref="x", yref="paper", line=line)
        fits = _CHARACTERS * (next_ns - begin_ns) // max(1, end_ns - in_order[0][1])
        if fits >= _SHORTEST_PHASE:
            text = plain(phase, min(fits, _LONGEST_PHASE))
            place = {"x": at, "y": 1, "xref": "x", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
            figure.add_annotation(text=text, showarrow=False, **place)
