"""How long requests take: distributions of a latency by class.

Failed requests count as infinitely slow: a curve ends where they begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import plotly.graph_objects as go

from stagetrace_analyzer.figures.labels import NS_PER_MS, class_label, log_ticks
from stagetrace_analyzer.figures.palette import SERIES, TEMPLATES, Theme, series_colour, series_dash
from stagetrace_analyzer.results import ClassReport, Latency

_SHORTEST_MS: Final = 0.001
_BINS_PER_DECADE: Final = 20
_MARGIN: Final = 1.15


class Metric(StrEnum):
    """Which latency of a class."""

    TTFT = "ttft"
    COMPLETION = "completion"
    WAITING = "waiting"


_TITLES: Final = {
    Metric.TTFT: "time to the first useful byte (TTFT), ms",
    Metric.COMPLETION: "time to the last byte (completion), ms",
    Metric.WAITING: "time spent waiting before the first useful byte, ms",
}


@dataclass(frozen=True, slots=True)
class DistributionOptions:
    """Options of a figure of latencies."""

    metric: Metric = Metric.TTFT
    theme: Theme = Theme.LIGHT


@dataclass(frozen=True, slots=True)
class _Curve:
    colour: str
    dash: str
    label: str
    ms: list[float]
    p: list[float]
    failed: int
    requests: int


def latency_ecdf(
    reports: Sequence[ClassReport],
    options: DistributionOptions = DistributionOptions(),
) -> go.Figure:
    """Return the share of all requests of each class that took at most so long, on a logarithmic axis."""
    curves = list(_curves(reports, options.metric))
    figure = go.Figure()
    for curve in curves:
        line = {"color": curve.colour, "dash": curve.dash, "width": 2}
        figure.add_scatter(
            name=curve.label,
            x=curve.ms,
            y=curve.p,
            mode="lines",
            line=line,
            hovertemplate="%{fullData.name}<br>%{y:.1%} took at most %{x:,.4~g} ms<extra></extra>",
        )
    _end_where_requests_failed(figure, [curve for curve in curves if curve.failed])
    figure.update_layout(
        template=TEMPLATES[options.theme],
        height=400,
        margin={"l": 10, "r": 10, "t": 10, "b": 50},
        xaxis=_time_axis([ms for curve in curves for ms in curve.ms], options.metric),
        yaxis={
            "title": {"text": "share of all requests, failed ones included"},
            "range": [0, 1.03],
            "tickformat": ".0%",
            "zeroline": False,
        },
        legend={"title": {"text": "class"}},
        showlegend=True,
    )
    return figure


def latency_histogram(
    reports: Sequence[ClassReport],
    options: DistributionOptions = DistributionOptions(),
) -> go.Figure:
    """Return the share of all requests of each class by how long they took, in bins of equal ratio."""
    curves = list(_curves(reports, options.metric))
    every_ms = [ms for curve in curves for ms in curve.ms]
    figure = go.Figure()
    edges = _bin_edges(every_ms)
    for curve in curves:
        below = np.interp(np.log(edges), np.log(curve.ms), curve.p, left=0.0, right=curve.p[-1])
        figure.add_scatter(
            name=curve.label,
            x=np.repeat(edges, 2)[1:-1],
            y=np.repeat(np.diff(below), 2),
            mode="lines",
            line={"color": curve.colour, "dash": curve.dash, "width": 1.5},
            fill="tozeroy",
            opacity=0.8,
            hovertemplate="%{fullData.name}<br>%{y:.1%} near %{x:,.3~g} ms<extra></extra>",
        )
    figure.update_layout(
        template=TEMPLATES[options.theme],
        height=340,
        margin={"l": 10, "r": 10, "t": 10, "b": 50},
        xaxis=_time_axis(every_ms, options.metric),
        yaxis={"title": {"text": "share of all requests"}, "rangemode": "tozero", "tickformat": ".0%"},
        legend={"title": {"text": "class"}},
        showlegend=True,
    )
    return figure


def _curves(reports: Sequence[ClassReport], metric: Metric) -> Iterator[_Curve]:
    """Yield a curve a class and phase: classes have their colour, and phases their line style."""
    classes = list(dict.fromkeys(report.traffic_class for report in reports))
    phases = list(dict.fromkeys(report.phase for report in reports))
    for report in reports:
        position = classes.index(report.traffic_class)
        latency: Latency = getattr(report, metric.value)
        if latency.ecdf_ns:
            yield _Curve(
                series_colour(position),
                series_dash(position + len(SERIES) * phases.index(report.phase)),
                _label(report, latency),
                [max(ns / NS_PER_MS, _SHORTEST_MS) for ns in latency.ecdf_ns],
                list(latency.ecdf_p),
                latency.quantiles.requests - latency.quantiles.reached,
                latency.quantiles.requests,
            )


def _label(report: ClassReport, latency: Latency) -> str:
    """Return the name of a class, with the part of it that never got there."""
    requests, reached = latency.quantiles.requests, latency.quantiles.reached
    lost = "" if reached == requests else f", {100 * (1 - reached / requests):.1f} % never got there"
    return class_label(report) + lost


def _end_where_requests_failed(figure: go.Figure, curves: Sequence[_Curve]) -> None:
    """Mark the end of every curve that stays below 1."""
    if not curves:
        return
    figure.add_scatter(
        name="nobody gets further",
        x=[curve.ms[-1] for curve in curves],
        y=[curve.p[-1] for curve in curves],
        mode="markers",
        marker={
            "symbol": "x",
            "size": 9,
            "color": [curve.colour for curve in curves],
        },
        cliponaxis=False,
        customdata=[f"{curve.failed:,} of {curve.requests:,} never got here" for curve in curves],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _bin_edges(every_ms: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    low, high = _span(every_ms)
    bins = max(1, round(np.log10(high / low) * _BINS_PER_DECADE))
    return np.geomspace(low, high, bins + 1)


def _span(every_ms: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of an axis of time; there may be no time at all."""
    return min(every_ms, default=1.0) / _MARGIN, max(every_ms, default=1.0) * _MARGIN


def _time_axis(every_ms: Sequence[float], metric: Metric) -> dict[str, object]:
    low, high = _span(every_ms)
    values, texts = log_ticks(low, high)
    return {
        "title": {"text": f"{_TITLES[metric]} (logarithmic)"},
        "type": "log",
        "range": [float(np.log10(low)), float(np.log10(high))],
        "tickvals": values,
        "ticktext": texts,
    }
