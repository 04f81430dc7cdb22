"""One request as a waterfall: every interval on the lane of its stage, the engine's steps below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import plotly.graph_objects as go

from stagetrace.stages import Horizon, Stage
from stagetrace_analyzer.figures.labels import HORIZONS, NS_PER_MS, in_order, kind_of, plain
from stagetrace_analyzer.figures.palette import GROUNDS, TEMPLATES, Theme, stage_colour, stage_marker
from stagetrace_analyzer.queries.requests import Company, MediaItem, StageInterval, StepBeside
from stagetrace_dashboard.story import Story
from stagetrace_dashboard.words import duration

_LANE_PX: Final = 26
_FRAME_PX: Final = 114
_LABEL_PX: Final = 15
_MOST_ITEMS: Final = 8
_ROOM: Final = 1.03
_THICK: Final = 0.72
_THIN: Final = 0.5
_HEADING: Final = "heading"

_PROCESSES: Final = {"api": "API server", "engine": "engine"}
_TTFT_ONLY: Final = " (first token)"


@dataclass(frozen=True, slots=True)
class WaterfallOptions:
    """Options of a waterfall; ``until_ns`` is the end of the axis, None for the request's own."""

    theme: Theme = Theme.LIGHT
    until_ns: int | None = None


@dataclass(frozen=True, slots=True)
class _Bar:
    lane: tuple[str, ...]
    begin_ns: int
    duration_ns: int
    marker: Mapping[str, Any]
    hover: str
    text: str = ""
    width: float = _THICK
    on_top: bool = False


