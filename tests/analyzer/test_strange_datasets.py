"""Datasets that others wrote, with the right columns and strange values in them."""

from __future__ import annotations

import contextlib
import importlib.resources
import io
import itertools
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagetrace.errors import DataError, StagetraceError
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.commands import analyze as command
from stagetrace_analyzer.contents import read_contents
from stagetrace_analyzer.dataset import TABLES, open_dataset
from stagetrace_analyzer.queries import quality, requests, steps
from stagetrace_analyzer.reports.document import document_of
from stagetrace_analyzer.reports.html import render_html
from stagetrace_analyzer.reports.json_report import render_json
from stagetrace_analyzer.reports.markdown import render_markdown
from stagetrace_analyzer.reports.text import write_text
from stagetrace_analyzer.results import Analysis

MS = 1_000_000
BEGIN = 10**18
REQUESTS = 24
SCHEMA = json.loads(
    (importlib.resources.files("stagetrace_analyzer") / "schemas" / "analyze.schema.json").read_text()
)


def sound() -> dict[str, list[dict[str, Any]]]:
    """Rows of every table, with which nothing is wrong."""
    return {name: SOUND.get(name, lambda name=name: _filled(name))() for name in TABLES}


def _filled(name: str) -> list[dict[str, Any]]:
    return [{field.name: _some(field.type) for field in TABLES[name]} for _ in range(2)]


def _some(kind: pa.DataType) -> Any:
    if pa.types.is_integer(kind):
        return 1
    if pa.types.is_floating(kind):
        return 1.0
    return True if pa.types.is_boolean(kind) else "a"


def _requests() -> list[dict[str, Any]]:
    return [
        {
            "request": number,
            "request_id": f"request-{number}",
            "instance": "server",
            "phase": ["a", "b"][number % 2],
            "received_unix_ns": BEGIN + number * 100 * MS,
            "intended_unix_ns": BEGIN + number * 100 * MS,
            "ttft_ns": 30 * MS,
            "completion_ns": 90 * MS,
            "ended_ns": 90 * MS,
            "outcome": "ok",
            "media_items": number % 3,
            "max_tokens": 16,
            "joined": "api+engine+worker",
        }
        for number in range(REQUESTS)
    ]


def _stages() -> list[dict[str, Any]]:
    parts = (("both", "prefill.wait", "wait", 30), ("completion", "decode", "work", 60))
    return [
        {
            "request": number,
            "horizon": horizon,
            "stage": stage,
            "kind": kind,
            "reason": "step" if kind == "wait" else None,
            "occurrence": 1,
            "begin_ns": 0,
            "duration_ns": ms * MS,
            "recompute": False,
            "role": "engine",
        }
        for number, (horizon, stage, kind, ms) in itertools.product(range(REQUESTS), parts)
    ]


SOUND = {
    "requests": _requests,
    "stages": _stages,
    "media": lambda: [{"request": n, "item": 0, "bytes": 10, "width": 2, "height": 2} for n in range(1, 3)],
    "checks": lambda: [{"name": "in = out", "expected": 8.0, "found": 8.0, "tolerance": 0.0, "holds": True}],
    "ingest": lambda: [
        {"name": name, "reason": reason, "count": 5}
        for name, reason in (("records", ""), ("set_aside", "torn record"), ("cost_per_million", "engine 1"))
    ],
}


def write(folder: Path, rows: dict[str, list[dict[str, Any]]]) -> Path:
    """Write what somebody else may write: nulls may be anywhere."""
    for name, schema in TABLES.items():
        loose = pa.schema([field.with_nullable(nullable=True) for field in schema], metadata=schema.metadata)
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows[name], loose), folder / name / "part.parquet")
    return folder


def text_of(analysis) -> str:
    file = io.StringIO()
    write_text(analysis, file)
    return file.getvalue()


# --- anything ----------------------------------------------------------------------------------------

NUMBERS = [0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1, 10**9, 4 * 10**18, 5 * 10**18, REQUESTS]
TEXTS = [
    "",
    " ",
    "\x00",
    "\x1b[31m\n",
    "a" * 3000,
    "\u202e\u0301",
    "ok",
    "both",
    "OK",
    "no such name",
    "a|b`<c>",
]
REALS = [math.nan, math.inf, -math.inf, 1.7e308, -1.0, 0.0, 1e18]


