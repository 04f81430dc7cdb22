"""What a reader chooses: controls, bars, and times that are dragged over."""

from __future__ import annotations

import pytest

from stagetrace.stages import Horizon
from stagetrace_dashboard.brush import limited, picked
from stagetrace_dashboard.filters import changed
from stagetrace_dashboard.view import View

SECOND = 10**9


@pytest.mark.parametrize(
    "layout",
    [
        {"xaxis.range[0]": "1970-01-01 00:00:01.5", "xaxis.range[1]": "1970-01-01 00:00:03.0000004"},
        {"xaxis3.range": ["1970-01-01 00:00:01.500", "1970-01-01 00:00:03"]},
    ],
)
def test_a_time_is_read_to_the_microsecond(layout):
    """What plotly tells of a dragged time becomes the view's, as exactly as the command line takes it."""
    view = limited(View("engine"), layout)
    assert (view.since_unix_ns, view.until_unix_ns) == (1_500_000_000, 3 * SECOND)


@pytest.mark.parametrize(
    "layout",
    [
        None,
        {},
        {"autosize": True},
        {"xaxis.range[0]": "1970-01-01 00:00:01"},
        {"xaxis.range[0]": 1, "xaxis.range[1]": 2},
        {"xaxis.range[0]": "x", "xaxis.range[1]": "y"},
        {"xaxis.range[0]": "1970-01-01 00:00:03", "xaxis.range[1]": "1970-01-01 00:00:01"},
        {"xaxis.range": ["1970-01-01 00:00:01.x", "1970-01-01 00:00:03"]},
    ],
)
def test_what_is_no_time_changes_nothing(layout):
    """Whatever else plotly tells, the view stays."""
    view = View("engine", since_unix_ns=5)
    assert limited(view, layout) == view


def test_a_double_click_shows_all():
    """An axis that is back to its own range takes the limits away."""
    view = View("engine", since_unix_ns=5, until_unix_ns=9)
    assert limited(view, {"xaxis.autorange": True}) == View("engine")


def test_a_bar_chooses_its_class_and_again_not():
    """The bar at a place stands for a class; a second click on it shows all."""
    bars = [{"traffic_class": "a"}, {"traffic_class": "b", "phase": "p"}]
    chosen = picked(View(), {"y": 1}, bars)
    assert chosen == View(traffic_class="b", phase="p")
    assert picked(chosen, {"y": 1}, bars) == View()


@pytest.mark.parametrize("click", [None, {}, {"y": 7}, {"y": "a"}])
def test_a_click_beside_chooses_nothing(click):
    """What is no bar changes nothing."""
    assert picked(View(), click, [{"traffic_class": "a"}]) == View()


@pytest.mark.parametrize(
    ("name", "value", "view"),
    [
        ("traffic_class", "a", View(traffic_class="a")),
        ("traffic_class", None, View()),
        ("id", "  x ", View(id="x")),
        ("id", "", View()),
        ("min_ttft_ms", 12, View(min_ttft_ms=12)),
        ("min_ttft_ms", "", View()),
        ("min_ttft_ms", -1, View()),
        ("by_phase", False, View(by_phase=False)),
        ("horizon", "completion", View(horizon=Horizon.COMPLETION)),
    ],
)
def test_a_control_changes_one_choice(name, value, view):
    """What a control says becomes the view's; nothing is no choice."""
    assert changed(View(), name, value) == view
