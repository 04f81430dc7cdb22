from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.load import NOT_TOLD, Arrivals, load_of, mean_in_flight
from stagetrace_analyzer.reports.document import document_of
from stagetrace_analyzer.simulation.stations import fcfs
from stagetrace_analyzer.simulation.traffic import exponential_ns, poisson_ns

S = 1_000_000_000


BEGIN = 10**18


def load(arrivals_s, sojourns_s, intended_s=None, run=None):
    """The load of requests that come and stay as said."""
    received, intended = (
        (np.array(times) * S).astype(np.int64) + BEGIN
        for times in (arrivals_s, arrivals_s if intended_s is None else intended_s)
    )
    if intended_s is None:
        intended[:] = NOT_TOLD
    runs = np.zeros(len(received), np.int32) if run is None else np.array(run, np.int32)
    return load_of("a", Arrivals(received, intended, np.array(sojourns_s) * S, runs))


def test_rate_and_variation_of_arrivals():
    """Ten requests a second on the dot: rate 10, no variation; intended times count where all are told."""
    even = load(np.arange(200) / 10, np.full(200, 0.05))
    assert (even.rate_per_s, even.interarrival_cv) == (pytest.approx(10), pytest.approx(0, abs=1e-6))
    assert (even.open_loop, even.overloaded) == (False, False)
    assert even.in_flight == pytest.approx(0.5, rel=0.01)
    told = load(np.arange(200) / 10, np.full(200, 0.05), intended_s=np.arange(200) / 20)
    assert told.intended_set_aside == 0
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
        (np.arange(1000) / 10, np.where(np.arange(1000) >= 850, np.inf, 0.5)),
    ],
    ids=["shorter than its requests", "unknown ends", "a day between two runs", "all at once", "a crash"],
)
def test_requests_that_take_no_longer_than_before_are_no_overload(arrivals_s, sojourns_s):
    """More of them are in the server at the end than on average, and yet no queue grows."""
    found = load(arrivals_s, sojourns_s)
    assert found.achieved < 0.95
    assert not found.overloaded


def test_a_short_steady_queue_is_not_overloaded():
    """Of 100 runs of M/M/1 at a load of 0.9, 200 requests each, many end in a queue; at 1.5 it is too long."""
    alarms = {}
    for per_s in (9.0, 15.0):
        generator = np.random.default_rng(2)
        queues = [
            fcfs(poisson_ns(generator, per_s, 200), exponential_ns(generator, 0.1, 200)) for _ in range(100)
        ]
        found = [load(queue.arrival_ns / S, queue.sojourn_ns / S) for queue in queues]
        alarms[per_s] = sum(one.overloaded for one in found)
        assert sum(one.achieved < 0.95 for one in found) > 25
    assert alarms[9.0] <= 2
    assert alarms[15.0] >= 90


def test_a_calm_server_at_the_same_time_hides_no_overload():
    """Of two servers one has 2 thirds of its 300 requests done; most requests are of the other."""
    calm, hard = np.arange(1000) / 10, np.arange(300) / 3
    sojourns = np.concatenate([np.full(1000, 0.1), (np.arange(300) + 1) / 2 - hard])
    found = load(np.concatenate([calm, hard]), sojourns, run=np.repeat([0, 1], [1000, 300]))
    assert found.overloaded
    assert (found.pauses_s, found.achieved) == (0, pytest.approx(1 - 100 / 1300, abs=0.002))


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


@pytest.mark.parametrize(
    ("off_s", "believed"),
    [(0.0, True), (59.0, True), (61.0, False), (-86_399.0, True), (-86_401.0, False), (-1e9, False)],
)
def test_an_intended_time_that_cannot_be_is_set_aside(off_s, believed):
    """It must not be over a day before the receipt, nor over a minute after it; else receipts count."""
    arrivals = np.arange(200) / 10
    intended = arrivals / 2
    intended[77] = arrivals[77] + off_s
    found = load(arrivals, np.full(200, 0.05), intended_s=intended)
    assert (found.open_loop, found.intended_set_aside) == (believed, 0 if believed else 1)
    if not believed:
        assert found.rate_per_s == pytest.approx(10)


