"""Where requests of each traffic class spend their time, and where they wait."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np

from stagetrace.errors import DataError
from stagetrace_analyzer.class_report import class_report
from stagetrace_analyzer.classes import OTHER
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.load import load_of
from stagetrace_analyzer.population import (
    Key,
    Population,
    read_pieces,
    read_places,
    read_population,
    rows,
    sql,
)
from stagetrace_analyzer.results import (
    Analysis,
    Check,
    Ingest,
    Load,
    OwnCost,
    WarmUp,
)
from stagetrace_analyzer.selection import Selection
from stagetrace_analyzer.tables import Tables, phases_of, windows_of
from stagetrace_analyzer.warm_up import mser5

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stagetrace_analyzer.classes import ClassRules

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


def _loads(population: Population) -> Iterator[Load]:
    for phase, members in phases_of(population):
        yield load_of(
            phase,
            population.received_unix_ns[members],
            population.intended_unix_ns[members],
            population.ended_ns[members],
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
