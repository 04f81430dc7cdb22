from __future__ import annotations

import dataclasses
import itertools

import pytest
from analyses import latency, poor, report

from stagetrace_analyzer.figures.distributions import (
    DistributionOptions,
    Metric,
    latency_ecdf,
    latency_histogram,
)
from stagetrace_analyzer.figures.palette import TEMPLATES, Theme
from stagetrace_analyzer.results import Latency

FAST, SLOW = report("fast", None, ttft=latency(20.0)), report("slow", None, ttft=latency(300.0, failed=400))


def curves(figure):
    """The curves by class."""
    return {trace.name: trace for trace in figure.data if trace.mode == "lines"}


def test_curves_are_the_distributions() -> None:
    """A curve a class, of the values as they are, on a logarithmic axis of milliseconds."""
    figure = latency_ecdf([FAST, SLOW])
    found = curves(figure)
    assert list(found) == ["fast", "slow, 10.0 % never got there"]
    assert list(found["fast"].x) == pytest.approx([ns / 1e6 for ns in FAST.ttft.ecdf_ns])
    assert found["fast"].y[-1] == 1.0
    assert figure.layout.xaxis.type == "log"
    assert "ms" in figure.layout.xaxis.title.text


def test_failed_requests_are_seen() -> None:
    """The curve of a class ends below 1 where requests failed, at a mark; its name says how many."""
    figure = latency_ecdf([FAST, SLOW])
    curve = curves(figure)["slow, 10.0 % never got there"]
    assert curve.y[-1] == pytest.approx(0.9)
    (mark,) = [trace for trace in figure.data if trace.mode == "markers"]
    assert (mark.x[0], mark.y[0]) == (curve.x[-1], curve.y[-1])
    assert list(mark.customdata) == ["400 of 4,000 never got here"]
    assert not [trace for trace in latency_ecdf([FAST]).data if trace.mode == "markers"]


@pytest.mark.parametrize("metric", Metric)
def test_every_latency_can_be_shown(metric: Metric) -> None:
    """The curve is that of the metric, in the theme that is asked for."""
    figure = latency_ecdf([FAST], DistributionOptions(metric, Theme.DARK))
    assert list(figure.data[0].y) == pytest.approx(list(getattr(FAST, metric).ecdf_p))
    assert figure.layout.template == TEMPLATES["dark"]


def test_a_class_keeps_its_colour_from_phase_to_phase() -> None:
    """Classes have colours, and phases line styles."""
    reports = [report(name, phase) for phase in ("alone", "mixed") for name in ("text", "image")]
    lines = [trace.line for trace in latency_ecdf(reports).data if trace.mode == "lines"]
    assert lines[0].color == lines[2].color != lines[1].color == lines[3].color
    assert lines[0].dash == lines[1].dash != lines[2].dash == lines[3].dash


def test_a_histogram_adds_up_to_what_was_reached() -> None:
    """Bins are of equal ratio; those of a class add up to the share of requests that did not fail."""
    found = curves(latency_histogram([FAST, SLOW]))
    assert sum(found["fast"].y[::2]) == pytest.approx(1.0)
    assert sum(found["slow, 10.0 % never got there"].y[::2]) == pytest.approx(0.9)
    edges = [*found["fast"].x[::2], found["fast"].x[-1]]
    ratios = [after / before for before, after in itertools.pairwise(edges)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_a_histogram_is_where_the_times_are() -> None:
    """Times that are all alike are in one bin, also a single time of no length."""
    for ns in (0, 7_000_000):
        one = dataclasses.replace(FAST, ttft=Latency(FAST.ttft.quantiles, None, [1.0], [ns]))
        figure = latency_histogram([one])
        assert sum(figure.data[0].y[::2]) == pytest.approx(1.0)
        edges = figure.layout.xaxis.range
        assert edges[0] < edges[1]


def test_nothing_to_show() -> None:
    """A class that no request got through is left out; without any the figures are empty."""
    assert list(curves(latency_ecdf([poor(), FAST]))) == ["fast"]
    assert latency_ecdf([poor()]).data == ()
    assert latency_histogram([]).data == ()
