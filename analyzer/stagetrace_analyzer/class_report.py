"""The report of one traffic class, made of what an analysis keeps of its requests.

Requests that failed, were cancelled or were lost count as infinitely slow in
the quantiles of a class, so that a server cannot look fast by failing.  Stages
and shares are over the requests that ended well (``ok``), because a horizon
that was never reached has no parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stagetrace.stages import Horizon, Kind, Outcome
from stagetrace_analyzer.composition import compositions, plain_answers
from stagetrace_analyzer.intervals import (
    ALIKE,
    P50,
    P95,
    P99,
    likeness,
    quantiles,
    requests_needed,
)
from stagetrace_analyzer.load import mean_in_flight
from stagetrace_analyzer.remedies import remedies_for
from stagetrace_analyzer.resampling import BlockTable
from stagetrace_analyzer.results import (
    Answer,
    ClassReport,
    Latency,
    MediaFacts,
    Quantile,
    Quantiles,
    Region,
    StageTime,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from stagetrace_analyzer.buckets import Histogram
    from stagetrace_analyzer.population import Key, Population
    from stagetrace_analyzer.results import Composition, PlainAnswer
    from stagetrace_analyzer.tables import Tables

_ECDF_POINTS: Final = 200


def class_report(
    group: int, key: Key, post: frozenset[str], tables: Tables, answers: Mapping[str, list[Any]]
) -> ClassReport:
    """Return the report of a class in a phase.

    Args:
        group: Its number in the population.
        key: Its name and its phase.
        post: Names of the classes whose rules ask for what is known only at the end.
        tables: What was kept of the intervals of all requests.
        answers: Rows of the queries ``outcomes`` and ``media`` about it, by name.
    """
    people = tables.population
    members = np.flatnonzero(people.group == group)
    members = members[np.argsort(people.received_unix_ns[members], kind="stable")]
    sums = {
        h: tables.by_block.get((group, h), BlockTable(len(tables.places.stages))).resample() for h in Horizon
    }
    blocks = people.block[members]
    latencies = {h: _latency(people.latency_ns(h)[members], blocks) for h in Horizon}
    composed = [
        composition
        for h in Horizon
        for composition in compositions(h, sums[h], tables.places, latencies[h].quantiles)
    ]
    waiting = tables.waiting_ns[members]
    known = ~np.isnan(waiting)
    plain = plain_answers(
        {h: sums[h][Region.ALL] for h in Horizon},
        tables.places,
        {h: latencies[h].quantiles.p50.n_eff for h in Horizon},
    )
    stages = tuple(time for horizon in Horizon for time in _stage_times(group, horizon, composed, tables))
    return ClassReport(
        traffic_class=key[0],
        phase=key[1],
        post=key[0] in post,
        requests=len(members),
        outcomes=_outcomes(answers["outcomes"]),
        ttft=latencies[Horizon.TTFT],
        completion=latencies[Horizon.COMPLETION],
        waiting=_latency(waiting[known], blocks[known]),
        partitioned={horizon: tables.sound[group, horizon] for horizon in Horizon},
        stages=stages,
        compositions=tuple(composed),
        answers=plain,
        remedies=remedies_for(_worth_a_try(composed, plain), media=key[1] in tables.with_media),
        windows=_window_rows(group, members, tables),
        unattributed={h: _unattributed(h, tables.sound[group, h], stages) for h in Horizon},
        media=_media(answers["media"]),
        notes=tuple(_notes(people, members)),
    )


def _worth_a_try(
    composed: Sequence[Composition], plain: Sequence[PlainAnswer]
) -> list[tuple[str, Mapping[str, float] | None]]:
    """Every wait that dominates some region, with its reasons, and slow input; each stage once."""
    found: dict[str, Mapping[str, float] | None] = {}
    for composition in composed:
        dominant = composition.dominant_wait
        for stage in dominant.stages:
            found.setdefault(stage, (dominant.reasons or {}).get(stage))
    for answer in plain:
        if answer.answer is Answer.YES and answer.horizon is Horizon.TTFT:
            found |= {stage: found.get(stage) for stage in answer.stages}
    return list(found.items())


def _outcomes(found: Sequence[Any]) -> dict[str, int]:
    """Requests by outcome, the good ones first."""
    counts = {row.outcome: row.requests for row in found}
    known = [outcome.value for outcome in Outcome if outcome in counts]
    return {outcome: counts[outcome] for outcome in [*known, *sorted(set(counts) - set(known))]}


def _latency(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> Latency:
    reached = values[np.isfinite(values)]
    survived = len(reached) < len(values)
    p = np.arange(1, _ECDF_POINTS + 1) / _ECDF_POINTS
    ranks = np.unique(np.maximum(1, np.ceil(p * len(values)).astype(np.int64)))
    ranks = ranks[ranks <= len(reached)]
    in_order = np.sort(reached)
    return Latency(
        quantiles=_quantiles(values, blocks),
        survivors=_quantiles(reached, blocks[np.isfinite(values)]) if survived else None,
        ecdf_p=(ranks / max(1, len(values))).tolist(),
        ecdf_ns=in_order[ranks - 1].astype(np.int64).tolist(),
    )


def _quantiles(values: NDArray[np.float64], blocks: NDArray[np.int64]) -> Quantiles:
    p50, p95, p99 = quantiles(values, (P50, P95, P99), blocks)
    return Quantiles(len(values), int(np.count_nonzero(np.isfinite(values))), p50, p95, p99)


def _stage_times(
    group: int, horizon: Horizon, composed: Sequence[Composition], tables: Tables
) -> Iterator[StageTime]:
    requests = tables.sound[group, horizon]
    if not requests:
        return
    whole = next(c for c in composed if (c.horizon, c.region) == (horizon, Region.ALL))
    histogram = tables.by_stage[group, horizon]
    for stage, share in whole.shares.items():
        column = tables.stages.index(stage)
        yield StageTime(
            horizon=horizon,
            stage=stage,
            kind=tables.places.kind_of[stage],
            share=share,
            mean_ns=share.value * (whole.mean_ns or 0.0),
            p50=_stage_quantile(histogram, column, P50, requests),
            p95=_stage_quantile(histogram, column, P95, requests),
        )


def _stage_quantile(histogram: Histogram, column: int, q: Fraction, requests: int) -> Quantile:
    needed = requests_needed(q)
    if requests < needed:
        return Quantile(None, reason=f"not estimable: needs at least {needed:,} requests")
    return Quantile(histogram.quantile_ns(column, q, requests))


def _window_rows(group: int, members: NDArray[np.int64], tables: Tables) -> tuple[Window, ...]:
    """Describe every window of the class's phase; ``members`` are in the order of arrival."""
    people = tables.population
    edges = tables.windows[people.keys[group][1]]
    received = people.received_unix_ns[members]
    begins = (received - edges[0]).astype(np.float64)
    in_flight = mean_in_flight(
        begins, begins + people.ended_ns[members], (edges - edges[0]).astype(np.float64)
    )
    bounds = np.searchsorted(received, edges)
    sums = tables.by_window.get(group, np.zeros((len(edges) - 1, 1 + len(tables.stages))))
    return tuple(
        Window(
            begin_unix_ns=int(edges[place]),
            end_unix_ns=int(edges[place + 1]),
            arrived=int(bounds[place + 1] - bounds[place]),
            in_flight=float(in_flight[place]),
            ttft_p50_ns=_middle(people, Horizon.TTFT, members[bounds[place] : bounds[place + 1]]),
            completion_p50_ns=_middle(people, Horizon.COMPLETION, members[bounds[place] : bounds[place + 1]]),
            stage_ns={
                stage: float(sums[place, 1 + column] / sums[place, 0])
                for column, stage in enumerate(tables.stages)
                if sums[place, 1 + column]
            },
        )
        for place in range(len(edges) - 1)
    )


def _middle(people: Population, horizon: Horizon, members: NDArray[np.int64]) -> int | None:
    values = np.sort(np.where(people.good[members], people.horizon_ns[horizon][members], np.inf))
    middle = values[(len(values) - 1) // 2] if len(values) else np.inf
    return int(middle) if np.isfinite(middle) else None


def _unattributed(horizon: Horizon, requests: int, stages: Sequence[StageTime]) -> float | None:
    if not requests:
        return None
    shares = (t.share.value for t in stages if t.horizon is horizon and t.kind is Kind.UNATTRIBUTED)
    return sum(shares, 0.0)


def _media(found: Sequence[Any]) -> MediaFacts | None:
    if not found:
        return None
    (row,) = found
    return MediaFacts(row.items, row.mean_bytes, row.mean_pixels, row.processor_cache, row.encoder_cache)


def _notes(people: Population, members: NDArray[np.int64]) -> Iterator[str]:
    alike = likeness(people.latency_ns(Horizon.TTFT)[members], people.block[members])
    if alike is not None and alike > ALIKE:
        yield (
            f"neighbouring blocks of requests are alike (correlation {alike:.2f}): "
            "intervals are too narrow, and a longer trace or a shorter time range would help"
        )
