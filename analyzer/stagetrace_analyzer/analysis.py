"""Where requests of each traffic class spend their time, and where they wait.

Requests that failed, were cancelled or were lost count as infinitely slow in
the quantiles of a class, so that a server cannot look fast by failing.  Stages
and shares are over the requests that ended well (``ok``), because a horizon
that was never reached has no parts.

All times are int64 nanoseconds; all shares are between 0 and 1.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import duckdb

from stagetrace.errors import DataError
from stagetrace.stages import Horizon, Kind, Outcome, Reason, Stage
from stagetrace_analyzer.classes import OTHER
from stagetrace_analyzer.dataset import open_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from stagetrace_analyzer.classes import ClassRules

DOMINANT_SHARE: Final = 0.05
"""A wait is material from this share of the horizon on."""

DOMINANT_MEAN_NS: Final = 1_000_000
"""A wait is material from this mean time a request on."""

DOMINANT_REQUESTS: Final = 20
"""Fewer requests name no dominant wait."""

NOT_MATERIAL: Final = "nobody waits materially: the time is work"
"""Why no wait is dominant although there are enough requests."""

P50: Final = Fraction(50, 100)
P95: Final = Fraction(95, 100)
P99: Final = Fraction(99, 100)

_ERROR_RATE: Final = 0.05
_CLASS_QUERIES: Final = ("outcomes", "latencies", "stage_times", "wait_reasons", "media")

Key: TypeAlias = tuple[str, str | None]
"""Traffic class, and phase or None."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile in ns; without a value, ``reason`` says why there is none."""

    value_ns: int | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles over all requests of a class, failed ones at plus infinity.

    ``requests`` is their number; ``reached`` is how many have a finite value.
    """

    requests: int
    reached: int
    p50: Quantile
    p95: Quantile
    p99: Quantile


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time in one stage on one horizon, over the requests that ended well.

    ``share`` is the sum of the time in the stage over the sum of the horizon;
    the shares of a horizon add up to 1.  A request that was never in the stage
    counts as 0 in ``mean_ns``, ``p50`` and ``p95``.
    """

    horizon: Horizon
    stage: str
    kind: Kind
    share: float
    mean_ns: float
    p50: Quantile
    p95: Quantile


@dataclass(frozen=True, slots=True)
class DominantWait:
    """The wait with the largest share of a horizon, or the ``reason`` why none is named.

    ``reasons`` are the shares of the scheduler's reasons within the wait, the
    largest first; None if none is recorded.
    """

    horizon: Horizon
    stage: str | None = None
    share: float | None = None
    reasons: Mapping[str, float] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """Media items of a class: number, known mean sizes, items by each cache's answer."""

    items: int
    mean_bytes: float | None
    mean_pixels: float | None
    processor_cache: Mapping[str, int]
    encoder_cache: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClassReport:
    """One traffic class, in one phase or (``phase`` is None) in all of them.

    ``partitioned`` is, by horizon, the number of requests behind ``stages``:
    those that ended well and whose stages add up to the horizon exactly.
    ``unattributed`` is the share of each horizon that no record explains, None
    if there is no such request.  ``dominant_waits`` has one entry a horizon.
    """

    traffic_class: str
    phase: str | None
    requests: int
    outcomes: Mapping[str, int]
    ttft: Quantiles
    completion: Quantiles
    waiting: Quantiles
    partitioned: Mapping[Horizon, int]
    stages: tuple[StageTime, ...]
    dominant_waits: tuple[DominantWait, ...]
    unattributed: Mapping[Horizon, float | None]
    media: MediaFacts | None

    @property
    def dominant_wait(self) -> DominantWait:
        """The dominant wait before the first token."""
        return next(wait for wait in self.dominant_waits if wait.horizon is Horizon.TTFT)


@dataclass(frozen=True, slots=True)
class Check:
    """A thing counted by two witnesses, over all datasets; ``holds`` if they agree in each."""

    name: str
    expected: float
    found: float
    holds: bool


@dataclass(frozen=True, slots=True)
class OwnCost:
    """What recording has cost a process, by its own estimate: of each step, and of the steps' time."""

    process: str
    ns_per_step: int
    share: float