def waterfall(story: Story, options: WaterfallOptions = WaterfallOptions()) -> go.Figure:
    """Return the request's intervals until completion, process by process, over ms since receipt.

    Waits are hatched and have the scheduler's reason in them.  Media items and the
    engine's steps have lanes of their own: steps that the request was in are
    filled, those beside it are not.
    """
    groups = list(_groups(story, options.theme))
    lanes = _lanes(groups)
    figure = go.Figure()
    for bars in _by_look([bar for _, of_process in groups for bar in of_process]):
        figure.add_bar(
            orientation="h",
            base=[bar.begin_ns / NS_PER_MS for bar in bars],
            x=[bar.duration_ns / NS_PER_MS for bar in bars],
            y=[lanes[bar.lane] for bar in bars],
            width=[bar.width for bar in bars],
            marker=dict(bars[0].marker),
            text=[bar.text for bar in bars],
            textposition="inside",
            insidetextanchor="start",
            textangle=0,
            constraintext="none",
            customdata=[bar.hover for bar in bars],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )
    until_ns = options.until_ns or story.length_ns
    _mark_horizons(figure, story, until_ns, options.theme)
    figure.update_layout(
        template=TEMPLATES[options.theme],
        barmode="overlay",
        height=_FRAME_PX + _LANE_PX * len(lanes),
        margin={"l": 10, "r": 10, "t": 48, "b": 44},
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis={
            "title": {"text": "ms since receipt"},
            "range": [0, until_ns / NS_PER_MS * _ROOM or 1.0],
            "tickformat": ",",
        },
        yaxis={
            "tickvals": list(lanes.values()),
            "ticktext": [_lane_text(lane) for lane in lanes],
            "range": [len(lanes) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        },
    )
    return figure


def _groups(story: Story, theme: Theme) -> Iterable[tuple[str, list[_Bar]]]:
    """Yield the title of every process with its bars."""
    engines = list(dict.fromkeys(step.engine for step in story.steps if step.own_tokens is not None))
    names = {"api": [str(story.facts.get("instance") or "")], "engine": engines}
    roles = list(dict.fromkeys(["api", *(stage.role for stage in story.stages)]))
    for role in roles:
        title = " ".join([_PROCESSES.get(role, role), *names.get(role, [])])
        bars = [_interval_bar(stage, story) for stage in story.stages if stage.role == role]
        if role == "api":
            bars += [_item_bar(item, theme) for item in story.media[:_MOST_ITEMS] if _is_timed(item)]
        yield title, bars
    if story.steps:
        yield "steps of the engine", [bar for step in story.steps for bar in _step_bars(step, story, theme)]


def _lanes(groups: Sequence[tuple[str, Sequence[_Bar]]]) -> dict[tuple[str, ...], int]:
    """Return the place of every lane from the top; a heading is a lane without bars."""
    lanes: dict[tuple[str, ...], int] = {}
    for title, bars in groups:
        if not bars:
            continue
        lanes[_HEADING, title] = len(lanes)
        found = {bar.lane for bar in bars}
        stages = in_order({lane[1] for lane in found if lane[0] == "stage"})
        roles = {lane[3] for lane in found if lane[0] == "stage"}
        in_place = [
            ("stage", name, only, role) for name in stages for only in ("", _TTFT_ONLY) for role in roles
        ]
        others = sorted(lane for lane in found if lane[0] != "stage")
        for lane in [*(lane for lane in in_place if lane in found), *others]:
            lanes[lane] = len(lanes)
    return lanes


def _lane_text(lane: tuple[str, ...]) -> str:
    if lane[0] == _HEADING:
        return f"<b>{plain(lane[1])}</b>"
    return plain("".join(lane[1:3]))


def _by_look(bars: Iterable[_Bar]) -> Iterable[list[_Bar]]:
    """Put bars that look alike into one trace, those on top last."""
    alike: dict[tuple[bool, str], list[_Bar]] = {}
    for bar in bars:
        alike.setdefault((bar.on_top, repr(bar.marker)), []).append(bar)
    return [alike[look] for look in sorted(alike, key=lambda look: look[0])]


def _interval_bar(stage: StageInterval, story: Story) -> _Bar:
    kind = kind_of(stage.stage)
    only = _TTFT_ONLY if stage.horizon == Horizon.TTFT else ""
    lines = [
        f"<b>{plain(stage.stage)}</b>" + (" (done again after preemption)" if stage.recompute else ""),
        f"{duration(stage.duration_ns)} from {duration(stage.begin_ns)} on{_share(stage, story)}",
    ]
    if stage.reason is not None:
        lines.append(f"reason: {plain(stage.reason)}")
    if stage.holder is not None:
        lines.append(f"held by: {plain(stage.holder)}")
    if stage.first_step is not None:
        last = "" if stage.last_step == stage.first_step else f" to {stage.last_step}"
        lines.append(f"step {stage.first_step}{last}")
    if stage.item is not None:
        lines.append(f"media item {stage.item}")
    return _Bar(
        # A stage may be in two processes: each has a lane of its own for it.
        lane=("stage", stage.stage, only, stage.role),
        begin_ns=stage.begin_ns,
        duration_ns=stage.duration_ns,
        # A line in the bar's own colour: the shortest interval still is a line that is seen.
        marker=stage_marker(stage.stage, kind) | {"line": {"color": stage_colour(stage.stage), "width": 1}},
        hover="<br>".join(lines),
        text=plain(stage.reason) if stage.reason is not None else "",
    )


def _share(stage: StageInterval, story: Story) -> str:
    horizon = Horizon.TTFT if stage.horizon in {"both", Horizon.TTFT} else Horizon.COMPLETION
    whole = story.facts.get(f"{horizon}_ns")
    if not isinstance(whole, int) or not whole:
        return ""
    return f", {stage.duration_ns / whole:.1%} of {HORIZONS[horizon]}".replace("%", " %")


def _is_timed(item: MediaItem) -> bool:
    return item.begin_ns is not None and item.ready_ns is not None


def _item_bar(item: MediaItem, theme: Theme) -> _Bar:
    begin, ready = item.begin_ns or 0, item.ready_ns or 0
    size = f"{item.width} x {item.height} " if item.width and item.height else ""
    lines = [
        f"<b>media item {item.item}</b>: {size}{plain(item.format or '')}",
        f"ready after {duration(ready - begin)}",
        f"could have been {duration(item.slack_ns)} later without delaying the request",
    ]
    lines += [
        f"{name}: {plain(answer)}"
        for name, answer in (
            ("media cache", item.media_cache),
            ("processor cache", item.processor_cache),
            ("encoder cache", item.encoder_cache),
        )
        if answer is not None
    ]
    ground = GROUNDS[theme]
    return _Bar(
        lane=("item", f"media item {item.item}"),
        begin_ns=begin,
        duration_ns=ready - begin,
        marker={"color": ground.grid, "line": {"color": ground.muted, "width": 1}},
        hover="<br>".join(lines),
        width=_THIN,
    )


def _step_bars(step: StepBeside, story: Story, theme: Theme) -> Iterable[_Bar]:
    ground = GROUNDS[theme]
    is_own = step.own_tokens is not None
    began = step.begin_unix_ns - story.received_unix_ns
    whose = f"{step.own_tokens} tokens of this request" if is_own else "this request was not in it"
    lines = [
        f"<b>step {step.step}</b>: {whose}",
        f"{duration(step.end_unix_ns - step.begin_unix_ns)}, {step.requests} requests, {step.tokens} tokens",
        *_others(story.company.get((step.engine, step.step), ())),
        f"{step.running} running, {step.waiting} waiting",
    ]
    work = Stage.DECODE if step.own_tokens == 1 else Stage.PREFILL
    yield _Bar(
        lane=("step", f"steps {step.engine}"),
        begin_ns=began,
        duration_ns=step.end_unix_ns - step.begin_unix_ns,
        marker={
            "color": stage_colour(work) if is_own else "rgba(0,0,0,0)",
            "line": {"color": ground.surface if is_own else ground.muted, "width": 1},
        },
        hover="<br>".join(lines),
    )
    if step.encoder_begin_unix_ns is not None and step.encoder_end_unix_ns is not None:
        took = step.encoder_end_unix_ns - step.encoder_begin_unix_ns
        encoding = f"of it {duration(took)} of encoding, {step.encoder_items} items"
        yield _Bar(
            lane=("step", f"steps {step.engine}"),
            begin_ns=step.encoder_begin_unix_ns - story.received_unix_ns,
            duration_ns=took,
            marker={"color": stage_colour(Stage.ENCODE), "line": {"color": ground.surface, "width": 1}},
            hover="<br>".join([*lines[:2], encoding, *lines[2:]]),
            width=_THIN,
            on_top=True,
        )


def _others(company: Sequence[Company]) -> Iterable[str]:
    for others in company:
        yield f"with {others.requests} {plain(others.traffic_class)} ({others.tokens} tokens)"


def _mark_horizons(figure: go.Figure, story: Story, until_ns: int, theme: Theme) -> None:
    """Mark the ends of the horizons, their names one above the other."""
    for horizon, name in HORIZONS.items():
        at = story.facts.get(f"{horizon}_ns")
        if not isinstance(at, int):
            continue
        x = at / NS_PER_MS
        line = {"color": GROUNDS[theme].muted, "width": 1, "dash": "dash"}
        figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, xref="x", yref="paper", line=line)
        figure.add_annotation(
            x=x,
            y=1,
            xref="x",
            yref="paper",
            yanchor="bottom",
            yshift=0 if horizon is Horizon.TTFT else _LABEL_PX,
            xanchor="right" if 2 * at > until_ns else "left",
            text=f"{name} {duration(at)}",
            showarrow=False,
        )
