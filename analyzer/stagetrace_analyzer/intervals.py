"""The one interval machine: what figures of neighbouring requests are worth, and how sure they are.

Requests that are served beside each other are alike, so a thousand of them tell
less than a thousand independent ones.  They are cut into `BLOCKS` blocks of
consecutive arrivals, which is the batch-means method of queueing simulation (Law,
Simulation Modeling and Analysis, section 9.5.3; Schmeiser 1982 on why about 30
are enough), and what varies from block to block gives

- for a quantile: the design effect, hence the number of independent requests it
  rests on (`n_eff`), hence an order-statistic interval (Woodruff 1952; Korn and
  Graubard 1998 on the effective number and its correction for few blocks);
- for a share, a ratio of sums: an interval from blocks drawn again and again with
  replacement, the same draws for every stage.

Times are float64 nanoseconds with plus infinity for a request that failed;
whole nanoseconds up to 2 ** 53, or 104 days, are exact.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from stagetrace_analyzer.results import CONFIDENCE, Quantile, Share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

P50: Final = Fraction(50, 100)
P95: Final = Fraction(95, 100)
P99: Final = Fraction(99, 100)

BLOCKS: Final = 30
"""Blocks of consecutive requests."""

MIN_BLOCKS: Final = 20
"""With fewer blocks nothing is said about how alike neighbours are."""

RESAMPLES: Final = 1000
"""How often the blocks are drawn again."""

ALIKE: Final = 0.3
"""Neighbouring blocks that correlate more than this are not independent (one-sided 5 % for 30 blocks)."""

_TAIL: Final = (1 - CONFIDENCE) / 2
_Z: Final = 1.959964
_SEED: Final = 20_260_101


def block_numbers(requests: int) -> NDArray[np.int64]:
    """Number the blocks of requests that are in the order of their arrival.

    Returns:
        A number a request, from 0; all blocks are equally large up to one request.
        There are `BLOCKS` of them, or fewer so that each holds two requests.
    """
    blocks = max(1, min(BLOCKS, requests // 2))
    return np.arange(requests, dtype=np.int64) * blocks // max(1, requests)


def quantile(values: NDArray[np.float64], q: Fraction, blocks: NDArray[np.int64] | None = None) -> Quantile:
    """Return the quantile of rank ceil(q * n) with its 95 % interval.

    Args:
        values: Time by request in ns, plus infinity where it was not reached.
        q: Which quantile.
        blocks: Block by request, see `block_numbers`; without it, or with fewer than
            `MIN_BLOCKS`, requests are taken as independent and ``n_eff`` is None.
    """
    return quantiles(values, (q,), blocks)[0]


def quantiles(
    values: NDArray[np.float64], qs: Sequence[Fraction], blocks: NDArray[np.int64] | None = None
) -> tuple[Quantile, ...]:
    """Return several quantiles of the same values, see `quantile`."""
    in_order = np.sort(values)
    return tuple(_quantile(values, in_order, q, blocks) for q in qs)


def _quantile(
    values: NDArray[np.float64],
    in_order: NDArray[np.float64],
    q: Fraction,
    blocks: NDArray[np.int64] | None,
) -> Quantile:
    requests = len(in_order)
    needed = requests_needed(q)
    if requests < needed:
        return Quantile(None, reason=f"not estimable: needs at least {needed:,} requests")
    value = in_order[_rank(q, requests) - 1]
    n_eff = None if blocks is None else effective_requests(_below(values, value), blocks)
    if math.isinf(value):
        never = np.count_nonzero(np.isinf(in_order)) / requests
        return Quantile(None, n_eff=n_eff, reason=f"not reached ({100 * never:.1f} % never got there)")
    worth = requests if n_eff is None else math.floor(n_eff)
    low_rank, high_rank = order_statistic_ranks(worth, q)
    if high_rank is None:
        needed = math.ceil(needed * requests / max(worth, 1))
        reason = f"not estimable: {requests:,} requests are worth {worth:,}; needs about {needed:,}"
        return Quantile(None, n_eff=n_eff, reason=reason)
    low = None if low_rank is None else in_order[max(1, math.floor(low_rank * requests / worth)) - 1]
    high = in_order[min(requests, math.ceil(high_rank * requests / worth)) - 1]
    if math.isinf(high):
        return Quantile(
            int(value), _ns(low), None, n_eff, "upper bound not reached: too many never got there"
        )
    return Quantile(int(value), _ns(low), int(high), n_eff)


def _below(values: NDArray[np.float64], value: float) -> NDArray[np.bool_]:
    """Whether each value is up to the quantile, or below it where that says nothing."""
    up_to = values <= value
    return values < value if up_to.all() else up_to


def _ns(value: float | None) -> int | None:
    return None if value is None else int(value)


def _rank(q: Fraction, requests: int) -> int:
    return max(1, math.ceil(q * requests))


def requests_needed(q: Fraction) -> int:
    """The fewest independent requests that bound the quantile ``q`` from above, two-sided at 95 %.

    The largest of n values is below the true quantile with probability q ** n
    (David and Nagaraja, Order Statistics, 3rd edition, section 7.1).
    """
    return math.ceil(math.log(_TAIL) / math.log(q))


@functools.lru_cache(maxsize=512)
def order_statistic_ranks(requests: int, q: Fraction) -> tuple[int | None, int | None]:
    """Ranks, from 1, of the ordered values that enclose the quantile ``q`` with 95 % confidence.

    The number of n independent values up to the quantile is binomial (n, q); each
    side is missed with at most 2.5 %.  A rank is None where no value bounds it.
    """
    if requests < 1:
        return None, None
    counts, cumulative = _binomial(requests, float(q))
    low = int(counts[np.searchsorted(cumulative, _TAIL, side="right")])
    above = np.searchsorted(cumulative, 1 - _TAIL, side="left")
    high = int(counts[above]) + 1 if above < len(counts) else requests + 1
    return low or None, high if high <= requests else None


def _binomial(n: int, q: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts around the mean of a binomial distribution, and their cumulative probabilities."""
    reach = 10 * math.sqrt(n * q * (1 - q)) + 10
    counts = np.arange(max(0, math.floor(n * q - reach)), min(n, math.ceil(n * q + reach)) + 1)
    first = int(counts[0])
    log_first = math.lgamma(n + 1) - math.lgamma(first + 1) - math.lgamma(n - first + 1)
    log_first += first * math.log(q) + (n - first) * math.log1p(-q)
    ratios = np.log((n - counts[:-1]) / (counts[:-1] + 1)) + math.log(q) - math.log1p(-q)
    return counts, np.cumsum(np.exp(log_first + np.concatenate([[0.0], np.cumsum(ratios)])))


