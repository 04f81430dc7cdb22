from __future__ import annotations

import pytest
from analyses import HOSTILE, report

from stagetrace.stages import Kind, Stage
from stagetrace_analyzer.figures.labels import (
    class_label,
    in_order,
    kind_of,
    log_ticks,
    percent,
    plain,
    rounded,
)
from stagetrace_analyzer.results import Share


def test_names_from_the_data_are_shown_as_they_are() -> None:
    """Nothing is left that plotly takes for HTML, an entity or TeX, and no control character."""
    shown = plain(HOSTILE, longest=1000)
    assert not set(shown) & set("<>$\x1b\n")
    assert shown == '&lt;a href="//evil"&gt;x&lt;/a&gt; | `b` **c** %{y} &#36;d&#36; &amp;lt; "?[31m?# e'
    assert plain("left\u202eright") == "left?right"


def test_long_names_are_cut_before_they_are_escaped() -> None:
    """A name is cut between its characters, never inside an entity."""
    assert plain("<" * 50, longest=3) == "&lt;&lt;\N{HORIZONTAL ELLIPSIS}"


def test_class_labels() -> None:
    """A label has the phase and the mark of a class that is decided at the end."""
    assert class_label(report("a", "b")) == "[b] a"
    assert class_label(report("a", None, post=True)) == "a (post)"


def test_stages_are_in_the_order_of_the_model() -> None:
    """Known stages come as requests meet them, unknown ones after them by name."""
    assert in_order({"zebra", "respond", "apple", "receive"}) == ["receive", "respond", "apple", "zebra"]
    assert in_order([stage.value for stage in reversed(Stage)]) == [stage.value for stage in Stage]


def test_kinds_of_stages() -> None:
    """The model says the kind of its stages; of others the name does."""
    assert [kind_of(name) for name in ("handoff", "encode.wait", "warp.wait", "warp", "unattributed")] == [
        Kind.TRANSFER,
        Kind.WAIT,
        Kind.WAIT,
        Kind.WORK,
        Kind.UNATTRIBUTED,
    ]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (16.0, 900.0, ["20", "50", "100", "200", "500"]),
        (0.5, 20_000.0, ["1", "10", "100", "1,000", "10,000"]),
        (55.0, 58.0, ["55", "56.5", "58"]),
        (0.02, 0.3, ["0.02", "0.05", "0.1", "0.2"]),
    ],
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float, texts: list[str]) -> None:
    """Over few decades 1, 2 and 5 are ticks, over many only 1; where there is none of these, the ends are."""
    values, found = log_ticks(low, high)
    assert found == texts
    assert all(low <= value * 1.01 and value <= high * 1.01 for value in values)


def test_numbers_for_reading() -> None:
    """Three figures are enough; shares have their interval if there is one."""
    assert [rounded(value) for value in (0.04, 99.94, 1234.5)] == ["0.0", "99.9", "1,234"]
    assert percent(Share(0.5, 0.4, 0.6)) == "50.0 % [40.0, 60.0]"
    assert percent(Share(0.5)) == "50.0 %"
