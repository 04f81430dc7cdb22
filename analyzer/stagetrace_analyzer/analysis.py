"""Where requests of each traffic class spend their time, and where they wait.

Requests that failed, were cancelled or were lost count as infinitely slow in
the quantiles of a class, so that a server cannot look fast by failing.  Stages
and shares are over the requests that ended well (``ok``), because a horizon
that was never reached has no parts.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np

from stagetrace.errors import DataError
from stagetrace.stages import Horizon, Kind, Outcome
from stagetrace_analyzer.buckets import Histogram
from stagetrace_analyzer.classes import OTHER
from stagetrace_analyzer.composition import compositions, plain_answers, stage_order
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.intervals import (
    ALIKE,
    P50,
    P95,
    P99,
    likeness,
    quantiles,
    requests_needed,
)
from stagetrace_analyzer.load import load_of, mean_in_flight
from stagetrace_analyzer.population import (
    Key,
    Population,
    read_pieces,
    read_places,
    read_population,
    rows,
    sql,
)
from stagetrace_analyzer.remedies import remedies_for
from stagetrace_analyzer.resampling import BlockTable
from stagetrace_analyzer.results import (
    Analysis,
    Answer,
    Check,
    ClassReport,
    Ingest,
    Latency,
    Load,
    MediaFacts,
    OwnCost,
    PlainAnswer,
    Quantile,
    Quantiles,
    Region,
    StageTime,
    WarmUp,
    Window,
)
from stagetrace_analyzer.selection import Selection
from stagetrace_analyzer.warm_up import mser5

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stagetrace_analyzer.classes import ClassRules
    from stagetrace_analyzer.population import Piece, Places
    from stagetrace_analyzer.results import Composition

WINDOWS: Final = 48
"""Stretches of time into which a phase is cut to show how it went."""

_ECDF_POINTS: Final = 200
_ALL: Final = Selection()


def analyze(
    datasets: Sequence[Path],
    rules: ClassRules,
    *,
    by_phase: bool = False,
    selection: Selection = _ALL,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Analyze datasets as one.

    Args:
        datasets: Folders of datasets.
        rules: Traffic classes.
        by_phase: Whether to keep the phases of an experiment apart.
        selection: Which requests.
        progress: Called with how many requests' intervals were read, of how many.

    Raises:
        DataError: A dataset cannot be read.
        UsageError: No dataset is given, or the selection names a class that no rule has.
    """
    selection.check(rules)
    with _data_errors(datasets), open_dataset(datasets) as connection:
        return _analysis(connection, rules, by_phase, selection, progress or (lambda _done, _total: None))


