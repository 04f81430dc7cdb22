from __future__ import annotations

import dataclasses

import pytest
from dashboarding import MS

from stagetrace.stages import Stage
from stagetrace_analyzer.figures.palette import Theme, stage_colour
from stagetrace_analyzer.queries.requests import Company, MediaItem, StageInterval, StepBeside
from stagetrace_analyzer.queries.steps import EngineStep, StepBucket
from stagetrace_dashboard.figures.steps import steps_over_time, stretch_of_bucket, stretch_of_step
from stagetrace_dashboard.figures.waterfall import WaterfallOptions, waterfall
from stagetrace_dashboard.story import Story
from stagetrace_dashboard.view import RequestKey


def interval(stage, begin_ms, ms, role="api", horizon="both", **facts):
    """An interval of a request."""
    return StageInterval(
        horizon=horizon,
        stage=stage,
        kind=Stage(stage).kind.value,
        reason=facts.get("reason"),
        holder=facts.get("holder"),
        role=role,
        begin_ns=begin_ms * MS,
        duration_ns=ms * MS,
        item=facts.get("item"),
        first_step=facts.get("first_step"),
        last_step=facts.get("last_step", facts.get("first_step")),
        recompute=False,
    )


def step(number, begin_ms, ms, own_tokens=None, encoding_ms=0):
    """A step beside a request that was received at time 0."""
    begin = begin_ms * MS
    return StepBeside(
        engine="e",
        step=number,
        begin_unix_ns=begin,
        end_unix_ns=begin + ms * MS,
        encoder_begin_unix_ns=begin if encoding_ms else None,
        encoder_end_unix_ns=begin + encoding_ms * MS if encoding_ms else None,
        own_tokens=own_tokens,
        requests=2,
        tokens=300,
        decodes=0,
        encoder_items=1 if encoding_ms else 0,
        running=2,
        waiting=1,
    )


@pytest.fixture
def story():
    """A text request that waited 40 ms for a step that encoded somebody's image."""
    return Story(
        key=RequestKey(0, 1),
        facts={
            "instance": "s",
            "received_unix_ns": 0,
            "ttft_ns": 100 * MS,
            "completion_ns": 160 * MS,
            "ended_ns": 160 * MS,
        },
        stages=[
            interval("receive", 0, 10),
            interval("prefill.wait", 10, 40, "engine", reason="step", holder="r-9", first_step=1),
            interval("prefill", 50, 45, "engine", first_step=2),
            interval("respond", 95, 5, horizon="ttft"),
            interval("decode", 95, 60, "engine", "completion", first_step=3, last_step=9),
            interval("respond", 155, 5, horizon="completion"),
        ],
        media=[],
        steps=[step(1, 0, 50, encoding_ms=45), step(2, 50, 45, own_tokens=35)],
        company={("e", 1): [Company(1, "image/short", 1, 274)], ("e", 2): [Company(2, "text/short", 3, 3)]},
        mates=[],
    )


def bars(figure):
    """Every bar as (lane, begin, length, colour, pattern, text, hover)."""
    lanes = dict(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True))
    for trace in figure.data:
        for place, y in enumerate(trace.y):
            marker = trace.marker
            yield (
                lanes[y],
                trace.base[place],
                trace.x[place],
                marker.color,
                marker.pattern.shape or "",
                trace.text[place],
                trace.customdata[place],
            )


def test_every_interval_is_a_bar(story):
    """Each is on the lane of its stage, as long as it was, in the stage's colour; the lanes are by process."""
    figure = waterfall(story)
    found = {(lane, begin): (length, colour) for lane, begin, length, colour, *_ in bars(figure)}
    for stage in story.stages:
        lane = stage.stage + (" (first token)" if stage.horizon == "ttft" else "")
        assert found[lane, stage.begin_ns / MS] == (stage.duration_ns / MS, stage_colour(stage.stage))
    assert figure.layout.yaxis.ticktext == (
        "<b>API server s</b>",
        "receive",
        "respond",
        "respond (first token)",
        "<b>engine e</b>",
        "prefill.wait",
        "prefill",
        "decode",
        "<b>steps of the engine</b>",
        "steps e",
    )


def test_a_stage_of_two_processes_has_two_lanes(story):
    """A wait that begins in the server and goes on in the engine stands with both, and moves nothing else."""
    both = [interval("prefill.wait", 8, 2), *story.stages, interval("encode", 45, 5, "engine", first_step=2)]
    figure = waterfall(dataclasses.replace(story, stages=both))
    places = figure.layout.yaxis.tickvals
    assert places == tuple(range(len(places)))
    titles = figure.layout.yaxis.ticktext
    assert titles[2:6] == ("prefill.wait", "respond", "respond (first token)", "<b>engine e</b>")
    assert titles[6:8] == ("prefill.wait", "encode")
    on_lane = {(y, base) for trace in figure.data for y, base in zip(trace.y, trace.base, strict=True)}
    assert {(2, 8), (6, 10), (7, 45)} <= on_lane


def test_waits_are_hatched_and_say_why(story):
    """Only the wait is hatched; its reason stands in it, and who held it is said on hover."""
    hatched = [
        (lane, text, hover) for lane, *_, pattern, text, hover in bars(waterfall(story)) if pattern == "/"
    ]
    ((lane, text, hover),) = hatched
    assert (lane, text) == ("prefill.wait", "step")
    assert "reason: step" in hover
    assert "held by: r-9" in hover
    assert "40.0 ms from 10.0 ms on, 40.0 % of TTFT" in hover


