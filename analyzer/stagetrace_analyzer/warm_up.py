"""Where an experiment's figures begin to be steady."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BATCH: Final = 5
"""Observations of a batch, which gives the rule its name."""

MIN_BATCHES: Final = 20
"""With fewer batches there is nothing to search in."""

LARGEST_SHARE: Final = 0.25
"""At most this part of a run is taken for warm-up."""

AS_GOOD: Final = 1.05
"""A shorter cut is taken if it is worse than the best by less than this factor: the minimum is flat."""

DRIFTING: Final = 0.9
"""A cut behind this part of what is searched means that the run still drifts there."""

TREND_BATCHES: Final = 10
"""Batches in which a trend is looked for, so long that neighbours are hardly alike."""

TREND_LEAST: Final = 400
"""With fewer observations, a single long queue looks like a trend."""

TREND_PAIRS: Final = 31
"""How many more of the 45 pairs of batches must go up than down, or down than up: by chance, 1 in 200."""

SHIFT_BATCHES: Final = 16
"""Batches in which a shift is looked for, from one level to another."""

SHIFT_SIDE: Final = 5
"""How many of them are before it, and how many behind it, at least: by chance it is in 1 of 500."""

SHIFT_LEAST: Final = 800
"""With fewer observations, a single long queue looks like a shift."""


class Truncation(NamedTuple):
    """How many observations to leave out, and whether the rest is steady."""

    observations: int
    settled: bool


def mser5(observations: NDArray[np.float64]) -> Truncation:
    """Find the warm-up of a series by MSER-5.

    Leaves out as many batches of five as make the squared standard error of the mean of
    the rest smallest (White, Simulation 69(6), 1997; Spratt 1998 on batches of five), or
    as few as make it almost as small: a burst late in a steady run moves the minimum far
    and hardly lowers it.  If that is at the end of the part that is searched, the series
    still drifts there.

    Args:
        observations: Values in the order of arrival.
    """
    batches = len(observations) // BATCH
    if batches < MIN_BATCHES:
        return Truncation(0, settled=True)
    means = observations[: batches * BATCH].reshape(batches, BATCH).mean(axis=1)
    last = int(LARGEST_SHARE * batches)
    kept = batches - np.arange(last + 1)
    # Variances of all suffixes from sums over them; centring first keeps the digits.
    centred = means - means.mean()
    sums = np.cumsum(centred[::-1])[::-1][: last + 1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1][: last + 1]
    errors = (squares - sums**2 / kept) / kept.astype(np.float64) ** 2
    cut = int(np.argmax(errors <= AS_GOOD * errors.min()))
    return Truncation(cut * BATCH, settled=cut < DRIFTING * last)


def trend(observations: NDArray[np.float64]) -> int:
    """Tell whether a series goes up (1) or down (-1) from its begin to its end; 0 if neither is sure.

    Mann's and Kendall's test on the means of batches (Mann, Econometrica 13(3), 1945).  It
    misses most series that go up once and stay there, so these are looked for beside it.

    Args:
        observations: Values in the order of arrival, without the warm-up.
    """
    if len(observations) < TREND_LEAST:
        return 0
    means = _means(observations, TREND_BATCHES)
    surplus = int(np.triu(np.sign(means[None, :] - means[:, None])).sum())
    return int(np.sign(surplus)) if abs(surplus) >= TREND_PAIRS else _shift(observations)


def _shift(observations: NDArray[np.float64]) -> int:
    """Tell whether all batches from one on are above (1) or below (-1) all before it; 0 if neither."""
    if len(observations) < SHIFT_LEAST:
        return 0
    means = _means(observations, SHIFT_BATCHES)
    for place in range(SHIFT_SIDE, SHIFT_BATCHES - SHIFT_SIDE + 1):
        before, behind = means[:place], means[place:]
        if behind.min() > before.max():
            return 1
        if behind.max() < before.min():
            return -1
    return 0


def _means(observations: NDArray[np.float64], batches: int) -> NDArray[np.float64]:
    size = len(observations) // batches
    return np.asarray(observations[: size * batches].reshape(batches, size).mean(axis=1))