@contextlib.contextmanager
def _data_errors(datasets: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        names = ", ".join(str(path) for path in datasets)
        first_line = str(error).partition("\n")[0]
        raise DataError(
            f"cannot read {names}: {first_line}", hint="make the dataset again from the spool"
        ) from error


def _analysis(
    connection: duckdb.DuckDBPyConnection,
    rules: ClassRules,
    by_phase: bool,
    selection: Selection,
    progress: Callable[[int, int], None],
) -> Analysis:
    span = rows(connection, "span")[0]
    _classify(connection, rules, by_phase, selection, span.newest_unix_ns)
    selected = _count(connection)
    unknown = _unknown_facts(connection, rules)
    warm_ups = tuple(_leave_out_warm_up(connection))
    population = read_population(connection, _keys(connection, rules))
    answers = {name: _by_key(rows(connection, name)) for name in ("outcomes", "media")}
    tables = _Tables(
        population,
        read_places(connection),
        _windows(population),
        with_media=frozenset(phase for _, phase in answers["media"]),
    )
    for piece in read_pieces(connection, population, tables.places):
        tables.add(piece)
        progress(piece.rows.stop, len(population))
    post = frozenset(rules.post_names)
    classes = tuple(
        _class_report(group, key, post, tables, {name: by_key[key] for name, by_key in answers.items()})
        for group, key in enumerate(population.keys)
    )
    return Analysis(
        by_phase=by_phase,
        selection=selection.described(),
        requests=len(population),
        not_selected=span.requests - selected,
        warm_ups=warm_ups,
        unclassified=sum(report.requests for report in classes if report.traffic_class == OTHER),
        unknown_facts=unknown,
        loads=tuple(_loads(population)),
        classes=classes,
        joins={row.joined: row.requests for row in rows(connection, "joins")},
        partition_mismatches=tables.mismatches,
        ingest=_ingest(rows(connection, "ingested"), rows(connection, "checked")),
    )


def _classify(
    connection: duckdb.DuckDBPyConnection,
    rules: ClassRules,
    by_phase: bool,
    selection: Selection,
    newest_unix_ns: int | None,
) -> None:
    classed, class_parameters = rules.case_expression()
    selected, parameters = selection.sql(newest_unix_ns)
    query = sql("classify").replace("{traffic_class}", classed).replace("{selected}", selected)
    others = {"by_phase": by_phase, "classes": list(selection.classes) or None}
    connection.execute(query, {**class_parameters, **parameters, **others})


def _count(connection: duckdb.DuckDBPyConnection) -> int:
    ((requests,),) = connection.execute("SELECT count(*) FROM classified").fetchall()
    return int(requests)


def _leave_out_warm_up(connection: duckdb.DuckDBPyConnection) -> Iterator[WarmUp]:
    """Take warm-up out of the table ``classified``: the phase of that name, and the begin of phases."""
    before = _count(connection)
    connection.execute(sql("leave_out_warm_up"))
    if left_out := before - _count(connection):
        yield WarmUp("warm-up", left_out, left_out, "sent to warm up", settled=True)
    for run in rows(connection, "runs"):
        truncation = mser5(np.array(run.relative or [], np.float64))
        if not truncation.observations:
            continue
        before = _count(connection)
        until = run.received_unix_ns[truncation.observations]
        begin = {"dataset": run.dataset, "run": run.run, "until_unix_ns": until}
        connection.execute(sql("leave_out_begin"), begin)
        yield WarmUp(run.run, before - _count(connection), run.requests, "MSER-5", truncation.settled)


def _keys(connection: duckdb.DuckDBPyConnection, rules: ClassRules) -> list[Key]:
    """Phases in the order in which they began, and classes in the order of the rules."""
    found = rows(connection, "groups")
    begins: dict[str | None, int] = {}
    for row in found:
        begins[row.phase] = min(row.first_unix_ns, begins.get(row.phase, row.first_unix_ns))
    keys = [(row.traffic_class, row.phase) for row in found]
    return sorted(keys, key=lambda key: (begins[key[1]], rules.names.index(key[0])))


def _by_key(found: Sequence[Any]) -> dict[Key, list[Any]]:
    grouped: dict[Key, list[Any]] = defaultdict(list)
    for row in found:
        grouped[row.traffic_class, row.phase].append(row)
    return grouped


def _unknown_facts(connection: duckdb.DuckDBPyConnection, rules: ClassRules) -> dict[str, int]:
    """Count, by field that the rules ask for, the selected requests of which it is not known."""
    counts = rules.unknown_expressions()
    if not counts:
        return {}
    # Names of fields are the rules' own, never a user's text.
    query = f"SELECT {', '.join(counts.values())} FROM facts SEMI JOIN classified USING (dataset, request)"  # noqa: S608
    (found,) = connection.execute(query).fetchall()
    return {name: count for name, count in zip(counts, found, strict=True) if count}


@dataclass(slots=True)
class _Tables:
    """What is kept of the intervals of all requests: tables by group, and figures by request."""

    population: Population
    places: Places
    windows: dict[str | None, NDArray[np.int64]]
    by_block: dict[tuple[int, Horizon], BlockTable] = field(default_factory=dict)
    by_stage: dict[tuple[int, Horizon], Histogram] = field(default_factory=dict)
    by_window: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    sound: Counter[tuple[int, Horizon]] = field(default_factory=Counter)
    mismatches: dict[Horizon, int] = field(default_factory=lambda: dict.fromkeys(Horizon, 0))
    with_media: frozenset[str | None] = frozenset()
    waiting_ns: NDArray[np.float64] = field(init=False)
    """Time waited before the first token by request: plus infinity if it failed, NaN if it is not known."""
    stages: tuple[str, ...] = field(init=False)
    _to_stages: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting_ns = np.full(len(self.population), np.inf)
        self.stages = tuple(sorted(set(self.places.stages), key=stage_order))
        names = np.array(self.places.stages, dtype=object)
        self._to_stages = np.array([names == stage for stage in self.stages], np.float64).T

    def add(self, piece: Piece) -> None:
        """Take in the times of some requests."""
        for horizon, spent_ns in piece.spent_ns.items():
            self._add(horizon, piece.rows, spent_ns)

    def _add(self, horizon: Horizon, span: slice, spent_ns: NDArray[np.float64]) -> None:
        people = self.population
        horizon_ns = people.horizon_ns[horizon][span]
        adds_up = (spent_ns.sum(axis=1) == horizon_ns) & (spent_ns.min(axis=1, initial=0.0) >= 0)
        self.mismatches[horizon] += int(np.count_nonzero(np.isfinite(horizon_ns) & ~adds_up))
        sound = adds_up & people.good[span]
        if horizon is Horizon.TTFT:
            waited = np.where(adds_up, spent_ns[:, self.places.of_kind(Kind.WAIT)].sum(axis=1), np.nan)
            reached = np.isfinite(people.latency_ns(horizon)[span])
            self.waiting_ns[span] = np.where(reached, waited, np.inf)
        by_stage = spent_ns @ self._to_stages
        group, block = people.group[span], people.block[span]
        for number in np.unique(group[sound]).tolist():
            of = np.flatnonzero(sound & (group == number))
            self.sound[number, horizon] += len(of)
            table = self.by_block.setdefault((number, horizon), BlockTable(len(self.places.stages)))
            table.add(block[of], horizon_ns[of], spent_ns[of])
            self.by_stage.setdefault((number, horizon), Histogram()).add(by_stage[of])
            if horizon is Horizon.COMPLETION:
                self._add_windows(number, people.received_unix_ns[span][of], by_stage[of])

    def _add_windows(
        self, group: int, received_unix_ns: NDArray[np.int64], by_stage: NDArray[np.float64]
    ) -> None:
        edges = self.windows[self.population.keys[group][1]]
        window = np.clip(np.searchsorted(edges, received_unix_ns, side="right") - 1, 0, len(edges) - 2)
        sums = self.by_window.setdefault(group, np.zeros((len(edges) - 1, 1 + len(self.stages))))
        np.add.at(sums, window, np.column_stack([np.ones(len(window)), by_stage]))


def _windows(population: Population) -> dict[str | None, NDArray[np.int64]]:
    """Edges of the windows of every phase, ns since the epoch."""
    found: dict[str | None, NDArray[np.int64]] = {}
    for phase, members in _phases(population):
        received = population.received_unix_ns[members]
        first, width = received.min(), -(-(received.max() + 1 - received.min()) // WINDOWS)
        found[phase] = first + width * np.arange(WINDOWS + 1)
    return found


def _phases(population: Population) -> Iterator[tuple[str | None, NDArray[np.bool_]]]:
    """Every phase, and which requests are in it."""
    for phase in dict.fromkeys(phase for _, phase in population.keys):
        groups = [group for group, key in enumerate(population.keys) if key[1] == phase]
        yield phase, np.isin(population.group, groups)


def _loads(population: Population) -> Iterator[Load]:
    for phase, members in _phases(population):
        yield load_of(
            phase,
            population.received_unix_ns[members],
            population.intended_unix_ns[members],
            population.ended_ns[members],
        )


def _class_report(
    group: int, key: Key, post: frozenset[str], tables: _Tables, answers: Mapping[str, list[Any]]
) -> ClassReport:
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
    group: int, horizon: Horizon, composed: Sequence[Composition], tables: _Tables
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


def _window_rows(group: int, members: NDArray[np.int64], tables: _Tables) -> tuple[Window, ...]:
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


def _ingest(found: Sequence[Any], checks: Sequence[Any]) -> Ingest:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for row in found:
        counts[row.name][row.reason] = row.count
    totals = {name: sum(by_reason.values()) for name, by_reason in counts.items()}
    return Ingest(
        about=sorted(counts["about"]),
        records=totals.get("records", 0),
        requests=totals.get("requests", 0),
        set_aside=counts["set_aside"],
        dropped=totals.get("dropped", 0),
        faults=totals.get("faults", 0),
        not_sampled=totals.get("not_sampled", 0),
        removed={unit: counts["removed"].get(unit, 0) for unit in ("segments", "bytes")},
        stopped=sorted(counts["stopped"]),
        own_cost=tuple(
            OwnCost(process, per_step, counts["cost_per_million"].get(process, 0) / 1e6)
            for process, per_step in sorted(counts["cost_ns_per_step"].items())
        ),
        hooks_off=counts["hook_off"],
        checks=tuple(Check(row.name, row.expected, row.found, row.holds) for row in checks),
    )