def effective_requests(below: NDArray[np.bool_], blocks: NDArray[np.int64]) -> float | None:
    """How many independent requests a proportion of these requests is worth; None with too few blocks.

    Args:
        below: Whether a request is in the proportion.
        blocks: Block by request.
    """
    sizes = np.bincount(blocks).astype(np.float64)
    used = np.count_nonzero(sizes)
    if used < MIN_BLOCKS:
        return None
    requests = len(below)
    proportion = np.count_nonzero(below) / requests
    independent = float(proportion * (1 - proportion) * requests)
    deviations = np.bincount(blocks, weights=below) - proportion * sizes
    observed = used / (used - 1) * float(np.sum(deviations**2))
    if not independent or observed <= independent:
        return float(requests) * _few_blocks(int(used))
    return float(requests * independent / observed) * _few_blocks(int(used))


def _few_blocks(blocks: int) -> float:
    """What is left of an effective number when its variance comes from few blocks."""
    return (_Z / student_t(blocks - 1)) ** 2


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t, within 0.1 % from 3 degrees of freedom on.

    Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5).
    """
    z, n = _Z, degrees
    terms = (
        z,
        (z**3 + z) / 4 / n,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / n**4,
    )
    return math.fsum(terms)


@functools.lru_cache(maxsize=64)
def resample_weights(blocks: int) -> NDArray[np.float64]:
    """How often each block is drawn, in every resample.

    Returns:
        Shape (1 + `RESAMPLES`, blocks).  The first row takes every block once: what
        is computed from it is the figure itself.
    """
    generator = np.random.default_rng(_SEED)
    drawn = generator.multinomial(blocks, np.full(blocks, 1 / blocks), size=RESAMPLES)
    return np.vstack([np.ones(blocks), drawn]).astype(np.float64)


def share(resampled: NDArray[np.float64], blocks: int) -> Share:
    """Return a share with its 95 % interval.

    Args:
        resampled: The share by row of `resample_weights`; not finite where it is undefined.
        blocks: Number of blocks that were drawn from.
    """
    value = float(resampled[0])
    drawn = resampled[1:][np.isfinite(resampled[1:])]
    if blocks < MIN_BLOCKS or not len(drawn):
        return Share(value)
    low, high = np.quantile(drawn, [_TAIL, 1 - _TAIL])
    # Percentiles of a bootstrap are too narrow when there are few blocks.
    wider = student_t(blocks - 1) / _Z * math.sqrt(blocks / (blocks - 1))
    low, high = value - (value - low) * wider, value + (high - value) * wider
    return Share(value, float(max(0.0, min(low, value))), float(min(1.0, max(high, value))))


def likeness(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> float | None:
    """Correlation of the means of neighbouring blocks; None with too few blocks or no variation.

    Values that are not finite are left out.
    """
    finite = np.isfinite(values)
    sizes = np.bincount(blocks[finite])
    if np.count_nonzero(sizes) < MIN_BLOCKS:
        return None
    sums = np.bincount(blocks[finite], weights=values[finite])
    means = sums[sizes > 0] / sizes[sizes > 0]
    centred = means - means.mean()
    variation = float(np.sum(centred**2))
    return float(np.sum(centred[1:] * centred[:-1])) / variation if variation else None
