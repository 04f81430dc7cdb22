from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace_analyzer.intervals import block_numbers, resample_weights
from stagetrace_analyzer.resampling import BlockTable
from stagetrace_analyzer.results import Region


def table_of(horizon, spent, pieces=1):
    """A table with the blocks of as many requests."""
    blocks = block_numbers(len(horizon))
    table = BlockTable(spent.shape[1])
    for rows in np.array_split(np.arange(len(horizon)), pieces):
        table.add(blocks[rows], horizon[rows], spent[rows])
    return table


@settings(max_examples=30, deadline=None)
@given(requests=st.integers(1, 300), pieces=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_the_figure_itself_is_a_direct_count(requests, pieces, seed):
    """All: plain sums.  Typical and tail: a fifth and a twentieth of the requests, by the horizon's order."""
    generator = np.random.default_rng(seed)
    spent = np.floor(generator.exponential(1e7, (requests, 3)))
    horizon = spent.sum(axis=1)
    sums = table_of(horizon, spent, pieces).resample()
    assert sums[Region.ALL].requests[0] == requests
    assert sums[Region.ALL].spent_ns[0] == pytest.approx(spent.sum(axis=0))
    assert sums[Region.TYPICAL].requests[0] == pytest.approx(requests / 5)
    assert sums[Region.TAIL].requests[0] == pytest.approx(requests / 20)
    for found in sums.values():
        assert found.spent_ns[0].sum() == pytest.approx(found.horizon_ns[0])


def test_a_region_is_that_of_sorted_requests():
    """The composition of a region equals that of the requests between its quantiles, up to the buckets."""
    generator = np.random.default_rng(1)
    wait, work = generator.exponential(5e6, 20_000), generator.uniform(1e7, 2e7, 20_000)
    horizon = wait + work
    sums = table_of(horizon, np.column_stack([wait, work])).resample()
    order = np.argsort(horizon)
    for region, first, last in ((Region.TYPICAL, 8_000, 12_000), (Region.TAIL, 19_000, 20_000)):
        exact = wait[order[first:last]].sum() / horizon[order[first:last]].sum()
        assert sums[region].shares([0])[0] == pytest.approx(exact, rel=0.01)


def test_draws_are_those_of_blocks():
    """Each draw's sums are those of the blocks it took, with its own quantiles."""
    generator = np.random.default_rng(2)
    spent = np.floor(generator.exponential(1e7, (600, 2)))
    horizon, blocks = spent.sum(axis=1), block_numbers(600)
    sums = table_of(horizon, spent).resample()
    weights = resample_weights(30)
    for draw in (1, 500, 1000):
        times = weights[draw][blocks].astype(int)
        taken = np.repeat(np.arange(600), times)
        assert sums[Region.ALL].horizon_ns[draw] == pytest.approx(horizon[taken].sum())
        tail = np.sort(horizon[taken])[-len(taken) // 20 :]
        assert sums[Region.TAIL].horizon_ns[draw] == pytest.approx(tail.sum(), rel=0.02)


def test_nothing_gives_nothing():
    """Without requests there are no sums, and a share of nothing is not a number."""
    sums = BlockTable(2).resample()
    assert sums[Region.ALL].requests[0] == 0
    assert np.isnan(sums[Region.ALL].shares([0])[0])
    assert sums[Region.TAIL].requests[0] == 0