def strange(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """A value of a column that no stagetrace would write, or would hardly."""
    if pa.types.is_integer(kind):
        values = NUMBERS
    elif pa.types.is_floating(kind):
        values = REALS
    else:
        values = [True, False] if pa.types.is_boolean(kind) else TEXTS
    return st.sampled_from([None, *values])


@st.composite
def changes(draw):
    """Something done to a table: a value in one row or in all, a row again, without a row, or without any."""
    name = draw(st.sampled_from([*TABLES, "requests", "stages", "requests", "stages"]))
    what = draw(st.sampled_from(["value", "value", "value", "column", "again", "without", "empty"]))
    field = draw(st.sampled_from(list(TABLES[name])))
    return what, name, field.name, draw(strange(field.type)), draw(st.integers(0, 1000))


def change(rows: dict[str, list[dict[str, Any]]], done: tuple[str, str, str, Any, int]) -> None:
    what, name, column, value, row = done
    table = rows[name]
    if what == "empty":
        table.clear()
    elif not table:
        return
    elif what == "value":
        table[row % len(table)][column] = value
    elif what == "column":
        for found in table:
            found[column] = value
    elif what == "again":
        table.append(dict(table[row % len(table)]))
    else:
        del table[row % len(table)]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(done=st.lists(changes(), min_size=1, max_size=6), by_phase=st.booleans())
@example(done=[("column", "requests", "received_unix_ns", 0, 0)], by_phase=False)
@example(done=[("value", "requests", "received_unix_ns", 4 * 10**18, 0)], by_phase=False)
@example(done=[("value", "checks", "found", math.nan, 0)], by_phase=False)
@example(done=[("value", "ingest", "count", -1, 0)], by_phase=True)
@example(done=[("column", "ingest", "count", 2**63 - 1, 0)], by_phase=True)
@example(done=[("column", "requests", "phase", "a" * 3000, 0)], by_phase=True)
@example(done=[("column", "requests", "outcome", "", 0), ("column", "stages", "stage", "", 0)], by_phase=True)
def test_any_dataset_is_a_report_or_one_line(done, by_phase) -> None:
    """Every request is in a figure or counted with a reason; all formats say so and their schema holds."""
    rows = sound()
    for one in done:
        change(rows, one)
    with TemporaryDirectory() as scratch:
        folder = write(Path(scratch) / "data", rows)
        analysis, refused = _analyzed(folder, by_phase)
        if analysis is None:
            assert refused.hint
            assert str(refused).isprintable()
            return
        unusable = sum(count for reason, count in analysis.unusable.items() if reason.startswith("requests "))
        assert len(rows["requests"]) == analysis.requests + analysis.warm_up + unusable
        if not analysis.requests:
            assert str(read_contents([folder], load_rules()))
            return
        document = json.loads(render_json(analysis))
        jsonschema.validate(document, SCHEMA)
        for text in (text_of(analysis), render_markdown(analysis)):
            assert all(line.isprintable() for line in text.split("\n"))
        assert "</html>" in render_html(analysis)
        _ask_everything(folder)


def _analyzed(folder: Path, by_phase: bool) -> tuple[Analysis | None, StagetraceError | None]:
    try:
        return analyze([folder], load_rules(), by_phase=by_phase), None
    except StagetraceError as error:
        return None, error


def _ask_everything(folder: Path) -> None:
    """Ask what the dashboard asks; what it may refuse is only what no number holds."""
    with open_dataset([folder]) as connection:
        requests.list_requests(connection, load_rules())
        requests.span(connection)
        requests.choices(connection)
        for column in requests.SORTABLE:
            order = requests.request_order(connection, requests.RequestFilter(), sort=column)
        quality.ingested(connection)
        quality.checks(connection)
        found = requests.listed_rows(connection, order[:3].tolist())
        for one in found:
            for ask in (requests.request_facts, requests.request_stages, requests.request_media):
                ask(connection, one.dataset, one.request)
        engines = steps.engines(connection)
        for one in found:
            for refusing in (requests.request_steps, requests.step_mates):
                with contextlib.suppress(duckdb.OutOfRangeException, duckdb.ConversionException):
                    refusing(connection, one.dataset, one.request, 5)
        for one in engines:
            for refusing in (steps.step_buckets, steps.longest_steps):
                with contextlib.suppress(duckdb.OutOfRangeException, duckdb.ConversionException):
                    refusing(connection, one, one.first_unix_ns, one.last_unix_ns, 10)
        for refusing in (quality.processes, quality.clocks):
            with contextlib.suppress(duckdb.OutOfRangeException, duckdb.ConversionException):
                refusing(connection)


# --- each by its name --------------------------------------------------------------------------------


def test_a_sound_dataset_has_nothing_to_tell(tmp_path: Path) -> None:
    """The rows that the tests here change are a dataset without a fault."""
    analysis = analyze([write(tmp_path / "data", sound())], load_rules())
    assert (analysis.requests, analysis.unusable) == (REQUESTS, {})
    assert not any(label == "unusable" for label, _ in document_of(analysis).quality)


@pytest.mark.parametrize(
    ("table", "column", "value", "reason"),
    [
        ("requests", "received_unix_ns", 0, "requests received before 1970 or after 2099"),
        ("requests", "received_unix_ns", -5, "requests received before 1970 or after 2099"),
        ("requests", "received_unix_ns", 5 * 10**18, "requests received before 1970 or after 2099"),
        ("requests", "ttft_ns", -1, "requests that ended before they began"),
        ("requests", "ended_ns", 2**63 - 1, "requests that took over 104 days"),
        ("stages", "horizon", "TTFT", "intervals on an unknown horizon"),
        ("stages", "request", 999, "intervals of a request that is not there"),
        ("media", "request", -1, "media items of a request that is not there"),
        ("media", "bytes", -1, "media items of a negative size"),
        ("checks", "found", math.nan, "checks without a count"),
        ("checks", "expected", -math.inf, "checks without a count"),
        ("ingest", "count", -1, "counts of ingest below 0"),
    ],
)
def test_what_cannot_be_used_is_counted(tmp_path: Path, table, column, value, reason) -> None:
    """By what is wrong with it; the report raises the alarm, and the rest is analyzed."""
    rows = sound()
    rows[table][1 % len(rows[table])][column] = value
    analysis = analyze([write(tmp_path / "data", rows)], load_rules())
    media = sum(report.media.items for report in analysis.classes if report.media is not None)
    assert media == len(rows["media"]) - (
        table == "media" or column in {"received_unix_ns", "ttft_ns", "ended_ns"}
    )
    assert analysis.unusable == {reason: 1}
    assert analysis.requests == REQUESTS - (table == "requests")
    document = document_of(analysis)
    assert ("unusable", f"1 {reason}") in document.quality
    assert any(
        a.startswith("CHECK THE DATA: ") and "1 rows of the data cannot be used" in a for a in document.alarms
    )


@pytest.mark.parametrize(
    ("table", "column"), [("requests", "request"), ("stages", "duration_ns"), ("checks", "name")]
)
@pytest.mark.parametrize("statistics", [True, False])
def test_what_every_row_must_have(tmp_path: Path, table, column, statistics) -> None:
    """A null there is one line that names the file; it is found without the file's statistics, too."""
    rows = sound()
    rows[table][0][column] = None
    folder = write(tmp_path / "data", rows)
    path = folder / table / "part.parquet"
    pq.write_table(pq.read_table(path), path, write_statistics=statistics)
    with pytest.raises(DataError, match=rf"part\.parquet has no {column} in 1 of \d+ rows") as caught:
        analyze([folder], load_rules())
    assert caught.value.hint


@pytest.mark.parametrize("name", ["dataset", "MODALITY", "fault", "traffic_class"])
def test_a_column_that_is_worked_out(tmp_path: Path, name) -> None:
    """Under the name of one that queries make there must be none."""
    folder = with_a_column(write(tmp_path / "data", sound()), "requests", name)
    with pytest.raises(DataError, match=f"has a column {name}, which is not read but worked out"):
        analyze([folder], load_rules())


@pytest.mark.parametrize(
    ("table", "name"),
    [("requests", "mine"), ("requests", "waited_ns"), ("requests", "longest_wait"), ("stages", "is_wait")],
)
def test_a_column_of_ones_own(tmp_path: Path, table, name) -> None:
    """It may have any other name, also one that a query has for something of its own."""
    folder = with_a_column(write(tmp_path / "data", sound()), table, name)
    assert analyze([folder], load_rules()).unusable == {}
    _ask_everything(folder)


def with_a_column(folder: Path, table: str, name: str) -> Path:
    """Add a column to a table of a dataset."""
    path = folder / table / "part.parquet"
    found = pq.read_table(path)
    pq.write_table(found.append_column(name, pa.nulls(len(found), pa.string())), path)
    return folder


def test_two_datasets_in_one_folder(tmp_path: Path) -> None:
    """Their requests have the same numbers, and stages could be of either: one line says what to do."""
    folder = write(tmp_path / "data", sound())
    for path in list(folder.glob("*/part.parquet")):
        path.with_name("part-of-another.parquet").write_bytes(path.read_bytes())
    with pytest.raises(
        DataError, match=f"{REQUESTS} of its requests have a number that another one has"
    ) as caught:
        analyze([folder], load_rules())
    assert "a folder of its own" in (caught.value.hint or "")


def test_a_stage_for_each_request(tmp_path: Path) -> None:
    """Names without end would take memory without end."""
    rows = sound()
    rows["stages"] = [rows["stages"][0] | {"stage": f"stage {number}"} for number in range(1001)]
    with pytest.raises(DataError, match="1,001 stages with their reasons are too many"):
        analyze([write(tmp_path / "data", rows)], load_rules())


def test_a_negative_time_is_found_beside_a_longer_one(tmp_path: Path) -> None:
    """Two intervals in one stage, of -10 and 40 ms, add up to the horizon, and yet cannot be."""
    rows = sound()
    first = rows["stages"][0]
    rows["stages"] += [first | {"duration_ns": -10 * MS}, first | {"duration_ns": 10 * MS}]
    analysis = analyze([write(tmp_path / "data", rows)], load_rules())
    assert set(analysis.partition_mismatches.values()) == {1}


def test_nothing_that_can_be_used(tmp_path: Path, capsys) -> None:
    """It is not that there is nothing: the line says what is wrong."""
    rows = sound()
    for row in rows["requests"]:
        row["received_unix_ns"] = 0
    assert command.main([str(write(tmp_path / "data", rows))]) == 3
    assert f"{REQUESTS} requests received before 1970 or after 2099 cannot be used" in capsys.readouterr().err
