"""The demonstration's phases."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("PIL")

from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, Stream
from stagetrace_analyzer.demo.load import Phase, affordable_images_per_s, demo_phases, run_phases
from stagetrace_analyzer.demo.observations import Observation


def test_the_phases_are_each_class_alone_and_then_both():
    """The warm-up comes first, and has both classes in turn."""
    phases = demo_phases()
    assert [(phase.name, [stream.traffic.label for stream in phase.streams]) for phase in phases] == [
        ("warm-up", ["text", "image"]),
        ("text only", ["text"]),
        ("image only", ["image"]),
        ("mixture", ["text", "image"]),
    ]
    assert [phase.rounds_in_turn > 0 for phase in phases] == [True, False, False, False]


def test_phases_last_until_each_class_has_its_requests():
    """A mixture lasts as long as its rarer class needs."""
    phases = demo_phases(text_per_s=4, images_per_s=0.5, requests=100)
    assert [phase.duration_s for phase in phases[1:]] == [25, 200, 200]


def test_phases_run_one_after_the_other_and_report_how_far_they_are(spoken):
    """Every request is observed under its phase, and progress ends at the total."""
    both = (Stream(TEXT, 20.0), Stream(IMAGE, 10.0))
    phases = (Phase("warm-up", both, 0.2, rounds_in_turn=2), Phase("mixture", both, 0.5))
    progress = []
    seen = run_phases(spoken.url, phases, progress.append)
    assert len(seen) == len(spoken.requests)
    assert {one.error for one in seen} == {None}
    names = [one.phase for one in seen]
    assert names == sorted(names, reverse=True)
    for phase in phases:
        steps = [step for step in progress if step.phase == phase.name]
        assert [step.ended for step in steps] == list(range(steps[0].total + 1))
        assert steps[0].total == names.count(phase.name)
    last_of_warm_up = max(
        one.intended_unix_ns + one.last_ns - one.intended_ns for one in seen if one.phase == "warm-up"
    )
    assert min(one.intended_unix_ns for one in seen if one.phase == "mixture") > last_of_warm_up


@pytest.mark.parametrize(
    ("label", "ttft_ms", "per_s"),
    [
        ("image", [300, 900], 1.25),
        ("image", [1200, 2000], 0.5),
        ("image", [None], 1.25),
        ("text", [5000], 1.25),
    ],
)
def test_a_slow_server_gets_fewer_images(label, ttft_ms, per_s):
    """At most 60 % of its time goes to images, by the fastest of them."""
    one = Observation("r", "warm-up", label, 0, 0, 0, None, 9_000_000_000, 200, None, 1)
    seen = [dataclasses.replace(one, first_useful_ns=ms and ms * 1_000_000) for ms in ttft_ms]
    assert affordable_images_per_s(seen, 1.25) == per_s


def test_failures_are_counted_as_they_come(spoken):
    """A server that refuses everything still gives a whole run."""
    spoken.status = 503
    progress = []
    seen = run_phases(spoken.url, [Phase("text only", (Stream(TEXT, 30.0),), 0.5)], progress.append)
    assert progress[-1].failed == progress[-1].total == len(seen) > 0
