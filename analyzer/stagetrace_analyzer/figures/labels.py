"""Texts and ticks of figures: names from the data are shown as they are, whatever they hold."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from stagetrace.stages import Horizon, Kind, Stage
from stagetrace_analyzer.results import ClassReport, Region, Share

NS_PER_MS: Final = 1_000_000

HORIZONS: Final = {Horizon.TTFT: "TTFT", Horizon.COMPLETION: "completion"}
"""What the horizons are called."""

REGIONS: Final = {Region.ALL: "all", Region.TYPICAL: "typical (p40 to p60)", Region.TAIL: "tail (above p95)"}
"""What the regions are called."""

_LONGEST: Final = 40
_FEW_DECADES: Final = 2.5
_FEW_TICKS: Final = 2


def plain(text: str, longest: int = _LONGEST) -> str:
    """Return a text from the data that plotly shows as it is.

    Plotly takes some HTML, entities and TeX in texts; control characters and
    those that turn the direction of writing become question marks.
    """
    shown = "".join(character if character.isprintable() else "?" for character in text)
    if len(shown) > longest:
        shown = shown[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return html.escape(shown, quote=False).replace("$", "&#36;")


def class_label(report: ClassReport) -> str:
    """Return the name of a class, with its phase and the mark of a class that is decided at the end."""
    phase = "" if report.phase is None else f"[{report.phase}] "
    post = " (post)" if report.post else ""
    return plain(phase + report.traffic_class) + post


def kind_of(stage: str) -> Kind:
    """Return the kind of a stage; one that the model does not know is told by its name."""
    if stage in _ORDER:
        return Stage(stage).kind
    return Kind.WAIT if stage.endswith(".wait") else Kind.WORK


def in_order(stages: Sequence[str] | set[str]) -> list[str]:
    """Return stages as requests meet them; those that the model does not know come last."""
    return sorted(stages, key=lambda stage: (_ORDER.get(stage, len(_ORDER)), stage))


_ORDER: Final = {stage.value: place for place, stage in enumerate(Stage)}


def rounded(value: float) -> str:
    """Return a number for reading: no decimal from 100 on, one below."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"  # noqa: PLR2004 - three figures are read


def percent(share: Share) -> str:
    """Return a share with its interval, in percent."""
    text = f"{100 * share.value:.1f} %"
    if share.low is None or share.high is None:
        return text
    return f"{text} [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def time_of(unix_ns: int) -> datetime:
    """Return an instant for a date axis, to the microsecond, in UTC without saying so."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).replace(tzinfo=None)


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Return ticks of a logarithmic axis between two positive values, and their texts."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1,) if math.log10(high / low) > _FEW_DECADES else (1, 2, 5)
    values = [step * 10.0**decade for decade, step in itertools.product(range(first, last + 1), steps)]
    values = [value for value in values if low <= value <= high]
    if len(values) < _FEW_TICKS:
        # Between two round numbers: the axis is told by its ends.
        values = [float(f"{value:.3g}") for value in (low, math.sqrt(low * high), high)]
    return values, [f"{value:,.10g}" for value in values]
