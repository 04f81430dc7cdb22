"""What was put on the server: rates, requests in flight, and whether it kept up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from stagetrace_analyzer.results import Load

if TYPE_CHECKING:
    from numpy.typing import NDArray

ACHIEVED: Final = 0.95
"""A server that ended fewer of its requests by the last arrival may be overloaded."""

GROWING: Final = 1.5
"""It is, if the requests then in it are more than this times the mean, and the last quarter of the
requests took more than this times what the first quarter took: the queue grows."""

BY_CHANCE: Final = 2.0
"""And if they are more than a queue that neither grows nor drains, at a load of 1, has by chance in 19
of 20 runs: so many times the root of two times the requests."""

_ENOUGH: Final = 100
"""Fewer requests do not show a growing queue."""

EARLIEST_NS: Final = 86_400 * 10**9
"""A client that meant to send so long before the receipt told something else."""

LATEST_NS: Final = 60 * 10**9
"""So did one that meant to send so long after it: clocks of hosts do not differ by as much."""

NOT_TOLD: Final = -1
"""In place of an intended time."""

_NS_PER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests came and went; arrays of shape (requests,).

    Attributes:
        received_unix_ns: Time of receipt.
        intended_unix_ns: When the client meant to send, `NOT_TOLD` if it did not tell.
        ended_ns: Time from receipt to the end, plus infinity if it is not known.
        run: Number of the run of a phase, in one dataset, that each belongs to.
    """

    received_unix_ns: NDArray[np.int64]
    intended_unix_ns: NDArray[np.int64]
    ended_ns: NDArray[np.float64]
    run: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A stretch of time without a pause: how its requests fared."""

    length_s: float
    in_flight: float
    in_server: int


def load_of(phase: str | None, arrivals: Arrivals) -> Load:
    """Describe the load of some requests.

    Where no run has begun and not ended there is a pause.  Requests are counted
    between pauses only: a rate over a pause is that of nobody.

    Args:
        phase: Name of the phase.
        arrivals: The requests.
    """
    received, told = arrivals.received_unix_ns, arrivals.intended_unix_ns != NOT_TOLD
    early, late = received - EARLIEST_NS, received + LATEST_NS
    believed = told & (arrivals.intended_unix_ns >= early) & (arrivals.intended_unix_ns <= late)
    open_loop = bool(believed.all())
    between = _gaps_s(arrivals.intended_unix_ns if open_loop else received, arrivals.run)
    span_s = float(between.sum())
    stretches = _stretches(arrivals)
    length_s = sum(stretch.length_s for stretch in stretches)
    busy_s = sum(stretch.in_flight * stretch.length_s for stretch in stretches)
    return Load(
        phase=phase,
        requests=len(received),
        open_loop=open_loop,
        rate_per_s=len(between) / span_s if span_s else None,
        interarrival_cv=float(between.std() / between.mean()) if span_s else None,
        achieved=1 - sum(stretch.in_server for stretch in stretches) / len(received),
        in_flight=busy_s / length_s if length_s else 0.0,
        overloaded=_overloaded(arrivals),
        pauses_s=max(0.0, float(np.ptp(received)) / _NS_PER_S - length_s) if len(stretches) > 1 else 0.0,
        intended_set_aside=int(np.count_nonzero(told & ~believed)),
    )


def _gaps_s(times_ns: NDArray[np.int64], run: NDArray[np.int32]) -> NDArray[np.float64]:
    """Times between arrivals, without those in which there was a pause."""
    order = np.argsort(times_ns, kind="stable")
    within = np.diff(_stretch_numbers(times_ns, run)[order]) == 0
    return np.asarray(np.diff(times_ns[order])[within] / _NS_PER_S)


def _stretch_numbers(times_ns: NDArray[np.int64], run: NDArray[np.int32]) -> NDArray[np.int64]:
    """Number the stretch of time that each request belongs to, in the order of time.

    Runs that overlap are one stretch.
    """
    if (run == run[0]).all():
        return np.zeros(len(run), np.int64)
    runs, which = np.unique(run, return_inverse=True)
    first, last = np.full(len(runs), times_ns.max()), np.full(len(runs), times_ns.min())
    np.minimum.at(first, which, times_ns)
    np.maximum.at(last, which, times_ns)
    order = np.argsort(first, kind="stable")
    reach = np.maximum.accumulate(last[order])
    number = np.zeros(len(runs), np.int64)
    number[order[1:]] = np.cumsum(first[order[1:]] > reach[:-1])
    return number[which]


def _stretches(arrivals: Arrivals) -> list[_Stretch]:
    begins = (arrivals.received_unix_ns - arrivals.received_unix_ns.min()).astype(np.float64)
    ends = begins + arrivals.ended_ns
    number = _stretch_numbers(arrivals.received_unix_ns, arrivals.run)
    order = np.lexsort((begins, number))
    members = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    edges = begins[np.array([(of[0], of[-1]) for of in members])]
    # Between the edges of a stretch, and then until the next one begins.
    in_flight = mean_in_flight(begins, ends, edges.ravel())[::2]
    return [
        _Stretch(
            length_s=float(last - first) / _NS_PER_S,
            in_flight=float(mean),
            in_server=int(np.count_nonzero(ends[of] > last)),
        )
        for of, (first, last), mean in zip(members, edges, in_flight, strict=True)
    ]


def _overloaded(arrivals: Arrivals) -> bool:
    """Whether the server did not keep up in some run, so that its queue kept growing.

    Each run is looked at alone: a calm server beside one that does not keep up hides nothing.
    """
    begins = (arrivals.received_unix_ns - arrivals.received_unix_ns.min()).astype(np.float64)
    order = np.lexsort((begins, arrivals.run))
    runs = np.split(order, np.flatnonzero(np.diff(arrivals.run[order])) + 1)
    return any(_grew(begins[of], arrivals.ended_ns[of]) for of in runs)


def _grew(begins: NDArray[np.float64], ended_ns: NDArray[np.float64]) -> bool:
    """Whether the queue of a run grew until its last arrival; requests are in the order of arrival."""
    requests, ends = len(begins), begins + ended_ns
    in_server = int(np.count_nonzero(ends > begins[-1]))
    if requests < _ENOUGH or in_server <= max((1 - ACHIEVED) * requests, BY_CHANCE * math.sqrt(2 * requests)):
        return False
    (in_flight,) = mean_in_flight(begins, ends, begins[[0, -1]])
    return bool(in_server > GROWING * in_flight and _slower(ended_ns[np.isfinite(ended_ns)]))


def _slower(ended_ns: NDArray[np.float64]) -> bool:
    """Whether requests took longer and longer, in the order of arrival.

    More and more are in a server that keeps up, too, while a run is shorter than its
    requests, across a pause that nothing tells of, or where the ends of some are not known.
    """
    if len(ended_ns) < _ENOUGH:
        return False
    quarter = len(ended_ns) // 4
    return bool(np.median(ended_ns[-quarter:]) > GROWING * np.median(ended_ns[:quarter]))


def mean_in_flight(
    begins_ns: NDArray[np.float64], ends_ns: NDArray[np.float64], edges_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean number of requests in the server between neighbouring edges.

    Args:
        begins_ns: When each request came.
        ends_ns: When it ended, plus infinity if that is not known.
        edges_ns: Edges of windows, ascending.
    """
    gone = ends_ns[np.isfinite(ends_ns)]
    area = _area(np.sort(begins_ns), edges_ns) - _area(np.sort(gone), edges_ns)
    widths = np.diff(edges_ns)
    mean = np.divide(np.diff(area), widths, out=np.zeros(len(widths)), where=widths > 0)
    # Rounding over years can make less than nobody of nobody.
    return np.asarray(np.maximum(mean, 0.0))


def _area(times_ns: NDArray[np.float64], edges_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the times before an edge of how long before it they are."""
    sums = np.concatenate([[0.0], np.cumsum(times_ns)])
    before = np.searchsorted(times_ns, edges_ns)
    return np.asarray(before * edges_ns - sums[before])
