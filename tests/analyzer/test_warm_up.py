from __future__ import annotations

import numpy as np
import pytest

from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.reports.document import document_of
from stagetrace_analyzer.results import WarmUp
from stagetrace_analyzer.simulation.stations import fcfs
from stagetrace_analyzer.simulation.traffic import exponential_ns, poisson_ns
from stagetrace_analyzer.warm_up import TREND_LEAST, mser5, trend

MS = 1_000_000


def test_a_slow_begin_is_left_out():
    """A run whose first 40 of 400 are three times as slow is cut there, or a batch or two later."""
    for seed in range(10):
        series = np.random.default_rng(seed).normal(100.0, 5.0, 400)
        series[:40] *= 3
        truncation = mser5(series)
        assert 40 <= truncation.observations <= 50
        assert truncation.settled


def test_a_steady_run_is_kept():
    """Without a drift at most a few batches go, in every one of 50 runs."""
    generator = np.random.default_rng(2)
    cut = [mser5(generator.normal(100.0, 5.0, 400)).observations for _ in range(50)]
    assert np.median(cut) <= 10


def test_a_burst_late_in_a_steady_run_costs_little():
    """The minimum moves far for a hair's breadth; the cut does not."""
    generator = np.random.default_rng(7)
    cut = []
    for _ in range(50):
        series = generator.exponential(100.0, 880)
        series[600:640] += 300.0
        cut.append(mser5(series).observations)
    assert max(cut) <= 100


def test_a_drift_to_the_end_is_not_settled():
    """A run that becomes faster all the time is cut near a quarter and told."""
    truncation = mser5(np.linspace(300.0, 100.0, 400))
    assert 90 <= truncation.observations <= 100
    assert not truncation.settled


@pytest.mark.parametrize("observations", [0, 1, 99])
def test_short_runs_are_not_searched(observations):
    """Fewer than twenty batches of five say nothing."""
    assert mser5(np.arange(float(observations))) == (0, True)


def test_the_truncation_is_the_textbooks():
    """The cut is the first whose squared standard error, by its definition, is within 5 % of the smallest."""
    series = np.random.default_rng(3).exponential(1.0, 333) + np.exp(-np.arange(333) / 20)
    means = series[:330].reshape(-1, 5).mean(axis=1)
    errors = np.array([means[d:].var() / len(means[d:]) for d in range(int(len(means) * 0.25) + 1)])
    assert mser5(series).observations == 5 * int(np.flatnonzero(errors <= 1.05 * errors.min())[0])


def test_phases_lose_their_warm_up(rows, tmp_path):
    """Only requests with a phase are an experiment; both classes of a phase are cut at the same time."""
    generator = np.random.default_rng(4)
    for number in range(400):
        slow = 5.0 if number < 40 else 1.0
        for phase in ("run", None):
            rows.request(
                ("both", "prefill", slow * generator.uniform(9.9, 10.1) * (1 + 9 * (number % 2))),
                media_items=number % 2,
                phase=phase,
                received_unix_ns=10**18 + number * MS,
            )
    analysis = analyze([rows.write(tmp_path)], load_rules(), by_phase=True)
    (warm_up,) = analysis.warm_ups
    assert warm_up == WarmUp("run", warm_up.requests, 400, "MSER-5", settled=True)
    assert 40 <= warm_up.requests <= 50
    found = {(r.phase, r.traffic_class): r.requests for r in analysis.classes}
    assert (found[None, "text/short"], found[None, "image/short"]) == (200, 200)
    assert found["run", "text/short"] + found["run", "image/short"] == 400 - warm_up.requests
    assert abs(found["run", "text/short"] - found["run", "image/short"]) <= 1
    assert analysis.requests == 800 - warm_up.requests


def test_failed_requests_do_not_hide_a_warm_up(rows, tmp_path):
    """Most images have no first token; the median of their class is over those that have one."""
    generator = np.random.default_rng(1)
    for number in range(400):
        for modality, slow in ((0, 5.0 if number < 40 else 1.0), (1, 10.0)):
            failed = modality and number % 10 < 6
            rows.request(
                ("both", "prefill", slow * generator.uniform(9.9, 10.1)),
                phase="run",
                media_items=modality,
                received_unix_ns=10**18 + number * MS,
                **({"outcome": "error", "ttft_ns": None, "completion_ns": None} if failed else {}),
            )
    (warm_up,) = analyze([rows.write(tmp_path)], load_rules()).warm_ups
    assert 70 <= warm_up.requests <= 100