@dataclass(frozen=True, slots=True)
class Ingest:
    """What the datasets were made from.

    ``set_aside`` is by reason.  ``not_sampled`` requests were left out by
    sampling.  ``removed`` counts the ``segments`` and ``bytes`` that were
    removed to keep spools within their size.  ``stopped`` says which process
    did not record, why and when.  ``hooks_off`` counts, by hook point, the
    processes that did not know it and therefore recorded nothing there.
    ``checks`` are counts that must agree.
    """

    records: int
    requests: int
    set_aside: Mapping[str, int]
    dropped: int
    faults: int
    not_sampled: int
    removed: Mapping[str, int]
    stopped: Sequence[str]
    own_cost: tuple[OwnCost, ...]
    hooks_off: Mapping[str, int]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The classes of one or more datasets, and how good the data are.

    ``requests`` are analysed; ``warm_up`` are left out; ``unclassified`` of the
    analysed ones meet no rule.  ``joins`` counts requests by the processes
    whose records were found.  ``partition_mismatches`` counts, by horizon,
    requests whose stages do not add up to it.
    """

    by_phase: bool
    requests: int
    warm_up: int
    unclassified: int
    classes: tuple[ClassReport, ...]
    joins: Mapping[str, int]
    partition_mismatches: Mapping[Horizon, int]
    ingest: Ingest


def analyze(datasets: Sequence[Path], rules: ClassRules, by_phase: bool = False) -> Analysis:
    """Analyze datasets as one.

    Args:
        datasets: Folders of datasets.
        rules: Traffic classes.
        by_phase: Whether to keep the phases of an experiment apart.

    Raises:
        DataError: A dataset cannot be read.
        UsageError: No dataset is given.
    """
    with _data_errors(datasets), open_dataset(datasets) as connection:
        expression, parameters = rules.case_expression()
        classify = _sql("classify").replace("{traffic_class}", expression)
        connection.execute(classify, {**parameters, "by_phase": by_phase})
        for name in ("spend", "check_partitions"):
            connection.execute(_sql(name))
        return _analysis(connection, rules, by_phase)


def requests_needed(q: Fraction) -> int:
    """The fewest requests that bound the quantile ``q`` from above at 95 % confidence.

    The largest of n values is below the true quantile with probability q ** n
    (David and Nagaraja, Order Statistics, 3rd edition, section 7.1).
    """
    return math.ceil(math.log(_ERROR_RATE) / math.log(q))


def stage_order(stage: str) -> tuple[int, str]:
    """Sort key: as requests meet the stages; stages that the model does not know come last."""
    known = [known_stage.value for known_stage in Stage]
    return (known.index(stage) if stage in known else len(known)), stage


def _sql(name: str) -> str:
    return (importlib.resources.files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def _rows(connection: duckdb.DuckDBPyConnection, name: str) -> list[Any]:
    """Run a query; the rows have its columns as attributes."""
    cursor = connection.execute(_sql(name))
    columns = [column[0] for column in cursor.description or ()]
    return [SimpleNamespace(**dict(zip(columns, values, strict=True))) for values in cursor.fetchall()]


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


def _analysis(connection: duckdb.DuckDBPyConnection, rules: ClassRules, by_phase: bool) -> Analysis:
    classes = tuple(_class_reports(connection, rules))
    mismatches = {Horizon(row.horizon): row.requests for row in _rows(connection, "mismatches")}
    return Analysis(
        by_phase=by_phase,
        requests=sum(report.requests for report in classes),
        warm_up=_rows(connection, "left_out")[0].requests,
        unclassified=sum(report.requests for report in classes if report.traffic_class == OTHER),
        classes=classes,
        joins={row.joined: row.requests for row in _rows(connection, "joins")},
        partition_mismatches=dict.fromkeys(Horizon, 0) | mismatches,
        ingest=_ingest(_rows(connection, "ingested"), _rows(connection, "checked")),
    )


def _class_reports(connection: duckdb.DuckDBPyConnection, rules: ClassRules) -> Iterator[ClassReport]:
    answers = {name: _by_key(_rows(connection, name)) for name in _CLASS_QUERIES}
    for key in _ordered(answers["outcomes"], rules):
        yield _class_report(key, {name: by_key[key] for name, by_key in answers.items()})


def _by_key(rows: Sequence[Any]) -> dict[Key, list[Any]]:
    grouped: dict[Key, list[Any]] = defaultdict(list)
    for row in rows:
        grouped[row.traffic_class, row.phase].append(row)
    return grouped


def _ordered(outcomes: Mapping[Key, list[Any]], rules: ClassRules) -> list[Key]:
    """Phases in the order in which they began, and classes in the order of the rules."""
    begins: dict[str | None, int] = {}
    for (_, phase), rows in outcomes.items():
        first_ns = min(row.first_unix_ns for row in rows)
        begins[phase] = min(first_ns, begins.get(phase, first_ns))
    return sorted(outcomes, key=lambda key: (begins[key[1]], rules.names.index(key[0])))


def _class_report(key: Key, answers: Mapping[str, list[Any]]) -> ClassReport:
    """Build the report of a class from the rows that each of `_CLASS_QUERIES` has for it."""
    outcomes = _outcomes(answers["outcomes"])
    quantiles = {row.metric: _quantiles(row) for row in answers["latencies"]}
    stages = _stage_times(answers["stage_times"])
    partitioned = {Horizon(row.horizon): row.requests for row in answers["stage_times"]}
    partitioned = dict.fromkeys(Horizon, 0) | partitioned
    reasons = answers["wait_reasons"]
    return ClassReport(
        traffic_class=key[0],
        phase=key[1],
        requests=sum(outcomes.values()),
        outcomes=outcomes,
        ttft=quantiles["ttft"],
        completion=quantiles["completion"],
        waiting=quantiles["waiting"],
        partitioned=partitioned,
        stages=stages,
        dominant_waits=tuple(_dominant_wait(h, partitioned[h], stages, reasons) for h in Horizon),
        unattributed={h: _unattributed(h, partitioned[h], stages) for h in Horizon},
        media=_media(answers["media"]),
    )


def _outcomes(rows: Sequence[Any]) -> dict[str, int]:
    """Requests by outcome, the good ones first."""
    counts = {row.outcome: row.requests for row in rows}
    known = [outcome.value for outcome in Outcome if outcome in counts]
    return {outcome: counts[outcome] for outcome in [*known, *sorted(set(counts) - set(known))]}


def _quantiles(row: Any) -> Quantiles:
    counts = (row.requests, row.reached)
    return Quantiles(
        *counts,
        p50=_quantile(P50, row.p50_ns, *counts),
        p95=_quantile(P95, row.p95_ns, *counts),
        p99=_quantile(P99, row.p99_ns, *counts),
    )


def _quantile(q: Fraction, value_ns: int | None, requests: int, reached: int) -> Quantile:
    if requests < requests_needed(q):
        return Quantile(None, f"not estimable: needs at least {requests_needed(q)} requests")
    if value_ns is None:
        return Quantile(None, f"not reached ({100 * (requests - reached) / requests:.1f} % failed)")
    return Quantile(value_ns)


def _stage_times(rows: Sequence[Any]) -> tuple[StageTime, ...]:
    """Times by horizon, to the first token first, and then as requests meet the stages."""
    in_order = sorted(map(_stage_time, rows), key=lambda time: stage_order(time.stage))
    return tuple(time for horizon in Horizon for time in in_order if time.horizon is horizon)


def _stage_time(row: Any) -> StageTime:
    return StageTime(
        horizon=Horizon(row.horizon),
        stage=row.stage,
        kind=Kind(row.kind),
        share=row.spent_ns / row.horizon_ns if row.horizon_ns else 0.0,
        mean_ns=row.spent_ns / row.requests,
        p50=_quantile(P50, row.p50_ns, row.requests, row.requests),
        p95=_quantile(P95, row.p95_ns, row.requests, row.requests),
    )


def _dominant_wait(
    horizon: Horizon, requests: int, stages: Sequence[StageTime], reasons: Sequence[Any]
) -> DominantWait:
    if requests < DOMINANT_REQUESTS:
        needs = f"not estimable: needs at least {DOMINANT_REQUESTS} {Outcome.OK} requests"
        return DominantWait(horizon, reason=needs)
    waits = [time for time in stages if time.horizon is horizon and time.kind is Kind.WAIT]
    largest = max(waits, key=lambda time: time.share, default=None)
    if largest is None or largest.share < DOMINANT_SHARE or largest.mean_ns < DOMINANT_MEAN_NS:
        return DominantWait(horizon, reason=NOT_MATERIAL)
    within = [row for row in reasons if row.horizon == horizon and row.stage == largest.stage]
    return DominantWait(horizon, largest.stage, largest.share, _reason_shares(within))


def _reason_shares(rows: Sequence[Any]) -> dict[str, float] | None:
    """Shares of the reasons; time without one is unknown, unless no reason at all was recorded."""
    if all(row.reason is None for row in rows):
        return None
    spent_ns: dict[str, int] = defaultdict(int)
    for row in rows:
        spent_ns[row.reason or Reason.UNKNOWN.value] += row.spent_ns
    total_ns = sum(spent_ns.values())
    return {reason: ns / total_ns for reason, ns in sorted(spent_ns.items(), key=lambda item: -item[1])}


def _unattributed(horizon: Horizon, requests: int, stages: Sequence[StageTime]) -> float | None:
    if not requests:
        return None
    shares = (t.share for t in stages if t.horizon is horizon and t.kind is Kind.UNATTRIBUTED)
    return math.fsum(shares)


def _media(rows: Sequence[Any]) -> MediaFacts | None:
    if not rows:
        return None
    (row,) = rows
    return MediaFacts(row.items, row.mean_bytes, row.mean_pixels, row.processor_cache, row.encoder_cache)


def _ingest(rows: Sequence[Any], checks: Sequence[Any]) -> Ingest:
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        counts[row.name][row.reason] = row.count
    totals = {name: sum(by_reason.values()) for name, by_reason in counts.items()}
    return Ingest(
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
