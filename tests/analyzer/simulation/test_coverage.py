"""Of many simulated runs, the analyzer's 95 % intervals contain the truth in about 95 %.

The queue is M/M/1 with a mean service time of 0.1 s.  It forgets in
0.1 / (1 - sqrt(load)) ** 2 seconds (Cohen, The Single Server Queue), which is 1.2 s
at load 0.5 and 9 s at 0.8.  A run begins after 40 times that and lasts 1,700 and 420
times as long, so that each of the 30 blocks is worth 57 and 14.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from stagetrace_analyzer.intervals import P50, P95, block_numbers, quantiles, resample_weights, share
from stagetrace_analyzer.resampling import BOUNDS, BlockTable
from stagetrace_analyzer.results import Region
from stagetrace_analyzer.simulation.stations import Visit, fcfs
from stagetrace_analyzer.simulation.traffic import exponential_ns, poisson_ns

pytestmark = pytest.mark.slow

RUNS = 200
SERVICE_S = 0.1
REQUESTS = {0.5: 10_000, 0.8: 30_000}
FORGETS = 40


def forgotten_after(load):
    """Requests that come in the time in which the queue forgets."""
    return load / (1 - math.sqrt(load)) ** 2


def mm1_run(load, seed):
    """A stretch of a settled M/M/1."""
    settling = math.ceil(FORGETS * forgotten_after(load))
    requests = REQUESTS[load] + settling
    generator = np.random.default_rng([seed, round(100 * load)])
    visit = fcfs(
        poisson_ns(generator, load / SERVICE_S, requests), exponential_ns(generator, SERVICE_S, requests)
    )
    return Visit(visit.arrival_ns[settling:], visit.start_ns[settling:], visit.end_ns[settling:])


@pytest.mark.parametrize("load", REQUESTS)
def test_a_block_is_long_against_the_queues_memory(load):
    """Blocks hold at least ten times the requests that come while the queue forgets."""
    visit = mm1_run(load, 0)
    assert len(visit.end_ns) == REQUESTS[load]
    assert np.bincount(block_numbers(len(visit.end_ns))).min() > 10 * forgotten_after(load)


@pytest.mark.parametrize("q", [P50, P95], ids=["p50", "p95"])
@pytest.mark.parametrize("load", REQUESTS)
def test_coverage_of_quantiles(load, q):
    """Intervals of the sojourn's quantiles contain -ln(1 - q) W in 90 to 99 % of the runs."""
    truth_ns = -math.log(1 - q) * SERVICE_S / (1 - load) * 1e9
    blocks = block_numbers(REQUESTS[load])
    found = [quantiles(mm1_run(load, seed).sojourn_ns.astype(float), (q,), blocks)[0] for seed in range(RUNS)]
    hits = sum(one.low_ns <= truth_ns <= one.high_ns for one in found)
    assert 0.90 <= hits / RUNS <= 0.99
    independent = np.mean([one.n_eff for one in found])
    assert independent < REQUESTS[load] / 2


@pytest.mark.parametrize("load", REQUESTS)
def test_coverage_of_a_share(load):
    """Intervals of the share of waiting contain the load, which it is in M/M/1, in 90 to 99 % of the runs."""
    blocks = block_numbers(REQUESTS[load])
    number = int(blocks[-1]) + 1
    weights = resample_weights(number)
    hits = 0
    for seed in range(RUNS):
        visit = mm1_run(load, seed)
        waited, spent = (np.bincount(blocks, times) for times in (visit.wait_ns, visit.sojourn_ns))
        found = share((weights @ waited) / (weights @ spent), number)
        hits += found.low <= load <= found.high
    assert 0.90 <= hits / RUNS <= 0.99


def mean_up_to(load, q):
    """E[S; S < t] and E[B; S < t] for the sojourn S, the service B and the q-quantile t of S; mean service 1.

    Of an M/M/1 request that stayed s, the service is as long as the smaller of s and an
    exponential time of the arrival rate.
    """
    if q == 1:
        return 1 / (1 - load), 1.0
    t = -math.log(1 - q) / (1 - load)
    stayed = 1 / (1 - load) - math.exp(-(1 - load) * t) * (t + 1 / (1 - load))
    served = 1 - (math.exp(-(1 - load) * t) - (1 - load) * math.exp(-t)) / load
    return stayed, served


@pytest.mark.parametrize("region", Region)
def test_coverage_of_a_share_in_a_region(region):
    """At load 0.5 the same holds of the typical requests and of the tail: 0.286 and 0.756 are waiting."""
    load, (lower, upper) = 0.5, BOUNDS[region]
    (stayed, served), (below, served_below) = mean_up_to(load, upper), mean_up_to(load, lower)
    truth = 1 - (served - served_below) / (stayed - below)
    hits = 0
    for seed in range(RUNS):
        visit = mm1_run(load, seed)
        table = BlockTable(2)
        spent_ns = np.column_stack([visit.wait_ns, visit.service_ns]).astype(float)
        table.add(block_numbers(REQUESTS[load]), visit.sojourn_ns.astype(float), spent_ns)
        sums = table.resample((region,))[region]
        found = share(sums.shares([0]), sums.blocks)
        hits += found.low <= truth <= found.high
    assert 0.90 <= hits / RUNS <= 0.99


@pytest.mark.parametrize("load", REQUESTS)
def test_requests_taken_as_independent_would_not_do(load):
    """Without blocks the same intervals miss the truth far too often: the test can tell."""
    truth_ns = math.log(2) * SERVICE_S / (1 - load) * 1e9
    found = [quantiles(mm1_run(load, seed).sojourn_ns.astype(float), (P50,))[0] for seed in range(RUNS)]
    assert sum(one.low_ns <= truth_ns <= one.high_ns for one in found) / RUNS < 0.85
