"""The whole analysis of simulated datasets says what is known to be true of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from stagetrace.stages import Horizon, Reason, Stage
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.results import Answer, Question, Region
from stagetrace_analyzer.simulation.datasets import (
    Ends,
    SimulatedRun,
    answer_stages,
    station_stages,
    write_runs,
)
from stagetrace_analyzer.simulation.stations import (
    Stall,
    Station,
    fcfs,
    priority,
    stalling,
    stalling_closed_loop,
    tandem,
)
from stagetrace_analyzer.simulation.traces import TokenCost, read_azure, serve
from stagetrace_analyzer.simulation.traffic import (
    IMAGE,
    TEXT,
    alike,
    exponential_ns,
    poisson_mixture,
    poisson_ns,
)

DATA = Path(__file__).parents[4] / "shared" / "data" / "azure"
MS = 1_000_000
STALL = Stall(1000 * MS, 500 * MS)


def analyzed(folder, *runs, **options):
    """Write runs as a dataset and analyze it."""
    write_runs(folder, runs, "for a test", force=True)
    return analyze([folder], load_rules(), **options)


def mm1_run(load, requests, seed=1, **facts):
    """M/M/1 with a mean service time of 0.1 s, as a prefill station."""
    generator = np.random.default_rng(seed)
    visit = fcfs(poisson_ns(generator, 10 * load, requests), exponential_ns(generator, 0.1, requests))
    return visit, SimulatedRun(
        alike(visit.arrival_ns), station_stages(visit, Stage.PREFILL, Reason.STEP), **facts
    )


def mixture_run(order, requests=60_000, **facts):
    """Text of 50 ms and images of 1 s at one server: 15,000 s, where a few seconds are forgotten."""
    traffic = poisson_mixture(np.random.default_rng(8), [(TEXT, 3.6), (IMAGE, 0.4)], requests)
    service_ns = np.where(traffic.of("text"), 50 * MS, 1000 * MS)
    if order == "first come":
        visit = fcfs(traffic.arrival_ns, service_ns)
    else:
        visit = priority(traffic.arrival_ns, service_ns, traffic.number)
    stages = (
        *station_stages(visit, Stage.PREFILL, Reason.STEP),
        *answer_stages(np.full(requests, 100 * MS), MS),
    )
    return SimulatedRun(traffic, stages, **facts)


def share_of(report, stage, horizon=Horizon.TTFT):
    """Share of a stage in all requests of a class."""
    return report.composition(horizon, Region.ALL).shares[stage]


def test_figures_are_those_of_the_queue(tmp_path):
    """Quantiles, shares and the load are what the simulated arrays give, and waiting is the load of the server."""
    visit, run = mm1_run(0.8, 30_000)
    found = analyzed(tmp_path, run)
    (report,) = found.classes
    kept = np.sort(visit.sojourn_ns[found.warm_up :])
    assert report.requests == len(kept) == 30_000 - found.warm_up
    for q, told in ((0.5, report.ttft.quantiles.p50), (0.95, report.ttft.quantiles.p95)):
        assert told.value_ns == kept[math.ceil(q * len(kept)) - 1]
        assert told.low_ns <= -math.log(1 - q) * 500 * MS <= told.high_ns
    waiting = share_of(report, "prefill.wait")
    assert waiting.value == pytest.approx(visit.wait_ns[found.warm_up :].sum() / kept.sum(), rel=1e-9)
    assert waiting.low <= 0.8 <= waiting.high
    dominant = report.dominant_wait
    assert (dominant.stages, dominant.reasons) == (("prefill.wait",), {"prefill.wait": {"step": 1.0}})
    assert found.ingest.about == ["Simulated: for a test"]


def test_littles_law_of_the_report(tmp_path):
    """The mean number in the server is the rate times the mean time in it."""
    visit, run = mm1_run(0.5, 20_000)
    (load,) = analyzed(tmp_path, run).loads
    assert load.open_loop
    assert load.rate_per_s == pytest.approx(5, rel=0.05)
    assert load.interarrival_cv == pytest.approx(1, rel=0.05)
    assert load.in_flight == pytest.approx(load.rate_per_s * visit.sojourn_ns.mean() / 1e9, rel=0.01)
    assert not load.overloaded


def test_a_server_that_cannot_keep_up(tmp_path):
    """At a load of 1.25 the queue grows until the end, and the report calls it overloaded."""
    _, run = mm1_run(1.25, 5_000)
    (load,) = analyzed(tmp_path, run).loads
    assert load.overloaded
    assert load.achieved == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(
    ("order", "text", "image"), [("first come", 0.486905, 0.486905), ("text first", 0.249390, 0.593786)]
)
def test_text_held_up_by_images(order, text, image, tmp_path):
    """Each class waits its share of Pollaczek and Khinchine; text, whose work is short, waits above all."""
    reports = {report.traffic_class: report for report in analyzed(tmp_path, mixture_run(order)).classes}
    for name, wait_s, service_s in (("text/short", text, 0.05), ("image/short", image, 1.0)):
        found = share_of(reports[name], "prefill.wait")
        assert found.low <= wait_s / (wait_s + service_s + 0.001) <= found.high
        assert reports[name].dominant_wait.stages == ("prefill.wait",)
    largest = {
        name: report.composition(Horizon.TTFT, Region.ALL).dominant_stage for name, report in reports.items()
    }
    assert largest["text/short"].stages == ("prefill.wait",)
    assert largest["image/short"].stages == ("prefill",)


def test_phases_of_an_experiment(tmp_path):
    """Alone, nobody waits materially behind text; in the mixture, the same text mostly waits."""
    mixed = mixture_run("first come", phase="mixture")
    own = mixed.traffic.of("text")
    arrival = mixed.traffic.arrival_ns[own]
    visit = fcfs(arrival, np.full(len(arrival), 50 * MS))
    stages = (
        *station_stages(visit, Stage.PREFILL, Reason.STEP),
        *answer_stages(np.full(len(arrival), 100 * MS), MS),
    )
    alone = SimulatedRun(alike(arrival), stages, phase="text only")
    found = analyzed(tmp_path, alone, mixed, by_phase=True)
    text = {report.phase: report for report in found.classes if report.traffic_class == "text/short"}
    waiting = {phase: share_of(report, "prefill.wait") for phase, report in text.items()}
    assert waiting["text only"].low <= 0.005488 / (0.005488 + 0.051) <= waiting["text only"].high
    assert waiting["mixture"].low <= 0.486905 / (0.486905 + 0.051) <= waiting["mixture"].high


def test_a_tandem_is_told_apart(tmp_path):
    """Of three servers in a row each wait has its share, and the slowest server's dominates."""
    generator = np.random.default_rng(9)
    requests, per_s = 60_000, (5, 4, 3)
    arrival = poisson_ns(generator, 2.0, requests)
    visits = tandem(arrival, [Station(exponential_ns(generator, 1 / rate, requests)) for rate in per_s])
    stages = (Stage.PREPROCESS, Stage.ENCODE, Stage.PREFILL)
    parts = [
        part for visit, stage in zip(visits, stages, strict=True) for part in station_stages(visit, stage)
    ]
    (report,) = analyzed(tmp_path, SimulatedRun(alike(arrival, IMAGE), tuple(parts))).classes
    for stage, rate in zip(stages, per_s, strict=True):
        wait = share_of(report, f"{stage.value}.wait")
        assert wait.low <= (1 / (rate - 2) - 1 / rate) / 1.833333 <= wait.high
    assert report.dominant_wait.stages == ("prefill.wait",)
    answers = {answer.question: answer.answer for answer in report.answers}
    assert answers[Question.ENCODER_QUEUE] is Answer.YES
    assert answers[Question.DOWNLOAD] is Answer.NO


