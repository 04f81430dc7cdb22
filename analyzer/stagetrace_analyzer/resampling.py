"""What a horizon consists of, in a region of its requests, by resampling blocks.

Per block and bucket of the horizon there are a count and the sums of every
column (a stage with a reason).  Drawing blocks again is a weight matrix times
that table: counts give the quantiles that bound a region in each draw, and
prefix sums over the buckets give what lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from stagetrace_analyzer.buckets import BUCKETS, bucket
from stagetrace_analyzer.intervals import resample_weights
from stagetrace_analyzer.results import Region

if TYPE_CHECKING:
    from numpy.typing import NDArray

BOUNDS: Final = {
    Region.ALL: (Fraction(0), Fraction(1)),
    Region.TYPICAL: (Fraction(40, 100), Fraction(60, 100)),
    Region.TAIL: (Fraction(95, 100), Fraction(1)),
}
"""Quantiles of the horizon between which a region's requests are."""


@dataclass(frozen=True, slots=True)
class Resampled:
    """Sums over a region's requests, in every draw.

    Attributes:
        requests: Shape (1 + draws,): how many requests; the first is the figure itself.
        horizon_ns: Shape (1 + draws,): sum of their horizons.
        spent_ns: Shape (1 + draws, columns): sum of their times in each column.
        blocks: Number of blocks that were drawn from.
    """

    requests: NDArray[np.float64]
    horizon_ns: NDArray[np.float64]
    spent_ns: NDArray[np.float64]
    blocks: int

    def shares(self, columns: NDArray[np.int64] | list[int]) -> NDArray[np.float64]:
        """Return the share of the horizon that some columns have together, in every draw."""
        spent = self.spent_ns[:, columns].sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(spent / self.horizon_ns)


@dataclass(slots=True)
class BlockTable:
    """Counts and sums by block and bucket of a horizon, added piece by piece."""

    columns: int
    _keys: list[NDArray[np.int64]] = field(default_factory=list)
    _cells: list[NDArray[np.float64]] = field(default_factory=list)

    def add(
        self,
        blocks: NDArray[np.int64],
        horizon_ns: NDArray[np.float64],
        spent_ns: NDArray[np.float64],
    ) -> None:
        """Add requests.

        Args:
            blocks: Block by request.
            horizon_ns: Horizon by request.
            spent_ns: Shape (requests, columns).
        """
        if not len(blocks):
            return
        keys = blocks * BUCKETS + bucket(horizon_ns)
        order = np.argsort(keys, kind="stable")
        cells = np.empty((len(keys), 2 + self.columns))
        cells[:, 0], cells[:, 1] = 1, horizon_ns[order]
        cells[:, 2:] = spent_ns[order]
        self._append(keys[order], cells)

    def _append(self, keys: NDArray[np.int64], cells: NDArray[np.float64]) -> None:
        """Add cells in the order of their keys."""
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        self._keys.append(keys[starts])
        self._cells.append(np.add.reduceat(cells, starts, axis=0))

    def resample(self, regions: tuple[Region, ...] = tuple(Region)) -> dict[Region, Resampled]:
        """Draw blocks again; every region is bounded anew in each draw."""
        table = self._dense()
        weights = resample_weights(len(table))
        prefix = np.concatenate([np.zeros_like(table[:, :1]), np.cumsum(table, axis=1)], axis=1)
        counts = weights @ prefix[:, :, 0]
        needed = {bound for region in regions for bound in BOUNDS[region]}
        below = {bound: _below(bound, weights, prefix, counts) for bound in needed}
        found = {}
        for region in regions:
            lower, upper = BOUNDS[region]
            sums = below[upper] - below[lower]
            found[region] = Resampled(sums[:, 0], sums[:, 1], sums[:, 2:], len(table))
        return found

    def _dense(self) -> NDArray[np.float64]:
        """Shape (blocks, buckets in use, 2 + columns); blocks without requests are left out."""
        if not self._keys:
            return np.zeros((1, 1, 2 + self.columns))
        if len(self._keys) > 1:
            keys, cells = np.concatenate(self._keys), np.concatenate(self._cells)
            self._keys, self._cells = [], []
            order = np.argsort(keys, kind="stable")
            self._append(keys[order], cells[order])
        keys, cells = self._keys[0], self._cells[0]
        blocks, block = np.unique(keys // BUCKETS, return_inverse=True)
        buckets, place = np.unique(keys % BUCKETS, return_inverse=True)
        table = np.zeros((len(blocks), len(buckets), 2 + self.columns))
        table[block, place] = cells
        return table


def _below(
    bound: Fraction,
    weights: NDArray[np.float64],
    prefix: NDArray[np.float64],
    counts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Sums over the requests below a quantile of the horizon, in every draw; shape (draws, 2 + columns).

    A bucket at the quantile counts in part.
    """
    if bound == 0:
        return np.zeros((len(weights), prefix.shape[2]))
    if bound == 1:
        return np.asarray(weights @ prefix[:, -1])
    mass = float(bound) * counts[:, -1]
    place = np.minimum((counts <= mass[:, None]).sum(axis=1), counts.shape[1] - 1)
    before, after = counts[np.arange(len(counts)), place - 1], counts[np.arange(len(counts)), place]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.nan_to_num((mass - before) / (after - before))
    lower = np.einsum("rb,brc->rc", weights, prefix[:, place - 1])
    upper = np.einsum("rb,brc->rc", weights, prefix[:, place])
    return np.asarray(lower + part[:, None] * (upper - lower))
