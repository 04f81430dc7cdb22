from __future__ import annotations

from datetime import datetime

import pytest
from analyses import HOSTILE, poor, report, windows

from stagetrace_analyzer.figures.over_time import OverTimeOptions, load_over_time, stages_over_time
from stagetrace_analyzer.figures.palette import TEMPLATES, Theme

ALONE = report("text", "alone", 60.0, windows=windows(60.0))
MIXED = [
    report("text", "mixed", 90.0, windows=windows(90.0, begin_s=300)),
    report("image", "mixed", 400.0, windows=windows(400.0, begin_s=300)),
]


def lines(figure, name):
    """The three lines of a class: arrivals, in flight, TTFT."""
    return [trace for trace in figure.data if trace.name == name and "lines" in trace.mode]


def test_load_and_latency_under_each_other() -> None:
    """Arrivals a second, requests in flight and TTFT p50 in ms of every window, on one axis of time."""
    figure = load_over_time([ALONE])
    arrivals, in_flight, ttft = lines(figure, "text")
    assert list(arrivals.y[:3]) == pytest.approx([2.0, 2.3, 2.6])
    assert list(in_flight.y[:3]) == pytest.approx([0.0, 0.2, 0.4])
    assert list(ttft.y[:3]) == pytest.approx([60.0, 66.0, 72.0])
    assert arrivals.x[0] == datetime(2026, 11, 30, 7, 0, 5)  # noqa: DTZ001 - axes of plotly know no zone
    assert [figure.layout[f"yaxis{n}"].title.text for n in ("", 2, 3)] == [
        "arrivals a second",
        "requests in flight",
        "TTFT p50, ms",
    ]


def test_a_class_is_one_line_that_stops_between_phases() -> None:
    """Phases of a class are one series with a gap, and each phase is marked where it began."""
    figure = load_over_time([ALONE, *MIXED])
    (arrivals, *_) = lines(figure, "text")
    assert len(arrivals.x) == 2 * 13
    assert arrivals.x[12] is None
    assert [note.text for note in figure.layout.annotations] == ["alone", "mixed"]
    assert len(figure.layout.shapes) == 2


def test_names_of_phases_have_room() -> None:
    """A phase whose next one begins soon shows as much of its name as fits, or none; its line is there."""
    phases = [
        report("text", name, windows=tuple(windows(60.0, begin_s)[:length]))
        for name, begin_s, length in (
            ("a", 0, 1),
            ("twelve letters", 3, 2),
            ("the longest name of all", 33, 12),
        )
    ]
    figure = load_over_time(phases)
    assert [note.text for note in figure.layout.annotations] == [
        "twelve letters",
        "the longest name of a\N{HORIZONTAL ELLIPSIS}",
    ]
    assert len(figure.layout.shapes) == 3


def test_windows_that_tell_nothing() -> None:
    """No arrivals leave a gap; a median that was not reached is marked above all that were."""
    figure = load_over_time([ALONE])
    ttft = lines(figure, "text")[2]
    assert (ttft.y[4], ttft.y[9]) == (None, None)
    (mark,) = [trace for trace in figure.data if trace.mode == "markers"]
    assert list(mark.x) == [ttft.x[9]]
    assert mark.y[0] > max(value for value in ttft.y if value is not None)
    assert mark.name == "p50 not reached: too few got there"


def test_stages_are_stacked_by_window() -> None:
    """Bars as wide as their window add up to the mean completion of what arrived, under the arrivals."""
    figure = stages_over_time(ALONE, OverTimeOptions(Theme.DARK))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [trace.name for trace in bars][:3] == ["receive", "preprocess", "handoff"]
    assert sum(trace.y[0] for trace in bars) == pytest.approx(240.0)
    assert bars[0].width[0] == 10_000
    assert {trace.name: trace.marker.pattern.shape for trace in bars}["decode.wait"] == "/"
    assert next(iter(figure.data)).y[0] == pytest.approx(2.0)
    assert figure.layout.template == TEMPLATES["dark"]


def test_windows_without_length_and_hostile_names() -> None:
    """A class whose requests all came at once has no rate; its name is shown as it is."""
    figure = load_over_time([poor(phase=HOSTILE)])
    (arrivals, *_) = [trace for trace in figure.data if "lines" in trace.mode]
    assert arrivals.y[0] is None
    (phase,) = load_over_time([report(HOSTILE, HOSTILE)]).layout.annotations
    assert not set(arrivals.name + phase.text) & set("<>$")
    assert stages_over_time(poor()).layout.height > 0
    assert load_over_time([]).data == ()
