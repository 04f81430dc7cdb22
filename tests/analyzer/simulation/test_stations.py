"""The simulated queues give what queueing theory says, and what must hold of any queue."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetrace_analyzer.simulation.stations import (
    Stall,
    Station,
    Visit,
    fcfs,
    priority,
    stalling,
    stalling_closed_loop,
    tandem,
)
from stagetrace_analyzer.simulation.traffic import (
    IMAGE,
    TEXT,
    exponential_ns,
    poisson_mixture,
    poisson_ns,
)

S = 1e9
MS = 1_000_000
SERVICE_NS = {"text": 50 * MS, "image": 1000 * MS}


@functools.cache
def mm1():
    """M/M/1 at 0.8: 14,000 times as long as the 90 mean service times in which it forgets."""
    generator = np.random.default_rng(1)
    return fcfs(poisson_ns(generator, 0.8, 1_000_000), exponential_ns(generator, 1.0, 1_000_000))


@functools.cache
def mixture():
    """Text and image requests and their service times: 150,000 s, where a few seconds are forgotten."""
    traffic = poisson_mixture(np.random.default_rng(2), [(TEXT, 3.6), (IMAGE, 0.4)], 600_000)
    service_ns = np.array([SERVICE_NS[one.label] for one in traffic.classes])[traffic.number]
    return traffic, service_ns


@functools.cache
def served(order):
    """The mixture in an order of service."""
    traffic, service_ns = mixture()
    if order == "first come":
        return fcfs(traffic.arrival_ns, service_ns)
    return priority(traffic.arrival_ns, service_ns, traffic.number)


def present(visit):
    """Requests in the station, as each arriving one sees them."""
    gone = np.searchsorted(np.sort(visit.end_ns), visit.arrival_ns, side="right")
    return np.arange(len(gone)) - gone


def in_station_ns(visit):
    """Integral over time of the number of requests in the station, by a sweep over its events."""
    at = np.concatenate([visit.arrival_ns, visit.end_ns])
    change = np.repeat([1, -1], len(visit.arrival_ns))
    order = np.argsort(at, kind="stable")
    return int(np.sum(np.cumsum(change[order])[:-1] * np.diff(at[order])))


def charged_ns(visit, who, culprit):
    """How long the server worked on requests of the culprit while those of ``who`` waited, by request."""
    turn = np.argsort(visit.start_ns[culprit])
    start, service = visit.start_ns[culprit][turn], visit.service_ns[culprit][turn]
    done = np.cumsum(service) - service
    at, worked = (
        np.column_stack([start, start + service]).ravel(),
        np.column_stack([done, done + service]).ravel(),
    )
    return np.interp(visit.start_ns[who], at, worked) - np.interp(visit.arrival_ns[who], at, worked)


@pytest.mark.parametrize(
    ("figure", "truth"),
    [
        (lambda visit: visit.sojourn_ns / S, 5),
        (lambda visit: visit.wait_ns / S, 4),
        (present, 4),
        (lambda visit: visit.sojourn_ns <= 3.465736 * S, 0.5),
        (lambda visit: visit.sojourn_ns <= 23.025851 * S, 0.99),
    ],
    ids=["W", "Wq", "L", "p50", "p99"],
)
def test_mm1(figure, truth, estimate):
    """M/M/1 at 0.8: W 5, Wq 4, L 4 as arrivals see it, and the two quantiles are where they should be."""
    assert estimate(figure(mm1())).agrees(truth, within=0.1)


@pytest.mark.parametrize(
    ("servers", "waits", "wait"),
    [(2, 0.711111, 1.777778), (4, 0.596432, 0.745541), (8, 0.457645, 0.286028)],
)
def test_mmc(servers, waits, wait, estimate):
    """M/M/c at 0.8: as many wait as Erlang's C says, and as long."""
    generator = np.random.default_rng(servers)
    visit = fcfs(
        poisson_ns(generator, 0.8 * servers, 400_000), exponential_ns(generator, 1.0, 400_000), servers
    )
    assert estimate(visit.wait_ns > 0).agrees(waits, within=0.1)
    assert estimate(visit.wait_ns / S).agrees(wait, within=0.15)


