from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace_analyzer.load import load_of, mean_in_flight

S = 1_000_000_000


def load(arrivals_s, sojourns_s, intended_s=None):
    """The load of requests that come and stay as said."""
    received = (np.array(arrivals_s) * S).astype(np.int64) + 10**18
    intended = (
        np.full(len(received), -1) if intended_s is None else (np.array(intended_s) * S).astype(np.int64)
    )
    return load_of("a", received, intended, np.array(sojourns_s) * S)


def test_rate_and_variation_of_arrivals():
    """Ten requests a second on the dot: rate 10, no variation; intended times count where all are told."""
    even = load(np.arange(200) / 10, np.full(200, 0.05))
    assert (even.rate_per_s, even.interarrival_cv) == (pytest.approx(10), pytest.approx(0, abs=1e-6))
    assert (even.open_loop, even.overloaded) == (False, False)
    assert even.in_flight == pytest.approx(0.5, rel=0.01)
    told = load(np.arange(200) / 10, np.full(200, 0.05), intended_s=np.arange(200) / 20)
    assert (told.rate_per_s, told.open_loop) == (pytest.approx(20), True)


def test_poisson_arrivals_vary_as_much_as_their_mean():
    """The coefficient of variation of exponential gaps is 1."""
    arrivals = np.cumsum(np.random.default_rng(1).exponential(0.1, 20_000))
    assert load(arrivals, np.full(20_000, 0.05)).interarrival_cv == pytest.approx(1, rel=0.03)


def test_a_server_that_does_not_keep_up_is_overloaded():
    """18 requests a second at a server that does 13.4: three quarters have ended by the last arrival."""
    arrivals = np.arange(1000) / 18
    found = load(arrivals, (np.arange(1000) + 1) / 13.4 - arrivals)
    assert found.achieved == pytest.approx(13.4 / 18, rel=0.01)
    assert found.overloaded


def test_a_short_steady_run_is_not_overloaded():
    """Many requests in the server at the end, but no more than always."""
    found = load(np.arange(150) / 10, np.full(150, 1.0))
    assert found.achieved < 0.95
    assert not found.overloaded


@pytest.mark.parametrize(
    ("arrivals_s", "sojourns_s"),
    [
        (np.arange(200) / 10, np.full(200, 30.0)),
        (np.arange(1000) / 10, np.where(np.arange(1000) % 10 == 0, np.inf, 0.5)),
        (np.concatenate([np.arange(100) / 10, 86_400 + np.arange(100) / 10]), np.full(200, 1.2)),
        (np.zeros(100), np.full(100, 1.0)),
    ],
    ids=["shorter than its requests", "unknown ends", "a day between two runs", "all at once"],
)
def test_requests_that_take_no_longer_than_before_are_no_overload(arrivals_s, sojourns_s):
    """More of them are in the server at the end than on average, and yet no queue grows."""
    found = load(arrivals_s, sojourns_s)
    assert found.achieved < 0.95
    assert not found.overloaded


def test_one_request_has_no_rate():
    """Nor have requests that came at once."""
    assert load([0.0], [1.0]).rate_per_s is None
    assert load([1.0, 1.0], [1.0, 1.0]).interarrival_cv is None


@settings(max_examples=50, deadline=None)
@given(
    stays=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500)), min_size=1, max_size=30),
    edges=st.lists(st.integers(0, 1500), min_size=2, max_size=6, unique=True),
)
def test_requests_in_flight_are_a_direct_count(stays, edges):
    """Between any edges the mean is the sum of the overlaps over the width."""
    edges = sorted(edges)
    begins = np.array([begin for begin, _ in stays], np.float64)
    ends = begins + np.array([stay for _, stay in stays])
    found = mean_in_flight(begins, ends, np.array(edges, np.float64))
    for value, low, high in zip(found, edges[:-1], edges[1:], strict=True):
        overlaps = np.maximum(0, np.minimum(ends, high) - np.maximum(begins, low))
        assert value == pytest.approx(overlaps.sum() / (high - low), abs=1e-9)


def test_a_request_of_unknown_end_stays():
    """What never ended is in the server from its arrival on."""
    found = mean_in_flight(np.array([0.0, 5.0]), np.array([np.inf, 6.0]), np.array([0.0, 10.0, 20.0]))
    assert found.tolist() == pytest.approx([1.1, 1.0])
