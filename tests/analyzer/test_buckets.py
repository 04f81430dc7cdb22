from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace_analyzer.buckets import BUCKETS, RATIO, Histogram, bucket


def test_buckets_are_half_a_percent_wide():
    """Bounds of a bucket are at most a factor of 1.005 apart, from a microsecond to 290 years."""
    times = np.geomspace(1_000, 2.0**63, 200_001)
    places = bucket(times)
    assert np.all(np.diff(places) >= 0)
    assert places.max() < BUCKETS
    for place in np.unique(places)[::97]:
        inside = times[places == place]
        assert inside[-1] / inside[0] <= RATIO * (1 + 1e-9)


def test_no_time_has_a_bucket_of_its_own():
    """Zero is apart from the shortest time."""
    assert bucket(np.array([0.0, 1.0, 999.0, 1_000.0])).tolist() == [0, 1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 10**12), min_size=1, max_size=40), min_size=1, max_size=5),
    absent=st.integers(0, 20),
    q=st.sampled_from([Fraction(1, 2), Fraction(95, 100), Fraction(99, 100)]),
)
def test_quantiles_of_a_histogram_are_the_exact_ones_up_to_half_a_percent(pieces, absent, q):
    """In whatever pieces times come; requests that were not added count as 0."""
    histogram = Histogram()
    for piece in pieces:
        histogram.add(np.column_stack([np.zeros(len(piece)), np.array(piece, np.float64)]))
    values = sorted([0] * absent + [ns for piece in pieces for ns in piece])
    exact = values[max(1, -(-q.numerator * len(values) // q.denominator)) - 1]
    found = histogram.quantile_ns(1, q, len(values))
    assert abs(found - exact) <= max(0.005 * exact, 1_000 * (0 < exact < 1_000)) + 1
    assert histogram.quantile_ns(0, q, len(values)) == 0


def test_equal_times_are_told_exactly():
    """A bucket is told by the mean of what is in it."""
    histogram = Histogram()
    histogram.add(np.full((100, 1), 123_456_789.0))
    assert histogram.quantile_ns(0, Fraction(1, 2), 100) == 123_456_789