def test_the_price_of_splitting_a_pool(estimate):
    """Two servers with one queue hold a request 2.7778, with a queue each 5."""
    generator = np.random.default_rng(3)
    arrival, service = poisson_ns(generator, 1.6, 800_000), exponential_ns(generator, 1.0, 800_000)
    assert estimate(fcfs(arrival, service, 2).sojourn_ns / S).agrees(2.7778, within=0.1)
    side = generator.integers(2, size=len(arrival)) == 0
    for chosen in (side, ~side):
        assert estimate(fcfs(arrival[chosen], service[chosen]).sojourn_ns / S).agrees(5, within=0.15)


def test_md1(estimate):
    """M/D/1 at 0.8: half the wait of M/M/1, 2."""
    arrival = poisson_ns(np.random.default_rng(4), 0.8, 1_000_000)
    visit = fcfs(arrival, np.full(len(arrival), 10**9))
    assert estimate(visit.wait_ns / S).agrees(2, within=0.1)


def test_each_class_alone(estimate):
    """Alone, text waits 0.005488 and images wait 0.333333 (Pollaczek and Khinchine)."""
    traffic, service_ns = mixture()
    for label, wait in (("text", 0.005488), ("image", 1 / 3)):
        own = traffic.of(label)
        visit = fcfs(traffic.arrival_ns[own], service_ns[own])
        assert estimate(visit.wait_ns / S).agrees(wait, within=0.1)


@pytest.mark.parametrize(
    ("order", "text", "image"),
    [("first come", 0.486905, 0.486905), ("text first", 0.249390, 0.593786)],
)
def test_the_mixture(order, text, image, estimate):
    """Beside images, text waits 88.7 times as long as alone, and half of that if it goes first."""
    traffic, _ = mixture()
    visit = served(order)
    assert estimate(visit.wait_ns[traffic.of("text")] / S).agrees(text, within=0.1)
    assert estimate(visit.wait_ns[traffic.of("image")] / S).agrees(image, within=0.1)


@pytest.mark.parametrize("order", ["first come", "text first"])
def test_order_of_service_moves_waits_about(order, estimate):
    """The sum of load times wait is 0.282405 in either order (Kleinrock's conservation law)."""
    visit = served(order)
    work = visit.service_ns / S * visit.wait_ns / S
    assert estimate(4 * work).agrees(0.282405, within=0.1)


@pytest.mark.parametrize(
    ("order", "who", "culprit", "wait"),
    [
        ("first come", "text", "image", 0.394762),
        ("first come", "text", "text", 0.092143),
        ("text first", "text", "image", 0.2),
        ("text first", "text", "text", 0.049390),
        ("text first", "image", "text", 0.156272),
        ("text first", "image", "image", 0.437515),
    ],
)
def test_who_makes_whom_wait(order, who, culprit, wait, estimate):
    """Of the wait of a class, so much is spent while the server works on each class."""
    traffic, _ = mixture()
    charged = charged_ns(served(order), traffic.of(who), traffic.of(culprit))
    assert estimate(charged / S).agrees(wait, within=0.1)


def test_tandem(estimate):
    """Three exponential servers in a row at load 0.4, 0.5 and 0.67: 1.833333 in all, 3.666667 present."""
    generator = np.random.default_rng(5)
    requests = 600_000
    arrival = poisson_ns(generator, 2.0, requests)
    visits = tandem(arrival, [Station(exponential_ns(generator, 1 / per_s, requests)) for per_s in (5, 4, 3)])
    through = Visit(arrival, arrival, visits[-1].end_ns)
    assert estimate(through.sojourn_ns / S).agrees(1.833333, within=0.05)
    assert estimate(present(through)).agrees(3.666667, within=0.05)
    for visit, per_s in zip(visits, (5, 4, 3), strict=True):
        assert estimate(visit.sojourn_ns / S).agrees(1 / (per_s - 2), within=0.1)


@st.composite
def queues(draw):
    """Arrivals in any order, service times and numbers of servers, small enough to meet every tie."""
    requests = draw(st.integers(1, 30))
    times = st.lists(st.integers(0, 20), min_size=requests, max_size=requests)
    arrival, service, rank = (np.array(draw(times), np.int64) for _ in range(3))
    return arrival, service, rank, draw(st.integers(1, 4))


@given(queues())
def test_littles_law(queue):
    """In every station the time integral of the number present is the sum of the times in it, exactly."""
    arrival, service, rank, servers = queue
    first, second = tandem(arrival, [Station(service, servers), Station(rank)])
    for visit in (first, second, priority(arrival, service, rank), Visit(arrival, arrival, second.end_ns)):
        assert in_station_ns(visit) == visit.sojourn_ns.sum()