def test_a_phase_has_a_warm_up_in_each_dataset(new_rows, tmp_path):
    """Two runs of a phase, each with a slow begin, lose what they lose alone."""
    generator = np.random.default_rng(5)
    folders = []
    for run in range(2):
        rows = new_rows()
        for number in range(400):
            slow = 5.0 if number < 40 * (run + 1) else 1.0
            rows.request(
                ("both", "prefill", slow * generator.uniform(9.9, 10.1)),
                phase="run",
                received_unix_ns=10**18 + (run * 1000 + number) * MS,
            )
        folders.append(rows.write(tmp_path / str(run)))
    alone = [analyze([folder], load_rules()).warm_ups for folder in folders]
    assert analyze(folders, load_rules()).warm_ups == alone[0] + alone[1]
    assert [40 <= warm_up.requests - 40 * run <= 50 for run, (warm_up,) in enumerate(alone)] == [True, True]


def sojourns(seed, load, requests, before=3000):
    """Times in M/M/1 with a mean service of 0.1 s, after some that are not counted."""
    generator = np.random.default_rng(seed)
    of = before + requests
    visit = fcfs(poisson_ns(generator, 10 * load, of), exponential_ns(generator, 0.1, of))
    return visit.sojourn_ns[before:].astype(np.float64)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_steady_queue_has_no_trend(load):
    """At most 5 in 100 steady queues are said to have one, those of MSER-5 included."""
    found = [sojourns(seed, load, 2000) for seed in range(100)]
    cuts = [mser5(times) for times in found]
    alarms = [
        not cut.settled or trend(times[cut.observations :]) != 0
        for times, cut in zip(found, cuts, strict=True)
    ]
    assert sum(alarms) <= 5


def test_a_queue_that_grows_has_a_trend():
    """At a load of 1.2, which MSER-5 misses in most runs, 95 of 100 are found, and all as growing."""
    found = [sojourns(seed, 1.2, 2000, before=0) for seed in range(100)]
    trends = [trend(times[mser5(times).observations :]) for times in found]
    assert sum(one == 1 for one in trends) >= 95
    assert -1 not in trends


@pytest.mark.parametrize("at", [4000, 6000, 8000])
@pytest.mark.parametrize(("first", "then", "expected"), [(0.5, 0.9, 1), (0.9, 0.5, -1)])
def test_a_load_that_changes_once_is_found(at, first, then, expected):
    """From 0.5 to 0.9, or back, in the midst of 12,000 requests: the pairs of batches do not tell it."""
    for seed in range(10):
        generator = np.random.default_rng(seed)
        gaps = generator.exponential(1e8, 12_000) / np.where(np.arange(12_000) < at, first, then)
        visit = fcfs(np.cumsum(gaps).astype(np.int64), exponential_ns(generator, 0.1, 12_000))
        assert trend(visit.sojourn_ns.astype(np.float64)) == expected


def test_a_trend_has_a_direction_and_needs_observations():
    """Up, down, or too few; equal values have none."""
    rising = np.arange(float(TREND_LEAST))
    assert [trend(rising), trend(-rising), trend(rising[1:]), trend(0 * rising)] == [1, -1, 0, 0]


def test_a_trend_is_told(rows, tmp_path):
    """The report raises the alarm for a phase whose requests became slower; nothing need be left out."""
    for number in range(600):
        rows.request(
            ("both", "prefill", 100.0 + number / 6),
            phase="run",
            received_unix_ns=10**18 + number * MS,
        )
    analysis = analyze([rows.write(tmp_path)], load_rules())
    (warm_up,) = analysis.warm_ups
    assert (warm_up.settled, warm_up.trend) == (False, 1)
    alarms = document_of(analysis).alarms
    assert any(a.startswith("STILL DRIFTING [run]: TTFT became longer from the begin") for a in alarms)