def test_steps_say_who_was_in_them(story):
    """A step it waited for is drawn hollow, its own ones are filled; both say who else was in them."""
    steps = [bar for bar in bars(waterfall(story)) if bar[0] == "steps e"]
    colours = [colour for *_, colour, _, _, _ in steps]
    assert colours == ["rgba(0,0,0,0)", stage_colour("prefill"), stage_colour("encode")]
    beside, own, encoding = (hover for *_, hover in steps)
    assert "this request was not in it" in beside
    assert "with 1 image/short (274 tokens)" in beside
    assert "35 tokens of this request" in own
    assert "with 3 text/short (3 tokens)" in own
    assert "45.0 ms of encoding, 1 items" in encoding


def test_the_axis_can_be_shared(story):
    """Two requests side by side are drawn to the longer one's end."""
    alone, beside = waterfall(story), waterfall(story, WaterfallOptions(Theme.DARK, 500 * MS))
    assert alone.layout.xaxis.range[1] == pytest.approx(160 * 1.03)
    assert beside.layout.xaxis.range[1] == pytest.approx(500 * 1.03)


def test_nothing_known_is_an_empty_figure(story):
    """A request without intervals has no bars and no lanes."""
    facts = {"instance": "s", "received_unix_ns": 0, "ttft_ns": None, "completion_ns": None, "ended_ns": None}
    figure = waterfall(Story(story.key, facts, [], [], [], {}, []))
    assert not figure.data
    assert figure.layout.yaxis.ticktext == ()


def test_media_items_have_their_slack(story):
    """An item is a bar from its begin until it was ready, and says how much later it could have been."""
    item = MediaItem(
        0, "http", "h", "jpeg", 9, 32, 16, 5, None, 1, None, "hit", "miss", 2 * MS, 9 * MS, 3 * MS
    )  # fmt: skip
    with_item = Story(story.key, story.facts, story.stages, [item], [], {}, [])
    ((_, begin, length, *_, hover),) = [bar for bar in bars(waterfall(with_item)) if bar[0] == "media item 0"]
    assert (begin, length) == (2, 7)
    assert "could have been 3.00 ms later" in hover
    assert "encoder cache: miss" in hover


def engine_step(number, begin_ms, end_ms, **facts):
    """A step with defaults."""
    row = {"encoder_ns": None, "requests": 2, "tokens": 5, "decodes": 2, "encoder_items": 0, "running": 2}
    row |= {"waiting": 0, "reason": None} | facts
    return EngineStep(number, begin_ms * MS, begin_ms * MS, end_ms * MS, **row)


def heights(figure, name):
    """The corners of a trace as (ms, height)."""
    (trace,) = [trace for trace in figure.data if trace.name == name]
    return [(int(x.astype("datetime64[ms]").astype(int)), y) for x, y in zip(trace.x, trace.y, strict=True)]


def test_gaps_between_steps_are_gaps():
    """Where no step ran there are no tokens, and the queue stays as it was: a stall is seen."""
    steps = [engine_step(1, 0, 10, waiting=3), engine_step(2, 50, 60, waiting=1)]
    figure = steps_over_time([stretch_of_step(step) for step in steps])
    assert heights(figure, "prompt tokens") == [(0, 5), (10, 0), (50, 5), (60, 5)]
    assert heights(figure, "decoding tokens")[0] == (0, 2)
    assert heights(figure, "waiting") == [(0, 3), (10, 3), (50, 1), (60, 1)]
    assert {trace.line.shape for trace in figure.data} == {"hv"}


def test_steps_that_follow_at_once_have_no_gap():
    """A step that begins where the one before ends, or before that, takes over from it."""
    steps = [engine_step(1, 0, 10), engine_step(2, 10, 20, tokens=9), engine_step(3, 15, 30)]
    figure = steps_over_time([stretch_of_step(step) for step in steps])
    assert heights(figure, "prompt tokens") == [(0, 5), (10, 9), (15, 5), (30, 5)]


def test_encoding_is_inside_the_step():
    """The encoder's part is drawn up to its length, the rest on it up to the step's."""
    stretches = [stretch_of_step(engine_step(1, 0, 40, encoder_ns=30 * MS, encoder_items=2))]
    figure = steps_over_time(stretches)
    assert heights(figure, "encoding") == [(0, 30), (40, 30)]
    assert heights(figure, "rest of the step") == [(0, 40), (40, 40)]
    (encoding,) = [trace for trace in figure.data if trace.name == "encoding"]
    assert encoding.customdata[0] == "30.0 ms (2 items)"


def test_many_steps_are_shown_by_their_largest():
    """A stretch with several steps says so in the titles, and shows the longest one."""
    bucket = StepBucket(0, 4, 90 * MS, 270, 2, 60 * MS, 7, 40 * MS, 1, 5, 2, "kv")
    stretch = stretch_of_bucket(bucket, 100 * MS)
    figure = steps_over_time([stretch])
    assert figure.layout.yaxis.title.text == "tokens of the largest step"
    assert heights(figure, "rest of the step") == [(0, 60), (100, 60)]
    (waiting,) = [trace for trace in figure.data if trace.name == "waiting"]
    assert waiting.customdata[0] == "2 (kv)"


def test_no_steps_are_an_empty_figure():
    """A time without steps can be drawn."""
    assert all(not len(trace.x) for trace in steps_over_time([]).data)
