"""One line through parts that lie within and beside each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetrace.critical_path import critical_path
from stagetrace.stages import Stage
from stagetrace.timeline import Part

P, F, D, E = Stage.PREPROCESS, Stage.RETRIEVAL, Stage.MEDIA_DECODE, Stage.ENCODE


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        pytest.param([(P, 1, 3), (E, 4, 9)], [(P, 1, 3), (E, 4, 9)], id="one after the other"),
        pytest.param([(P, 1, 9), (E, 3, 5)], [(P, 1, 3), (E, 3, 5), (P, 5, 9)], id="one within the other"),
        pytest.param([(P, 1, 5), (E, 3, 9)], [(P, 1, 3), (E, 3, 9)], id="the one that began last"),
        pytest.param([(P, 1, 9), (E, 1, 5)], [(E, 1, 5), (P, 5, 9)], id="of two beginnings the shorter"),
        pytest.param([(P, 1, None), (E, 3, 5)], [(P, 1, 3), (E, 3, 5), (P, 5, 20)], id="without an end"),
        pytest.param(
            [(P, -5, 3), (E, 15, 30), (D, 25, 30), (D, 4, 4)], [(P, 0, 3), (E, 15, 20)], id="outside"
        ),
        pytest.param(
            [(F, 1, 4, 0), (F, 1, 6, 1), (P, 7, 9)], [(F, 1, 6, 1), (P, 7, 9)], id="the item that is last"
        ),
        pytest.param(
            [(F, 1, 2, 0), (D, 8, 9, 0), (F, 1, 2, 1), (D, 2, 8, 1), (P, 9, 10)],
            [(F, 1, 2, 0), (D, 8, 9, 0), (P, 9, 10)],
            id="the whole chain of the item that is last",
        ),
        pytest.param(
            [(F, 1, 5, 0), (F, 1, 9, 1), (P, 10, 11), (E, 11, 19, 0), (E, 11, 12, 1)],
            [(F, 1, 9, 1), (P, 10, 11), (E, 11, 19, 0)],
            id="another item in another phase",
        ),
        pytest.param(
            [(F, 2, 8, 0), (P, 3, 5), (E, 8, 9)], [(F, 2, 8, 0), (E, 8, 9)], id="an item beside work"
        ),
        pytest.param(
            [(F, 2, 4, 0), (P, 3, 8), (E, 8, 9)],
            [(F, 2, 3, 0), (P, 3, 8), (E, 8, 9)],
            id="work beside an item",
        ),
        pytest.param(
            [(P, 1, 10), (F, 2, 4, 0), (F, 2, 7, 1)],
            [(P, 1, 2), (F, 2, 7, 1), (P, 7, 10)],
            id="items within work",
        ),
        pytest.param(
            [(P, 1, 10), (F, 2, 3, 0), (D, 7, 8, 0), (D, 2, 7, 1)],
            [(P, 1, 2), (F, 2, 3, 0), (P, 3, 7), (D, 7, 8, 0), (P, 8, 10)],
            id="an item that waits within work",
        ),
        pytest.param([(F, 1, 5, 0), (F, 5, 9, 1)], [(F, 1, 5, 0), (F, 5, 9, 1)], id="items in turn"),
        pytest.param([(F, 1, 5, 0), (F, 1, 5, 1)], [(F, 1, 5, 1)], id="items alike"),
        pytest.param([], [], id="nothing"),
    ],
)
def test_line(parts, line):
    """Nested parts show the one that began last; items show the one that what follows waited for."""
    found = critical_path([Part(s, b, e, *item) for s, b, e, *item in parts], 0, 20)
    assert [
        (s.part.stage, s.begin, s.end) + ((s.part.item,) if s.part.item is not None else ()) for s in found
    ] == line


PARTS = st.lists(
    st.builds(
        Part,
        st.sampled_from([P, F, D, E, Stage.ENCODE_WAIT]),
        st.integers(-3, 25),
        st.none() | st.integers(-3, 25),
        st.none() | st.integers(0, 3),
    ),
    max_size=14,
)


@given(PARTS, st.randoms(use_true_random=False))
def test_whatever_the_parts(parts, order):
    """The line is in order, within its bounds, says only what a part says, and is the same in any order."""
    line = critical_path(parts, 0, 20)
    assert all(one.begin < one.end for one in line)
    assert all(before.end <= after.begin for before, after in pairwise(line))
    assert all(one.begin >= 0 and one.end <= 20 for one in line)
    for one in line:
        ends = [
            (p.begin, 20 if p.end is None else p.end)
            for p in parts
            if (p.stage, p.item) == (one.part.stage, one.part.item)
        ]
        assert any(begin <= one.begin and one.end <= end for begin, end in ends)
    shuffled = parts.copy()
    order.shuffle(shuffled)
    assert critical_path(shuffled, 0, 20) == line


@given(PARTS)
def test_work_without_items_is_never_hidden(parts):
    """Wherever a part without an item is open, the line is in some part."""
    line = critical_path(parts, 0, 20)
    for instant in range(20):
        opened = any(p.item is None and p.begin <= instant < (20 if p.end is None else p.end) for p in parts)
        assert not opened or any(one.begin <= instant < one.end for one in line)
