"""The one palette: a colour for each stage, a pattern for each kind, a template for each theme.

A wait has the hue of the work that it waits for, and is hatched.  Stages that
meet in a stack stay apart for readers who do not see red, green or blue, on
light and on dark ground: ``tests/analyzer/figures/test_palette.py`` measures it.
Traffic classes have no fixed colour; they take those of `SERIES` in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import plotly.graph_objects as go

from stagetrace.stages import Kind, Stage

NEUTRAL: Final = "#8b8f94"
"""Colour of lines that are neither of a stage nor of a class, on any ground."""

STAGE_COLOURS: Final[Mapping[str, str]] = MappingProxyType(
    {
        Stage.RECEIVE.value: "#b6366d",
        Stage.RETRIEVAL.value: "#d2a3bf",
        Stage.MEDIA_DECODE_WAIT.value: "#853e03",
        Stage.MEDIA_DECODE.value: "#b17d5e",
        Stage.PREPROCESS_WAIT.value: "#7e75b3",
        Stage.PREPROCESS.value: "#593ab0",
        Stage.HANDOFF.value: "#f5a55f",
        Stage.PREFILL_WAIT.value: "#4d73e4",
        Stage.ENCODE_WAIT.value: "#be5a02",
        Stage.ENCODE.value: "#e87621",
        Stage.EMBEDDING_TRANSFER_WAIT.value: "#74464f",
        Stage.EMBEDDING_TRANSFER.value: "#b46274",
        Stage.PREFILL.value: "#a0b6eb",
        Stage.KV_TRANSFER_WAIT.value: "#b07bd5",
        Stage.KV_TRANSFER.value: "#784b96",
        Stage.DECODE_WAIT.value: "#61ad80",
        Stage.DECODE.value: "#147648",
        Stage.RESPOND.value: "#8953bf",
        Stage.UNATTRIBUTED.value: NEUTRAL,
    }
)
"""Colour of every stage of the model."""

UNKNOWN_STAGE: Final = "#5c6166"
"""Colour of a stage that the model does not know."""

KIND_PATTERNS: Final[Mapping[Kind, str]] = MappingProxyType(
    {Kind.WORK: "", Kind.WAIT: "/", Kind.TRANSFER: ".", Kind.UNATTRIBUTED: ""}
)
"""Plotly's pattern shape of each kind: waits are hatched and transfers dotted."""

PATTERN_INK: Final = "rgba(255,255,255,0.6)"
"""Colour of hatching and dots, on any stage's colour."""

SERIES: Final = ("#897ef2", "#cf7f85", "#4a7305", "#9b4990", "#a69627", "#1769cf", "#c15871", "#10a4b8")
"""Colours of traffic classes, in their order."""

DASHES: Final = ("solid", "dash", "dot", "dashdot")
"""Line styles of traffic classes: the next one each time `SERIES` is used up."""

FONT: Final = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", sans-serif'
"""Font of figures and pages: the reader's own, because nothing is fetched."""


class Theme(StrEnum):
    """Ground that a figure stands on."""

    LIGHT = "light"
    DARK = "dark"


@dataclass(frozen=True, slots=True)
class Ground:
    """Colours of a theme that are no stage's: of page and cards, text, lesser text, lines, and of alarm."""

    page: str
    surface: str
    ink: str
    muted: str
    grid: str
    alarm: str


GROUNDS: Final[Mapping[str, Ground]] = MappingProxyType(
    {
        Theme.LIGHT.value: Ground("#f6f7f8", "#ffffff", "#1c2024", "#5b646d", "#dfe3e7", "#b3261e"),
        Theme.DARK.value: Ground("#141517", "#1c1e21", "#e6e8ea", "#a2a9b1", "#383d43", "#ff8a7a"),
    }
)
"""The ground of each theme, by the theme's name."""


def stage_colour(stage: str) -> str:
    """Return the colour of a stage, also of one that the model does not know."""
    return STAGE_COLOURS.get(stage, UNKNOWN_STAGE)


def series_colour(position: int) -> str:
    """Return the colour of the traffic class at a position, from 0."""
    return SERIES[position % len(SERIES)]


def series_dash(position: int) -> str:
    """Return the line style of the traffic class at a position, from 0."""
    return DASHES[position // len(SERIES) % len(DASHES)]


def stage_marker(stage: str, kind: Kind) -> dict[str, Any]:
    """Return the ``marker`` of a bar or area of a stage: its colour, with its kind's pattern."""
    return {"color": stage_colour(stage), "pattern": stage_pattern(kind)}


def stage_pattern(kind: Kind) -> dict[str, Any]:
    """Return the ``pattern`` of a bar's marker, or ``fillpattern`` of an area, of a kind."""
    return {
        "shape": KIND_PATTERNS[kind],
        "fillmode": "overlay",
        "fgcolor": PATTERN_INK,
        "fgopacity": 1,
        "size": 6,
        "solidity": 0.3,
    }


def _template(ground: Ground) -> go.layout.Template:
    """Return a template: transparent, horizontal titles, faint lines, nothing that is not read."""
    axis = {
        "automargin": True,
        "ticklabelstandoff": 4,
        "gridcolor": ground.grid,
        "linecolor": ground.grid,
        "tickcolor": ground.grid,
        "zerolinecolor": ground.grid,
        "title": {"font": {"color": ground.muted, "size": 13}, "standoff": 10},
    }
    layout = {
        "font": {"family": FONT, "size": 13, "color": ground.ink},
        "title": {"font": {"size": 16}, "x": 0, "xref": "container", "xanchor": "left", "yref": "container"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(SERIES),
        "xaxis": axis,
        "yaxis": axis,
        "hoverlabel": {
            "align": "left",
            "bgcolor": ground.surface,
            "bordercolor": ground.muted,
            "font": {"family": FONT, "size": 13, "color": ground.ink},
        },
        "legend": {"bgcolor": "rgba(0,0,0,0)", "font": {"size": 12}},
        "annotationdefaults": {"font": {"color": ground.muted, "size": 12}, "showarrow": False},
        "separators": ".,",
    }
    # Neighbours in a stack are parted by a line of the ground, so thin that short stages stay.
    bar = {"type": "bar", "marker": {"line": {"color": ground.surface, "width": 0.5}}}
    return go.layout.Template(layout=layout, data={"bar": [bar]})


TEMPLATES: Final[Mapping[str, go.layout.Template]] = MappingProxyType(
    {name: _template(ground) for name, ground in GROUNDS.items()}
)
"""The plotly template of each theme, by the theme's name."""
