"""Logarithmic buckets of times, and histograms of the time in each stage.

A bucket spans half a percent, and a value in it is told by the mean of all that
are in it: a quantile is at most half a percent off, and exact where the values
of a bucket are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATIO: Final = 1.005
"""Upper over lower bound of a bucket."""

SHORTEST_NS: Final = 1_000
"""Shorter times share a bucket."""

BUCKETS: Final = 1 << 13
"""More than any time needs: 2 ** 63 ns are in bucket 7,366."""

_SCALE: Final = 1 / math.log(RATIO)
_SHIFT: Final = 1 - math.log(SHORTEST_NS) * _SCALE


def bucket(times_ns: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bucket of every time; no time at all is in bucket 0."""
    with np.errstate(divide="ignore"):
        places = np.log(times_ns) * _SCALE + _SHIFT
    return np.maximum(places, times_ns > 0).astype(np.int64)


@dataclass(slots=True)
class Histogram:
    """Times of many columns, added piece by piece; zeros are not stored.

    Pieces are sparse: memory goes with the number of buckets in use.
    """

    _keys: list[NDArray[np.int64]] = field(default_factory=list)
    _counts: list[NDArray[np.float64]] = field(default_factory=list)
    _sums: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, times_ns: NDArray[np.float64]) -> None:
        """Add times of shape (requests, columns)."""
        columns = times_ns.shape[1]
        flat = times_ns.ravel()
        cells = np.flatnonzero(flat)
        found = flat[cells]
        keys = cells % columns * BUCKETS + bucket(found)
        counts = np.bincount(keys, minlength=columns * BUCKETS)
        used = np.flatnonzero(counts)
        self._keys.append(used)
        self._counts.append(counts[used].astype(np.float64))
        self._sums.append(_sums(keys, found, len(counts))[used])

    def quantile_ns(self, column: int, q: Fraction, requests: int) -> int:
        """Return the time of rank ceil(q * requests) in a column; requests that were not added count as 0."""
        counts, sums = self._column(column)
        rank = max(1, math.ceil(q * requests)) - (requests - int(counts.sum()))
        if rank <= 0:
            return 0
        place = int(np.searchsorted(np.cumsum(counts), rank))
        return round(float(sums[place] / counts[place]))

    def _column(self, column: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Counts and sums of the buckets in use, the shortest times first."""
        self._merge()
        keys = self._keys[0]
        span = slice(*np.searchsorted(keys, [column * BUCKETS, (column + 1) * BUCKETS]))
        return self._counts[0][span], self._sums[0][span]

    def _merge(self) -> None:
        if len(self._keys) == 1:
            return
        keys = np.concatenate([np.empty(0, np.int64), *self._keys])
        distinct, place = np.unique(keys, return_inverse=True)
        counts = _sums(place, np.concatenate([np.empty(0), *self._counts]), len(distinct))
        sums = _sums(place, np.concatenate([np.empty(0), *self._sums]), len(distinct))
        self._keys, self._counts, self._sums = [distinct], [counts], [sums]


def _sums(places: NDArray[np.int64], values: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Sum values by place."""
    return np.bincount(places, weights=values, minlength=size).astype(np.float64, copy=False)
