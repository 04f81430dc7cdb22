"""Where requests of each traffic class spend their time, and where they wait."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np

from stagetrace.errors import DataError
from stagetrace_analyzer.class_report import class_report
from stagetrace_analyzer.classes import OTHER
from stagetrace_analyzer.dataset import data_errors, open_dataset
from stagetrace_analyzer.load import Arrivals, load_of
from stagetrace_analyzer.population import Key, Population, read_pieces, read_places, read_population
from stagetrace_analyzer.queries.quality import Checked, checks, ingested
from stagetrace_analyzer.results import (
    Analysis,
    Check,
    Ingest,
    Load,
    OwnCost,
    WarmUp,
)
from stagetrace_analyzer.selection import Selection
from stagetrace_analyzer.statements import rows, sql
from stagetrace_analyzer.tables import Tables, phases_of, windows_of
from stagetrace_analyzer.warm_up import mser5, trend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stagetrace_analyzer.classes import ClassRules

MOST_CLASSES: Final = 300
"""Classes, by phase where phases are told apart; each takes one to three megabytes."""

NO_COUNT: Final = 1e18
"""A check of so much has counted nothing; see ``unusable.sql``."""

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
        DataError: A dataset cannot be read, or is none, or has more than `MOST_CLASSES` classes.
        UsageError: No dataset is given, or the selection names a class that no rule has.
    """
    selection.check(rules)
    with data_errors(datasets), open_dataset(datasets) as connection:
        return _analysis(connection, rules, by_phase, selection, progress or (lambda _done, _total: None))


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
    warm_ups = tuple(_leave_out_warm_up(connection))
    population = read_population(connection, _keys(connection, rules))
    answers = {name: _by_key(rows(connection, name)) for name in ("outcomes", "media")}
    tables = Tables(
        population,
        read_places(connection),
        windows_of(population),
        with_media=frozenset(phase for _, phase in answers["media"]),
    )
    for piece in read_pieces(connection, population, tables.places):
        tables.add(piece)
        progress(piece.rows.stop, len(population))
    post = frozenset(rules.post_names)
    classes = tuple(
        class_report(group, key, post, tables, {name: by_key[key] for name, by_key in answers.items()})
        for group, key in enumerate(population.keys)
    )
    return Analysis(
        by_phase=by_phase,
        selection=selection.described(),
        requests=len(population),
        not_selected=span.requests - selected,
        warm_ups=warm_ups,
        unclassified=sum(report.requests for report in classes if report.traffic_class == OTHER),
        unknown_facts=_unknown_facts(connection, rules),
        loads=tuple(_loads(population)),
        classes=classes,
        joins={row.joined: row.requests for row in rows(connection, "joins")},
        partition_mismatches=tables.mismatches,
        ingest=_ingest(connection),
        unusable=_unusable(connection, tables.intervals),
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
        relative = np.array(run.relative or [], np.float64)
        truncation = mser5(relative)
        drift = trend(relative[truncation.observations :])
        if not truncation.observations and not drift:
            continue
        before = _count(connection)
        if truncation.observations:
            until = run.received_unix_ns[truncation.observations]
            begin = {"dataset": run.dataset, "run": run.run, "until_unix_ns": until}
            connection.execute(sql("leave_out_begin"), begin)
        settled = truncation.settled and not drift
        yield WarmUp(run.run, before - _count(connection), run.requests, "MSER-5", settled, drift)


def _keys(connection: duckdb.DuckDBPyConnection, rules: ClassRules) -> list[Key]:
    """Phases in the order in which they began, and classes in the order of the rules."""
    found = rows(connection, "groups")
    begins: dict[str | None, int] = {}
    for row in found:
        begins[row.phase] = min(row.first_unix_ns, begins.get(row.phase, row.first_unix_ns))
    keys = [(row.traffic_class, row.phase) for row in found]
    if len(keys) > MOST_CLASSES:
        by_phase = " by phase" if len(begins) > 1 else ""
        raise DataError(
            f"{len(keys):,} classes{by_phase} are too many; at most {MOST_CLASSES} are told apart",
            hint="leave --by-phase out, or choose some with --class or --where",
        )
    return sorted(keys, key=lambda key: (begins[key[1]], rules.names.index(key[0])))


def _by_key(found: Sequence[Any]) -> dict[Key, list[Any]]:
    grouped: dict[Key, list[Any]] = defaultdict(list)
    for row in found:
        grouped[row.traffic_class, row.phase].append(row)
    return grouped


def _unknown_facts(connection: duckdb.DuckDBPyConnection, rules: ClassRules) -> dict[str, int]:
    """Count, by field that the rules ask for, the analysed requests of which it is not known."""
    counts = rules.unknown_expressions()
    if not counts:
        return {}
    # Names of fields are the rules' own, never a user's text.
    query = f"SELECT {', '.join(counts.values())} FROM facts SEMI JOIN classified USING (dataset, request)"  # noqa: S608
    (found,) = connection.execute(query).fetchall()
    return {name: count for name, count in zip(counts, found, strict=True) if count}


def _unusable(connection: duckdb.DuckDBPyConnection, intervals: int) -> dict[str, int]:
    """Count rows that no figure is of, by what is wrong with them.

    Args:
        connection: An open dataset.
        intervals: How many were found for the analysed requests; where there are no others, none is lost.
    """
    found = {row.reason: row.number for row in rows(connection, "unusable")}
    lost = 0
    if rows(connection, "stage_rows")[0].number > intervals:
        lost = rows(connection, "orphans")[0].number
    return found | ({"intervals of a request that is not there": lost} if lost else {})


def _loads(population: Population) -> Iterator[Load]:
    for phase, members in phases_of(population):
        arrivals = Arrivals(
            population.received_unix_ns[members],
            population.intended_unix_ns[members],
            population.ended_ns[members],
            population.run[members],
        )
        yield load_of(phase, arrivals)


def _ingest(connection: duckdb.DuckDBPyConnection) -> Ingest:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in sorted(ingested(connection), key=lambda row: (row.name, row.reason)):
        counts[row.name][row.reason] += max(0, row.number)
    return Ingest(
        about=sorted(counts["about"]),
        records=counts["records"].total(),
        requests=counts["requests"].total(),
        set_aside=dict(counts["set_aside"]),
        dropped=counts["dropped"].total(),
        faults=counts["faults"].total(),
        not_sampled=counts["not_sampled"].total(),
        removed={unit: counts["removed"][unit] for unit in ("segments", "bytes")},
        stopped=sorted(counts["stopped"]),
        own_cost=tuple(
            OwnCost(process, per_step, counts["cost_per_million"][process] / 1e6)
            for process, per_step in sorted(counts["cost_ns_per_step"].items())
        ),
        hooks_off=dict(counts["hook_off"]),
        checks=tuple(_checks(connection)),
    )


def _checks(connection: duckdb.DuckDBPyConnection) -> Iterator[Check]:
    """Add up what is counted by two witnesses, over all datasets; what is no count is left out."""
    by_name: dict[str, list[Checked]] = defaultdict(list)
    for row in checks(connection):
        if abs(row.expected) < NO_COUNT and abs(row.found) < NO_COUNT:
            by_name[row.name].append(row)
    for name, found in sorted(by_name.items()):
        sums = (math.fsum(row.expected for row in found), math.fsum(row.found for row in found))
        yield Check(name, *sums, holds=all(row.holds for row in found))