def test_survivors(tmp_path):
    """Of 200 requests at once 150 are lost: the median is not reached, whatever the others show."""
    visit = fcfs(np.zeros(200, np.int64), np.full(200, MS))
    outcome = np.array(["ok"] * 50 + ["lost"] * 150)
    stages = station_stages(visit, Stage.PREFILL, Reason.SEATS)
    run = SimulatedRun(alike(visit.arrival_ns), stages, ends=Ends(outcome, np.zeros(200, np.int64)))
    (report,) = analyzed(tmp_path, run).classes
    for latency in (report.ttft, report.completion):
        assert (latency.quantiles.requests, latency.quantiles.reached) == (200, 50)
        assert latency.quantiles.p50.value_ns is None
        assert latency.survivors.requests == 50
    assert report.outcomes == {"ok": 50, "lost": 150}
    assert "75.0 % never got there" in report.ttft.quantiles.p50.reason


@pytest.mark.parametrize(("open_loop", "requests", "p99_ms"), [(True, 500, 460.0), (False, 450, 10.0)])
def test_coordinated_omission(open_loop, requests, p99_ms, tmp_path):
    """One stall: of 99 % of its requests an open loop tells 460.0 ms or less, a closed loop 10.0 ms."""
    if open_loop:
        visit = stalling(np.arange(500) * 10 * MS, 10 * MS, STALL)
    else:
        visit = stalling_closed_loop(10 * MS, STALL, 5000 * MS)
    run = SimulatedRun(alike(visit.arrival_ns), station_stages(visit, Stage.PREFILL), open_loop=open_loop)
    found = analyzed(tmp_path, run)
    (report,) = found.classes
    assert (found.requests + found.warm_up, found.loads[0].open_loop) == (requests, open_loop)
    place = next(place for place, p in enumerate(report.completion.ecdf_p) if p >= 0.99)
    assert report.completion.ecdf_ns[place] == p99_ms * MS


def test_published_load_of_a_trace(tmp_path):
    """The report of the conversation trace tells 5.53 requests a second, and 1.09."""
    path = DATA / "conv23.csv"
    if not path.exists():
        pytest.skip("the public trace conv23.csv is not beside the project (../shared/data/azure)")
    found = analyzed(tmp_path, serve(read_azure(path), TokenCost()))
    (load,) = found.loads
    assert (round(load.rate_per_s, 2), round(load.interarrival_cv, 2)) == (5.53, 1.09)
    assert load.requests + found.warm_up == 19_366
