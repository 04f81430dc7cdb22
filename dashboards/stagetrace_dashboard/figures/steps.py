"""The steps of an engine over time: what was in them, how long they took, who waited."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from stagetrace.stages import Stage
from stagetrace_analyzer.figures.labels import NS_PER_MS, plain
from stagetrace_analyzer.figures.palette import GROUNDS, SERIES, TEMPLATES, Theme, stage_colour
from stagetrace_analyzer.queries.steps import EngineStep, StepBucket

_HEIGHT_PX: Final = 720
_NS_PER_US: Final = 1_000
_TICKS: Final = [
    {"dtickrange": [None, 1000], "value": "%H:%M:%S.%L"},
    {"dtickrange": [1000, 60_000], "value": "%H:%M:%S"},
    {"dtickrange": [60_000, 86_400_000], "value": "%H:%M"},
    {"dtickrange": [86_400_000, None], "value": "%Y-%m-%d"},
]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A step, or several that are shown as one: by the largest and by the longest of them.

    Times are ns since the epoch and ns.  ``prompt_tokens`` and ``decodes`` are of the
    step with most tokens, ``encoder_ns`` is of the longest step; ``encoder_items``
    is a sum; ``running`` and ``waiting`` are the largest.
    """

    begin_unix_ns: int
    end_unix_ns: int
    steps: int
    prompt_tokens: int
    decodes: int
    longest_ns: int
    encoder_ns: int
    encoder_items: int
    running: int
    waiting: int
    reason: str | None


def stretch_of_step(step: EngineStep) -> Stretch:
    """Return a single step; one whose time is not known has no length."""
    begin = step.scheduled_unix_ns if step.begin_unix_ns is None else step.begin_unix_ns
    took = step.duration_ns or 0
    return Stretch(
        begin_unix_ns=begin,
        end_unix_ns=begin + took,
        steps=1,
        prompt_tokens=step.tokens - step.decodes,
        decodes=step.decodes,
        longest_ns=took,
        encoder_ns=step.encoder_ns or 0,
        encoder_items=step.encoder_items,
        running=step.running,
        waiting=step.waiting,
        reason=step.reason,
    )


def stretch_of_bucket(bucket: StepBucket, bucket_ns: int) -> Stretch:
    """Return the steps of a stretch of time as one."""
    return Stretch(
        begin_unix_ns=bucket.begin_unix_ns,
        end_unix_ns=bucket.begin_unix_ns + bucket_ns,
        steps=bucket.steps,
        prompt_tokens=bucket.prompt_tokens,
        decodes=bucket.decodes,
        longest_ns=bucket.longest_ns or 0,
        encoder_ns=bucket.longest_encoder_ns,
        encoder_items=bucket.encoder_items,
        running=bucket.running,
        waiting=bucket.waiting,
        reason=bucket.reason,
    )


def steps_over_time(stretches: Sequence[Stretch], theme: Theme = Theme.LIGHT) -> go.Figure:
    """Return three plots over one time: tokens of a step, its time with the encoder's part, and the queue.

    Where no step ran, nothing is drawn: a gap while requests wait is a stall.
    """
    figure = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.34, 0.36, 0.3])
    points = list(_points(stretches))
    times = np.array([unix_ns // _NS_PER_US for unix_ns, _, _ in points]).astype("datetime64[us]")
    for trace in _traces(theme):
        in_gaps = trace.height if trace.in_gaps is None else _constant(trace.in_gaps)
        figure.add_scatter(
            row=trace.row,
            col=1,
            name=trace.name,
            x=times,
            y=np.array(
                [(in_gaps if is_gap else trace.height)(s) for _, s, is_gap in points], dtype=np.float64
            ),
            customdata=np.array(["" if is_gap else trace.note(s) for _, s, is_gap in points], dtype=object),
            mode="lines",
            # A height is that of all the time until the next point.
            line={"color": trace.colour, "width": 1 if trace.fill else 2, "shape": "hv"},
            fill=trace.fill,
            fillcolor=trace.colour,
            hovertemplate="%{customdata}",
        )
    for row, title in enumerate(_titles(stretches), start=1):
        figure.update_yaxes(row=row, col=1, title={"text": title}, rangemode="tozero", fixedrange=True)
    figure.update_xaxes(type="date", tickformatstops=_TICKS)
    figure.update_layout(
        template=TEMPLATES[theme],
        height=_HEIGHT_PX,
        margin={"l": 10, "r": 10, "t": 10, "b": 40},
        hovermode="x unified",
        dragmode="zoom",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.01, "x": 0, "traceorder": "normal"},
    )
    return figure


@dataclass(frozen=True, slots=True)
class _Trace:
    """A line, perhaps filled down to the one before it."""

    row: int
    name: str
    colour: str
    height: Callable[[Stretch], float]
    note: Callable[[Stretch], str]
    fill: str | None
    in_gaps: float | None = 0.0
    """Height where no step ran, None for what it was before."""


def _traces(theme: Theme) -> tuple[_Trace, ...]:
    return (
        _Trace(
            1,
            "decoding tokens",
            stage_colour(Stage.DECODE),
            lambda s: s.decodes,
            lambda s: f"{s.decodes:,}",
            "tozeroy",
        ),
        _Trace(
            1,
            "prompt tokens",
            stage_colour(Stage.PREFILL),
            lambda s: s.decodes + s.prompt_tokens,
            lambda s: f"{s.prompt_tokens:,}",
            "tonexty",
        ),
        _Trace(
            2,
            "encoding",
            stage_colour(Stage.ENCODE),
            lambda s: s.encoder_ns / NS_PER_MS,
            lambda s: f"{s.encoder_ns / NS_PER_MS:,.1f} ms ({s.encoder_items} items)",
            "tozeroy",
        ),
        _Trace(
            2,
            "rest of the step",
            GROUNDS[theme].muted,
            lambda s: s.longest_ns / NS_PER_MS,
            lambda s: f"{(s.longest_ns - s.encoder_ns) / NS_PER_MS:,.1f} ms",
            "tonexty",
        ),
        _Trace(3, "running", SERIES[0], lambda s: s.running, lambda s: f"{s.running:,}", None, None),
        _Trace(3, "waiting", SERIES[1], lambda s: s.waiting, _waiting, None, None),
    )


def _waiting(stretch: Stretch) -> str:
    reason = "" if stretch.reason is None else f" ({plain(stretch.reason)})"
    return f"{stretch.waiting:,}{reason}"


def _titles(stretches: Sequence[Stretch]) -> tuple[str, str, str]:
    if all(stretch.steps == 1 for stretch in stretches):
        return "tokens of the step", "time of the step, ms", "requests"
    return "tokens of the largest step", "time of the longest step, ms", "requests at most"


def _points(stretches: Sequence[Stretch]) -> Iterator[tuple[int, Stretch, bool]]:
    """Yield the begin of every stretch and of every gap: when it is, the stretch, and whether it is over."""
    for stretch, following in zip_longest(stretches, stretches[1:]):
        yield stretch.begin_unix_ns, stretch, False
        if following is None:
            yield stretch.end_unix_ns, stretch, False
        elif following.begin_unix_ns > stretch.end_unix_ns:
            yield stretch.end_unix_ns, stretch, True


def _constant(value: float) -> Callable[[Stretch], float]:
    return lambda _stretch: value
