"""What was put on the server: rates, requests in flight, and whether it kept up."""

from __future__ import annotations

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

_ENOUGH: Final = 100
"""Fewer requests do not show a growing queue."""

_NS_PER_S: Final = 1e9


def load_of(
    phase: str | None,
    received_unix_ns: NDArray[np.int64],
    intended_unix_ns: NDArray[np.int64],
    ended_ns: NDArray[np.float64],
) -> Load:
    """Describe the load of some requests.

    Args:
        phase: Name of the phase.
        received_unix_ns: Time of receipt by request.
        intended_unix_ns: When the client meant to send, -1 if it did not tell.
        ended_ns: Time from receipt to the end, plus infinity if it is not known.
    """
    requests = len(received_unix_ns)
    open_loop = bool(np.all(intended_unix_ns >= 0))
    arrivals = np.sort(intended_unix_ns if open_loop else received_unix_ns)
    between = np.diff(arrivals) / _NS_PER_S
    span_s = float(between.sum())
    first, last = received_unix_ns.min(), received_unix_ns.max()
    begins = (received_unix_ns - first).astype(np.float64)
    ends = begins + ended_ns
    in_server = int(np.count_nonzero(ends > last - first))
    in_flight = float(mean_in_flight(begins, ends, np.array([0.0, float(last - first)]))[0])
    achieved = 1 - in_server / requests
    return Load(
        phase=phase,
        requests=requests,
        open_loop=open_loop,
        rate_per_s=len(between) / span_s if span_s else None,
        interarrival_cv=float(between.std() / between.mean()) if span_s else None,
        achieved=achieved,
        in_flight=in_flight,
        overloaded=requests >= _ENOUGH
        and achieved < ACHIEVED
        and in_server > GROWING * in_flight
        and _slower(ended_ns[np.argsort(received_unix_ns, kind="stable")]),
    )


def _slower(ended_ns: NDArray[np.float64]) -> bool:
    """Whether requests took longer and longer, in the order of arrival.

    More and more are in a server that keeps up, too, while a run is shorter than its
    requests, across a pause between two runs, or where the ends of some are not known.
    """
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
    return np.divide(np.diff(area), widths, out=np.zeros(len(widths)), where=widths > 0)


def _area(times_ns: NDArray[np.float64], edges_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the times before an edge of how long before it they are."""
    sums = np.concatenate([[0.0], np.cumsum(times_ns)])
    before = np.searchsorted(times_ns, edges_ns)
    return np.asarray(before * edges_ns - sums[before])