def test_a_client_that_tells_nonsense_is_told(rows, tmp_path):
    """An intended time of 0, or before the epoch, in one of 200 requests leaves the rate as it is."""
    for number in range(200):
        at = BEGIN + number * S // 10
        rows.request(
            ("both", "receive", 1.0),
            received_unix_ns=at,
            intended_unix_ns={5: 0, 6: -(10**18), 7: 2**63 - 1, 8: None}.get(number, at),
        )
    analysis = analyze([rows.write(tmp_path)], load_rules())
    (found,) = analysis.loads
    assert (found.open_loop, found.intended_set_aside) == (False, 3)
    assert found.rate_per_s == pytest.approx(10)
    assert any(
        remark.startswith("3 intended sends are set aside") for remark in document_of(analysis).load.remarks
    )


def test_a_request_whose_last_byte_was_sent_has_ended(rows, tmp_path):
    """Other programs may not write when a request ended, but when it was answered."""
    for number in range(200):
        rows.request(("both", "receive", 50.0), received_unix_ns=BEGIN + number * S // 10, ended_ns=None)
    (found,) = analyze([rows.write(tmp_path)], load_rules()).loads
    assert found.in_flight == pytest.approx(0.5)
    assert found.achieved == pytest.approx(199 / 200)


def test_pauses_between_phases_are_no_load():
    """Two phases of 10 s with 10 and 30 requests a second and an hour between them have 20 a second."""
    arrivals = np.concatenate([np.arange(101) / 10, 3610 + np.arange(301) / 30])
    run = np.repeat([0, 1], [101, 301])
    found = load(arrivals, np.full(402, 0.5), run=run)
    assert found.rate_per_s == pytest.approx(20)
    assert found.in_flight == pytest.approx(10, rel=0.03)
    assert found.pauses_s == pytest.approx(3600)
    assert load(arrivals, np.full(402, 0.5), intended_s=arrivals, run=run).rate_per_s == pytest.approx(20)
    assert load(arrivals, np.full(402, 0.5)).rate_per_s < 0.12


def test_phases_at_the_same_time_are_one_load():
    """Two clients with a phase each, one beginning when the other is half through, add up; nothing pauses."""
    arrivals = np.concatenate([np.arange(101) / 10, 5 + np.arange(101) / 10])
    found = load(arrivals, np.full(202, 0.5), run=np.repeat([7, 3], 101))
    assert (found.rate_per_s, found.pauses_s) == (pytest.approx(201 / 15), 0)


def test_a_phase_that_does_not_keep_up_is_overloaded_in_whatever_company():
    """Calm phases before and after it, and pauses, do not hide that its queue grew."""
    calm = np.arange(500) / 10
    hard = np.arange(1000) / 18
    arrivals = np.concatenate([calm, 1000 + hard, 5000 + calm])
    sojourns = np.concatenate([np.full(500, 0.1), (np.arange(1000) + 1) / 13.4 - hard, np.full(500, 0.1)])
    run = np.repeat([0, 1, 2], [500, 1000, 500])
    found = load(arrivals, sojourns, run=run)
    assert found.overloaded
    assert found.achieved == pytest.approx(1 - 1000 * (1 - 13.4 / 18) / 2000, rel=0.01)


def test_phases_and_datasets_are_told_apart(new_rows, tmp_path):
    """What is a pause is found in the data: by phase, and by dataset where no phase is told."""
    folders = []
    for place in range(2):
        rows = new_rows()
        for number in range(202):
            second_phase = number > 100
            at = place * 10**6 + second_phase * 1000 + number % 101 / 10
            phase = ["a", "b"][second_phase] if place else None
            if place or not second_phase:
                rows.request(("both", "receive", 1.0), received_unix_ns=BEGIN + round(at * S), phase=phase)
        folders.append(rows.write(tmp_path / str(place)))
    analysis = analyze(folders, load_rules())
    (found,) = analysis.loads
    assert found.rate_per_s == pytest.approx(10)
    assert found.pauses_s == pytest.approx(10**6 + 1000 - 2 * 10)
    assert any(remark.startswith("pauses of 1,000,980 s") for remark in document_of(analysis).load.remarks)
