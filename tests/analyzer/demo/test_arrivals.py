"""Seeded plans of arrivals."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("PIL")

from stagetrace.errors import UsageError
from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, Stream, poisson_plan, sequential_plan

BOTH = (Stream(TEXT, 3.0), Stream(IMAGE, 1.0))


def offsets(plan, traffic):
    return [arrival.offset_ns for arrival in plan.arrivals if arrival.traffic == traffic]


def test_a_seed_is_a_plan():
    """Equal arguments give equal plans, another seed another one."""
    assert poisson_plan("mixture", BOTH, 40, 1) == poisson_plan("mixture", BOTH, 40, 1)
    assert poisson_plan("mixture", BOTH, 40, 1) != poisson_plan("mixture", BOTH, 40, 2)


def test_a_class_arrives_at_the_same_instants_alone_and_in_the_mixture():
    """Only then is the difference between the phases the other class."""
    mixture = poisson_plan("mixture", BOTH, 40, 1)
    for stream in BOTH:
        alone = poisson_plan("alone", [stream], 40, 1)
        assert offsets(alone, stream.traffic) == offsets(mixture, stream.traffic)


def test_no_content_comes_twice():
    """Caches must not answer: neither within a phase nor between phases."""
    plans = [poisson_plan(phase, BOTH, 100, 1) for phase in ("text only", "mixture")]
    plans.append(sequential_plan("mixture", [TEXT, IMAGE], 3, 1))
    seeds = [arrival.seed for plan in plans for arrival in plan.arrivals]
    assert len(set(seeds)) == len(seeds)


def test_arrivals_are_in_order_and_inside_the_duration():
    """The client walks through the plan as it is."""
    times = [arrival.offset_ns for arrival in poisson_plan("mixture", BOTH, 40, 1).arrivals]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 40e9


def test_the_rate_is_the_one_asked_for():
    """Over 2,000 s, 3 a second are 6,000 give or take a few standard deviations of 77."""
    plan = poisson_plan("text only", BOTH[:1], 2000, 1)
    assert len(plan.arrivals) == pytest.approx(6000, abs=400)


def test_gaps_vary_as_much_as_a_poisson_process_has_them():
    """The coefficient of variation of exponential gaps is 1."""
    times = [arrival.offset_ns for arrival in poisson_plan("text only", BOTH[:1], 2000, 1).arrivals]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(1, abs=0.05)


def test_no_rate_is_no_arrival():
    """A stream may be switched off."""
    assert poisson_plan("text only", [Stream(TEXT, 0.0)], 40, 1).arrivals == ()


def test_an_endless_plan_is_refused():
    """A plan lies in memory as a whole."""
    with pytest.raises(UsageError, match="100000"):
        poisson_plan("mixture", BOTH, 1e9, 1)


def test_in_turn_means_each_class_in_each_round():
    """The warm-up must reach every code path early."""
    plan = sequential_plan("warm-up", [TEXT, IMAGE], 2, 1)
    assert [arrival.traffic for arrival in plan.arrivals] == [TEXT, IMAGE, TEXT, IMAGE]
