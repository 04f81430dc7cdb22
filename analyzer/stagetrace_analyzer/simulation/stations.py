"""Stations: who is served when, exactly, in int64 nanoseconds.

Every function takes arrays of shape (requests,) and gives a `Visit`.  Arrivals
may be in any order; the first come is the first served, and of two that come at
the same instant the one with the lower number.  Only `priority` serves in
another order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Visit:
    """When each request came to a station, when its service began, and when it ended.

    Arrays of shape (requests,), int64 ns, in the order in which the requests are numbered.
    """

    arrival_ns: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    @property
    def wait_ns(self) -> NDArray[np.int64]:
        """Time in the queue."""
        return self.start_ns - self.arrival_ns

    @property
    def service_ns(self) -> NDArray[np.int64]:
        """Time in service."""
        return self.end_ns - self.start_ns

    @property
    def sojourn_ns(self) -> NDArray[np.int64]:
        """Time in the station."""
        return self.end_ns - self.arrival_ns


class Station(NamedTuple):
    """A station of a tandem: service time by request in ns, and how many servers share its queue."""

    service_ns: NDArray[np.int64]
    servers: int = 1


class Stall(NamedTuple):
    """A time in which a server does nothing."""

    begin_ns: int
    length_ns: int


def fcfs(arrival_ns: NDArray[np.int64], service_ns: NDArray[np.int64], servers: int = 1) -> Visit:
    """Serve in the order of arrival by ``servers`` equal servers with one queue.

    One server goes by Lindley's recursion (Lindley 1952), written as a running
    maximum: a service begins when all work that came since some earlier arrival
    is done, for the arrival that makes it latest.
    """
    order = np.argsort(arrival_ns, kind="stable")
    arrival, service = arrival_ns[order], service_ns[order]
    if servers == 1:
        before = np.cumsum(service) - service
        start = before + np.maximum.accumulate(arrival - before)
    else:
        start = np.fromiter(_starts(arrival.tolist(), service.tolist(), servers), np.int64, len(arrival))
    return _visit(arrival_ns, service_ns, order, start)


def priority(arrival_ns: NDArray[np.int64], service_ns: NDArray[np.int64], rank: NDArray[np.int64]) -> Visit:
    """Serve by one server, the lowest rank first and within a rank the first come; nobody is interrupted."""
    order = np.argsort(arrival_ns, kind="stable")
    arrival, service, ranks = (array[order].tolist() for array in (arrival_ns, service_ns, rank))
    start = np.empty(len(arrival), np.int64)
    waiting: list[tuple[int, int]] = []
    now = come = 0
    for _ in range(len(arrival)):
        if not waiting:
            now = max(now, arrival[come])
        while come < len(arrival) and arrival[come] <= now:
            heapq.heappush(waiting, (ranks[come], come))
            come += 1
        _, served = heapq.heappop(waiting)
        start[served] = now
        now += service[served]
    return _visit(arrival_ns, service_ns, order, start)


def tandem(arrival_ns: NDArray[np.int64], stations: Sequence[Station]) -> tuple[Visit, ...]:
    """Serve at one station after the other; whoever leaves one arrives at the next in that instant."""
    visits: list[Visit] = []
    for station in stations:
        visits.append(fcfs(arrival_ns, station.service_ns, station.servers))
        arrival_ns = visits[-1].end_ns
    return tuple(visits)


def stalling(arrival_ns: NDArray[np.int64], service_ns: int, stall: Stall) -> Visit:
    """Serve all at once, each in ``service_ns``, except that nothing moves while the server stalls."""
    stall_end_ns = stall.begin_ns + stall.length_ns
    start_ns = np.where(
        (arrival_ns >= stall.begin_ns) & (arrival_ns < stall_end_ns), stall_end_ns, arrival_ns
    )
    end_ns = start_ns + service_ns
    end_ns[(start_ns < stall.begin_ns) & (end_ns > stall.begin_ns)] += stall.length_ns
    return Visit(arrival_ns, start_ns, end_ns)


def stalling_closed_loop(service_ns: int, stall: Stall, until_ns: int) -> Visit:
    """Serve one client of a stalling server, who sends a request when the one before is answered.

    Requests that would be answered after ``until_ns`` are not sent.
    """
    sent: list[Visit] = []
    now_ns = 0
    while True:
        visit = stalling(np.array([now_ns], np.int64), service_ns, stall)
        now_ns = int(visit.end_ns[0])
        if now_ns > until_ns:
            break
        sent.append(visit)
    columns = ([v.arrival_ns for v in sent], [v.start_ns for v in sent], [v.end_ns for v in sent])
    return Visit(*(np.concatenate([np.empty(0, np.int64), *column]) for column in columns))


def _starts(arrival: Sequence[int], service: Sequence[int], servers: int) -> Iterator[int]:
    """When each service begins, for arrivals in order."""
    free = [0] * servers
    for come, takes in zip(arrival, service, strict=True):
        start = max(come, free[0])
        heapq.heapreplace(free, start + takes)
        yield start


def _visit(
    arrival_ns: NDArray[np.int64],
    service_ns: NDArray[np.int64],
    order: NDArray[np.intp],
    start_in_order: NDArray[np.int64],
) -> Visit:
    start_ns = np.empty_like(start_in_order)
    start_ns[order] = start_in_order
    return Visit(arrival_ns, start_ns, start_ns + service_ns)
