from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from stagetrace_analyzer.intervals import (
    BLOCKS,
    MIN_BLOCKS,
    P50,
    P95,
    P99,
    block_numbers,
    effective_requests,
    likeness,
    order_statistic_ranks,
    quantile,
    quantiles,
    requests_needed,
    resample_weights,
    share,
    student_t,
)

P90 = Fraction(90, 100)
P999 = Fraction(999, 1000)


@pytest.mark.parametrize(
    ("q", "requests", "ranks"),
    [
        (P50, 100, (40, 61)),
        (P50, 1000, (469, 532)),
        (P90, 1000, (881, 919)),
        (P95, 300, (277, 293)),
        (P95, 1000, (936, 964)),
        (P99, 1000, (983, 997)),
        (P99, 10_000, (9880, 9920)),
    ],
)
def test_ranks_of_order_statistic_intervals(q, requests, ranks):
    """The ranks are those of the binomial distribution (David and Nagaraja, section 7.1)."""
    assert order_statistic_ranks(requests, q) == ranks


@pytest.mark.parametrize(("q", "requests"), [(P99, 100), (P99, 300), (P999, 3000), (P50, 1), (P50, 0)])
def test_few_requests_bound_no_high_quantile(q, requests):
    """No order statistic is above p99 of 300 requests with 97.5 % confidence, nor above p99.9 of 3,000."""
    assert order_statistic_ranks(requests, q)[1] is None


@pytest.mark.parametrize(("q", "needed"), [(P50, 6), (P90, 36), (P95, 72), (P99, 368)])
def test_requests_needed_is_where_the_upper_rank_begins(q, needed):
    """One request fewer has no upper rank."""
    assert requests_needed(q) == needed
    assert order_statistic_ranks(needed, q)[1] is not None
    assert order_statistic_ranks(needed - 1, q)[1] is None


@pytest.mark.parametrize(
    ("degrees", "table"), [(3, 3.182), (5, 2.571), (19, 2.093), (29, 2.045), (100, 1.984), (10**6, 1.960)]
)
def test_student_t_is_the_tables(degrees, table):
    """97.5 % quantiles of the usual table."""
    assert student_t(degrees) == pytest.approx(table, rel=0.002)


@pytest.mark.parametrize(("requests", "blocks"), [(0, 0), (1, 1), (3, 1), (40, 20), (61, 30), (10_000, 30)])
def test_blocks_are_equally_large(requests, blocks):
    """At most 30 blocks of at least two requests, in order, whose sizes differ by at most one."""
    numbers = block_numbers(requests)
    assert len(numbers) == requests
    assert len(np.unique(numbers)) == blocks
    if requests:
        sizes = np.bincount(numbers)
        assert sizes.max() - sizes.min() <= 1
        assert np.all(np.diff(numbers) >= 0)


def test_independent_requests_are_worth_almost_all_of_themselves():
    """Without likeness only the correction for few blocks is taken off."""
    values = np.random.default_rng(1).exponential(1e6, 30_000)
    n_eff = effective_requests(values <= np.median(values), block_numbers(30_000))
    assert 0.5 * 30_000 < n_eff <= 30_000 * (1.959964 / student_t(BLOCKS - 1)) ** 2


def test_alike_neighbours_are_worth_less():
    """Stretches of a hundred equal values are worth about one request each."""
    values = np.repeat(np.random.default_rng(2).exponential(1e6, 3_000), 100)
    n_eff = effective_requests(values <= np.median(values), block_numbers(len(values)))
    assert 1_500 < n_eff < 6_000
    wide, narrow = quantile(values, P95, block_numbers(len(values))), quantile(values, P95)
    assert narrow.n_eff is None
    assert wide.high_ns - wide.low_ns > 5 * (narrow.high_ns - narrow.low_ns)


def test_few_blocks_say_nothing_about_likeness():
    """With fewer than 20 blocks there is no effective number, and requests are taken as independent."""
    values = np.arange(1.0, 39.0)
    blocks = block_numbers(38)
    assert len(np.unique(blocks)) < MIN_BLOCKS
    found = quantile(values, P50, blocks)
    assert (found.value_ns, found.n_eff) == (19, None)
    assert found == quantile(values, P50)


def test_a_high_quantile_of_alike_requests_is_not_estimable():
    """A thousand requests that are worth few bound no p99, and it is said how many would."""
    values = np.repeat(np.random.default_rng(3).exponential(1e6, 50), 20)
    found = quantile(values, P99, block_numbers(1000))
    assert (found.value_ns, found.low_ns, found.high_ns) == (None, None, None)
    worth = math.floor(found.n_eff)
    assert found.reason == (
        f"not estimable: 1,000 requests are worth {worth:,}; needs about {math.ceil(368 * 1000 / worth):,}"
    )


def test_failed_requests_are_above_every_quantile():
    """150 of 200 requests lost: p50 is not reached, whatever the 50 others show."""
    values = np.array([1e6] * 50 + [np.inf] * 150)
    np.random.default_rng(4).shuffle(values)
    found = quantile(values, P50, block_numbers(200))
    assert (found.value_ns, found.reason) == (None, "not reached (75.0 % never got there)")


def test_an_upper_bound_among_the_failed_is_none():
    """4 of 100 failed: p95 has a value, and no upper bound."""
    values = np.array([*np.arange(1.0, 97.0), *[np.inf] * 4])
    found = quantile(values, P95)
    assert (found.value_ns, found.high_ns) == (95, None)
    assert found.low_ns < 95
    assert found.reason == "upper bound not reached: too many never got there"


def test_several_quantiles_are_those_one_by_one():
    """Sorting once changes nothing."""
    values = np.random.default_rng(6).exponential(1e6, 2_000)
    blocks = block_numbers(2_000)
    assert quantiles(values, (P50, P95), blocks) == (
        quantile(values, P50, blocks),
        quantile(values, P95, blocks),
    )


def test_the_first_weights_take_every_block_once():
    """Every draw has as many blocks as there are; the first is the figure itself; all are the same each time."""
    weights = resample_weights(25)
    assert weights[0].tolist() == [1.0] * 25
    assert set(weights.sum(axis=1)) == {25.0}
    resample_weights.cache_clear()
    assert np.array_equal(weights, resample_weights(25))


def test_a_share_has_an_interval_around_it():
    """The interval holds the value, lies in [0, 1] and grows with what varies from block to block."""
    generator = np.random.default_rng(7)
    widths = []
    for spread in (0.01, 0.1):
        blocks = np.clip(generator.normal(0.2, spread, 30), 0, 1)
        found = share(resample_weights(30) @ blocks / 30, 30)
        assert 0 <= found.low <= found.value <= found.high <= 1
        widths.append(found.high - found.low)
    assert widths[1] > 4 * widths[0]


def test_a_share_without_enough_blocks_has_no_interval():
    """Nineteen blocks are too few."""
    found = share(resample_weights(19) @ np.full(19, 0.5) / 19, 19)
    assert (found.value, found.low, found.high) == (0.5, None, None)


def test_likeness_of_neighbouring_blocks():
    """A drift makes neighbours alike, independent values do not; failed requests are left out."""
    generator = np.random.default_rng(8)
    blocks = block_numbers(3_000)
    drifting = np.arange(3_000.0)
    drifting[::7] = np.inf
    assert likeness(drifting, blocks) > 0.8
    assert abs(likeness(generator.exponential(1.0, 3_000), blocks)) < 0.5
    assert likeness(np.ones(3_000), blocks) is None
    assert likeness(np.ones(10), block_numbers(10)) is None
