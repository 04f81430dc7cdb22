from __future__ import annotations

import pytest
from analyses import HOSTILE, SHARES, compositions, poor, report

from stagetrace.stages import Horizon
from stagetrace_analyzer.figures.palette import STAGE_COLOURS, TEMPLATES, Theme
from stagetrace_analyzer.figures.partition import (
    Measure,
    PartitionOptions,
    stage_partition,
    typical_against_tail,
)

TEXT, IMAGE = report("text/short"), report("image/long", mean_ms=400.0, compositions=compositions(400.0))


def bars(figure):
    """The bars by stage."""
    return {trace.name: trace for trace in figure.data if trace.type == "bar"}


def test_every_class_is_a_bar_of_its_stages() -> None:
    """Stages come as requests meet them, in milliseconds, and add up to the mean horizon."""
    found = bars(stage_partition([TEXT, IMAGE]))
    assert list(found) == list(SHARES[Horizon.TTFT])
    assert found["prefill.wait"].x == pytest.approx((27.0, 180.0))
    assert [sum(trace.x[n] for trace in found.values()) for n in (0, 1)] == pytest.approx([60.0, 400.0])


def test_shares_of_the_other_horizon() -> None:
    """The share of completion, of 1 in all."""
    options = PartitionOptions(Horizon.COMPLETION, Measure.SHARE, Theme.DARK)
    figure = stage_partition([TEXT, IMAGE], options)
    assert bars(figure)["decode"].x == pytest.approx((0.5, 0.5))
    assert sum(trace.x[0] for trace in bars(figure).values()) == pytest.approx(1.0)
    assert figure.layout.template == TEMPLATES["dark"]
    assert figure.layout.xaxis.title.text == "share of completion"


def test_stages_look_like_the_palette() -> None:
    """Colours are the palette's; waits are hatched and work is plain."""
    found = bars(stage_partition([TEXT]))
    assert {name: trace.marker.color for name, trace in found.items()} == {
        name: STAGE_COLOURS[name] for name in found
    }
    assert (found["prefill.wait"].marker.pattern.shape, found["prefill"].marker.pattern.shape) == ("/", "")


def test_hovering_tells_time_share_and_interval() -> None:
    """What is shown on hovering has milliseconds, the share and its interval, and the horizon."""
    trace = bars(stage_partition([TEXT]))["prefill.wait"]
    assert list(trace.customdata[0]) == ["27.00", "45.0 % [40.5, 49.5]"]
    assert "ms a request" in trace.hovertemplate
    assert "of TTFT" in trace.hovertemplate


def test_the_mean_stands_behind_every_bar() -> None:
    """The whole is written behind the bar, whichever way its length is measured."""
    for measure in Measure:
        figure = stage_partition([TEXT, IMAGE], PartitionOptions(measure=measure))
        (totals,) = [trace for trace in figure.data if trace.type == "scatter"]
        assert list(totals.text) == [" 60.0 ms", " 400 ms"]


def test_typical_requests_against_the_tail() -> None:
    """Two bars with the number of requests behind each; the tail's is as long as its mean."""
    figure = typical_against_tail(TEXT)
    assert list(figure.layout.yaxis.ticktext) == [
        "typical (p40 to p60), n = 752",
        "tail (above p95), n = 188",
    ]
    assert sum(trace.x[1] for trace in bars(figure).values()) == pytest.approx(240.0)


def test_classes_without_requests_have_no_bar() -> None:
    """A class of which no request ended well is left out; without any the figure is empty."""
    assert list(stage_partition([poor(), TEXT]).layout.yaxis.ticktext) == ["[mixture] text/short"]
    assert bars(stage_partition([poor()])) == {}
    assert bars(typical_against_tail(poor())) == {}


def test_equal_and_hostile_labels_stay_apart() -> None:
    """Bars have places, not names: two classes whose names are cut to the same text are two bars."""
    names = [HOSTILE * 9 + "1", HOSTILE * 9 + "2"]
    figure = stage_partition([report(name) for name in names])
    assert len(set(figure.layout.yaxis.tickvals)) == 2
    assert not set("".join(figure.layout.yaxis.ticktext)) & set("<>$")


def test_a_stage_that_the_model_does_not_know_is_shown() -> None:
    """It comes last, in the fallback's colour, hatched if its name says that it is a wait."""
    shares = {horizon: {"warp.wait": 0.4, "receive": 0.6} for horizon in Horizon}
    found = bars(stage_partition([report(compositions=compositions(10.0, shares=shares))]))
    assert list(found) == ["receive", "warp.wait"]
    assert found["warp.wait"].marker.pattern.shape == "/"
    assert found["warp.wait"].x == pytest.approx((4.0,))
