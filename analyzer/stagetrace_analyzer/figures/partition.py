"""What time consists of: stages of a horizon as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import plotly.graph_objects as go

from stagetrace.stages import Horizon
from stagetrace_analyzer.figures.labels import (
    HORIZONS,
    NS_PER_MS,
    REGIONS,
    class_label,
    in_order,
    kind_of,
    percent,
    plain,
    rounded,
)
from stagetrace_analyzer.figures.palette import TEMPLATES, Theme, stage_marker
from stagetrace_analyzer.results import ClassReport, Composition, Region, Share

_BAR_PX: Final = 44
_LEGEND_PX: Final = 20
_FRAME_PX: Final = 120
_ROOM_FOR_TOTALS: Final = 1.2


class Measure(StrEnum):
    """What the length of a bar is."""

    TIME = "time"
    """Mean milliseconds a request."""
    SHARE = "share"
    """Share of the horizon."""


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """Options of a figure of stages."""

    horizon: Horizon = Horizon.TTFT
    measure: Measure = Measure.TIME
    theme: Theme = Theme.LIGHT


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    requests: float
    mean_ns: float
    shares: Mapping[str, Share]


def stage_partition(
    reports: Sequence[ClassReport],
    options: PartitionOptions = PartitionOptions(),
) -> go.Figure:
    """Return a bar a class: the stages of the horizon, over its requests that ended well."""
    bars = [_bar(class_label(report), report.composition(options.horizon, Region.ALL)) for report in reports]
    return _stacked([bar for bar in bars if bar is not None], options)


def typical_against_tail(
    report: ClassReport,
    options: PartitionOptions = PartitionOptions(),
) -> go.Figure:
    """Return two bars: the stages of a class's typical requests, and of its slowest."""
    regions = [report.composition(options.horizon, region) for region in (Region.TYPICAL, Region.TAIL)]
    bars = [_bar(f"{REGIONS[of.region]}, n = {of.requests:,.0f}", of) for of in regions]
    return _stacked([bar for bar in bars if bar is not None], options)


def _bar(label: str, composition: Composition) -> _Bar | None:
    if composition.mean_ns is None:
        return None
    return _Bar(label, composition.requests, composition.mean_ns, composition.shares)


def _stacked(bars: Sequence[_Bar], options: PartitionOptions) -> go.Figure:
    figure = go.Figure()
    positions = list(range(len(bars)))
    stages = in_order({stage for bar in bars for stage, share in bar.shares.items() if share.value > 0})
    for stage in stages:
        shares = [bar.shares.get(stage, Share(0.0)) for bar in bars]
        figure.add_bar(
            name=plain(stage),
            orientation="h",
            y=positions,
            x=[_length(bar, share, options.measure) for bar, share in zip(bars, shares, strict=True)],
            marker=stage_marker(stage, kind_of(stage)),
            customdata=[
                [f"{share.value * bar.mean_ns / NS_PER_MS:,.2f}", percent(share)]
                for bar, share in zip(bars, shares, strict=True)
            ],
            hovertemplate=f"%{{fullData.name}}<br>%{{customdata[0]}} ms a request<br>"
            f"%{{customdata[1]}} of {HORIZONS[options.horizon]}<extra></extra>",
        )
    _add_totals(figure, bars, options.measure)
    figure.update_layout(
        template=TEMPLATES[options.theme],
        barmode="stack",
        bargap=0.3,
        height=_FRAME_PX + max(_BAR_PX * len(bars), _LEGEND_PX * len(stages)),
        margin={"l": 10, "r": 10, "t": 10, "b": 50},
        legend={"title": {"text": "stage (hatched: wait)"}, "traceorder": "normal"},
        xaxis=_length_axis(bars, options),
        yaxis={
            "tickvals": positions,
            "ticktext": [bar.label for bar in bars],
            "range": [len(bars) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
        },
    )
    return figure


def _length(bar: _Bar, share: Share, measure: Measure) -> float:
    return share.value if measure is Measure.SHARE else share.value * bar.mean_ns / NS_PER_MS


def _length_axis(bars: Sequence[_Bar], options: PartitionOptions) -> dict[str, object]:
    horizon = HORIZONS[options.horizon]
    if options.measure is Measure.SHARE:
        return {
            "title": {"text": f"share of {horizon}"},
            "range": [0, _ROOM_FOR_TOTALS],
            "tickvals": [0, 0.2, 0.4, 0.6, 0.8, 1],
            "tickformat": ".0%",
        }
    longest = max((bar.mean_ns for bar in bars), default=NS_PER_MS) / NS_PER_MS
    return {
        "title": {"text": f"mean time a request until {_END[options.horizon]}, ms"},
        "range": [0, longest * _ROOM_FOR_TOTALS],
        "tickformat": ",",
    }


_END: Final = {Horizon.TTFT: "the first useful byte", Horizon.COMPLETION: "the last byte"}


def _add_totals(figure: go.Figure, bars: Sequence[_Bar], measure: Measure) -> None:
    """Write the mean horizon behind every bar."""
    figure.add_scatter(
        x=[1.0 if measure is Measure.SHARE else bar.mean_ns / NS_PER_MS for bar in bars],
        y=list(range(len(bars))),
        mode="text",
        text=[f" {rounded(bar.mean_ns / NS_PER_MS)} ms" for bar in bars],
        textposition="middle right",
        cliponaxis=False,
        showlegend=False,
        customdata=[rounded(bar.requests) for bar in bars],
        hovertemplate="mean of %{customdata} requests<extra></extra>",
    )