@given(queues())
def test_nobody_waits_while_a_server_is_free(queue):
    """A request is served for its own time, waits only while all servers work, and none works on two."""
    arrival, service, rank, servers = queue
    for visit, pool in ((fcfs(arrival, service, servers), servers), (priority(arrival, service, rank), 1)):
        assert (visit.service_ns == service).all()
        assert (visit.wait_ns >= 0).all()
        for now in range(int(visit.end_ns.max())):
            working = np.count_nonzero((visit.start_ns <= now) & (now < visit.end_ns))
            waiting = np.count_nonzero((visit.arrival_ns <= now) & (now < visit.start_ns))
            assert working == pool if waiting else working <= pool


@given(queues())
def test_order_of_service(queue):
    """First come is first served; with ranks, whoever starts has the lowest of those that are there."""
    arrival, service, rank, servers = queue
    start = fcfs(arrival, service, servers).start_ns
    assert (np.diff(start[np.argsort(arrival, kind="stable")]) >= 0).all()
    visit = priority(arrival, service, rank)
    for number, begin in enumerate(visit.start_ns):
        there = (arrival <= begin) & (visit.start_ns > begin)
        assert (rank[there] >= rank[number]).all()


@given(queues())
def test_equal_ranks_are_first_come_first_served(queue):
    """The two ways to serve by one server agree when no rank differs."""
    arrival, service, _, _ = queue
    plain, ranked = fcfs(arrival, service), priority(arrival, service, np.zeros_like(arrival))
    assert (plain.start_ns == ranked.start_ns).all()


@given(
    st.integers(2, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 1000),
    st.integers(1, 1000),
    st.integers(1, 60),
)
def test_no_free_lunch(accelerators, encode_ns, rest_ns, requests):
    """With fixed costs and nothing shared, no split of equal accelerators beats N / (s_E + s_PD)."""
    number, encoders = accelerators
    visits = tandem(
        np.zeros(requests, np.int64),
        [
            Station(np.full(requests, encode_ns), encoders),
            Station(np.full(requests, rest_ns), number - encoders),
        ],
    )
    assert visits[-1].end_ns.max() * number >= requests * (encode_ns + rest_ns)


@pytest.mark.parametrize(("encoders", "others"), [(1, 3), (2, 2), (3, 1)])
def test_rate_matching(encoders, others):
    """In saturation the slower side sets the rate, and the other side idles for the rest."""
    requests, encode_ns, rest_ns = 6000, 30 * MS, 50 * MS
    stations = [Station(np.full(requests, encode_ns), encoders), Station(np.full(requests, rest_ns), others)]
    visits = tandem(np.zeros(requests, np.int64), stations)
    whole_ns = visits[-1].end_ns.max()
    rate = min(encoders / encode_ns, others / rest_ns)
    # The first request finds the second side empty, and the last one leaves the first side idle.
    assert requests / whole_ns == pytest.approx(rate, rel=2 * (encode_ns + rest_ns) * rate / requests)
    for station, visit in zip(stations, visits, strict=True):
        idle = 1 - visit.service_ns.sum() / (station.servers * whole_ns)
        capacity = station.servers / int(station.service_ns[0])
        assert idle == pytest.approx(1 - rate / capacity, abs=0.01)


STALL = Stall(begin_ns=1000 * MS, length_ns=500 * MS)


@pytest.mark.parametrize(
    ("visit", "requests", "p99_ns"),
    [
        (stalling(np.arange(500) * 10 * MS, 10 * MS, STALL), 500, 460 * MS),
        (stalling_closed_loop(10 * MS, STALL, 5000 * MS), 450, 10 * MS),
    ],
    ids=["open loop", "closed loop"],
)
def test_coordinated_omission(visit, requests, p99_ns):
    """A server that stalls once for 500 of 5,000 ms: a client that waits for answers does not see it."""
    in_order = np.sort(visit.sojourn_ns)
    assert len(in_order) == requests
    assert in_order[math.ceil(0.99 * requests) - 1] == p99_ns


def test_a_stall_holds_what_is_being_served():
    """A service that a stall falls into takes as much longer; one that begins in it begins after it."""
    visit = stalling(np.array([994, 995, 1250, 1500]) * MS, 6 * MS, STALL)
    assert (visit.end_ns == np.array([1000, 1501, 1506, 1506]) * MS).all()
