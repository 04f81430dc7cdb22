from __future__ import annotations

import importlib.resources
import random
import re

import numpy as np
import pyarrow as pa
import pytest

from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.dataset import TABLES, open_dataset, write_tables
from stagetrace_analyzer.queries import quality, reading, requests, steps
from stagetrace_analyzer.queries.requests import SORTABLE, RequestFilter

FILES = sorted(
    path.name.removesuffix(".sql")
    for path in importlib.resources.files("stagetrace_analyzer.queries").iterdir()
    if path.name.endswith(".sql")
)
MS = 1_000_000


def opened(folder, **rows):
    """A dataset of rows by table."""
    tables = {name: pa.Table.from_pylist(of, TABLES[name]) for name, of in rows.items()}
    write_tables(folder, tables)
    connection = open_dataset([folder])
    requests.list_requests(connection, load_rules())
    return connection


def request_row(number, **facts):
    """A request with defaults."""
    row = {"request_id": f"r-{number}", "instance": "a", "received_unix_ns": number, "outcome": "ok"}
    return {"request": number, "joined": "api"} | row | facts


@pytest.fixture(scope="module")
def random_rows():
    """60 requests of which much is unknown."""
    chance = random.Random(7)

    def maybe(value):
        return None if chance.random() < 0.3 else value

    return [
        request_row(
            number,
            received_unix_ns=chance.randrange(30),
            phase=maybe(chance.choice("ab")),
            outcome=chance.choice(["ok", "error"]),
            ttft_ns=maybe(chance.randrange(20)),
            completion_ns=maybe(chance.randrange(20, 40)),
            media_items=maybe(chance.randrange(3)),
            output_tokens=maybe(chance.randrange(9)),
            trace_id=maybe(f"t-{number}"),
        )
        for number in range(60)
    ]


@pytest.fixture(scope="module")
def connection(random_rows, tmp_path_factory):
    """A dataset of them, with waits."""
    stages = [
        {"request": number, "horizon": "both", "stage": stage, "kind": kind, "occurrence": 1, "begin_ns": 0}
        | {"duration_ns": length, "recompute": False, "role": "api"}
        for number in range(0, 60, 2)
        for stage, kind, length in (
            ("prefill.wait", "wait", number % 7 * 2),
            ("preprocess.wait", "wait", 3),
            ("prefill", "work", 9),
        )
    ]
    return opened(tmp_path_factory.mktemp("random"), requests=random_rows, stages=stages)


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_its_columns_and_takes_parameters_only(name):
    """A file begins with what it is and its columns; only what class rules and selections compile to is put in."""
    text = reading.sql_of(name)
    header = "".join(re.findall(r"^--.*\n", text, flags=re.MULTILINE))
    assert text.startswith("-- ")
    assert "-- Columns:" in header
    assert set(re.findall(r"\{(\w+)\}", text)) == (
        {"traffic_class", "selected"} if name == "listed" else set()
    )
    named = set(re.findall(r"\$(\w+)", text))
    assert {word for word in named if not re.search(rf"\b{word}\b", header)} <= {
        "dataset", "engine", "since_unix_ns", "until_unix_ns", "most", "sign", "sort",
    }  # fmt: skip


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", SORTABLE)
def test_order_is_that_of_sorting(connection, random_rows, sort, descending):
    """Rows come as Python sorts them: unknown ones last in both directions, equal ones by receipt."""
    order = requests.request_order(connection, RequestFilter(), sort=sort, descending=descending)
    found = requests.listed_rows(connection, [int(row) for row in order])
    receipt = sorted(found, key=lambda row: row.row)
    known = [row for row in receipt if getattr(row, sort) is not None]
    unknown = [row for row in receipt if getattr(row, sort) is None]
    by_value = sorted(known, key=lambda row: getattr(row, sort), reverse=descending)
    expected = by_value + unknown
    if sort == "received_unix_ns":
        expected = receipt[::-1] if descending else receipt
    assert found == expected
    assert len(found) == len(random_rows)


@pytest.mark.parametrize(
    ("wanted", "meets"),
    [
        (RequestFilter(phase="a"), lambda row: row["phase"] == "a"),
        (RequestFilter(outcome="error"), lambda row: row["outcome"] == "error"),
        (RequestFilter(media_items=0), lambda row: row["media_items"] == 0),
        (RequestFilter(since_unix_ns=5, until_unix_ns=20), lambda row: 5 <= row["received_unix_ns"] < 20),
        (RequestFilter(min_ttft_ns=10), lambda row: row["ttft_ns"] is None or row["ttft_ns"] >= 10),
        (RequestFilter(max_ttft_ns=10), lambda row: row["ttft_ns"] is not None and row["ttft_ns"] <= 10),
        (RequestFilter(id="r-7"), lambda row: row["request"] == 7),
        (RequestFilter(id="t-8"), lambda row: row["trace_id"] == "t-8"),
        (
            RequestFilter(longest_wait="prefill.wait"),
            lambda row: row["request"] % 2 == 0 and row["request"] % 7 > 1,
        ),
        (RequestFilter(phase="' OR 1=1 --"), lambda _row: False),
    ],
)
def test_filters_are_their_conditions(connection, random_rows, wanted, meets):
    """A filter finds the requests that meet it, one without a first token is above every TTFT."""
    order = requests.request_order(connection, wanted)
    found = {row.request for row in requests.listed_rows(connection, [int(row) for row in order])}
    assert found == {row["request"] for row in random_rows if meets(row)}


def test_sorting_by_anything_else_is_refused(connection):
    """Only columns of the list can be sorted by."""
    with pytest.raises(ValueError, match="cannot sort"):
        requests.request_order(connection, RequestFilter(), sort="row; DROP TABLE listed")


def test_waits_are_summed(connection):
    """The time waited is that in all waits before the first token; unknown where no stage is known."""
    rows = requests.listed_rows(connection, range(60))
    waited = {row.request: row.waited_ns for row in rows}
    assert waited == {n: n % 7 * 2 + 3 if n % 2 == 0 else None for n in range(60)}


def test_choices_count_every_request(connection, random_rows):
    """What one can filter by is counted; unknown values are no choice."""
    found = {(choice.field, choice.value): choice.requests for choice in requests.choices(connection)}
    assert found["outcome", "ok"] == sum(row["outcome"] == "ok" for row in random_rows)
    assert found["phase", "a"] == sum(row["phase"] == "a" for row in random_rows)


ENGINE_STEPS = [
    {"engine": "e", "step": number, "scheduled_unix_ns": number * 10 * MS, "begin_unix_ns": number * 10 * MS}
    | {"end_unix_ns": number * 10 * MS + length * MS, "requests": 2, "tokens": number, "decodes": 1}
    | {"encoder_items": 0, "running": number, "waiting": 0}
    for number, length in enumerate([5, 9, 2, 7, 7, 1, 8, 4], start=1)
]


@pytest.fixture(scope="module")
def engine_connection(tmp_path_factory):
    """Eight steps, three requests in them."""
    members = [(0, 1, 3, 5), (0, 4, 4, 1), (1, 2, 6, 7), (2, 7, 8, 1)]
    return opened(
        tmp_path_factory.mktemp("engine"),
        requests=[
            request_row(0, received_unix_ns=5 * MS, ended_ns=40 * MS),
            request_row(1, received_unix_ns=6 * MS, ended_ns=60 * MS, media_items=1, max_tokens=5),
            request_row(2, received_unix_ns=7 * MS, ended_ns=None, media_items=0, max_tokens=5),
        ],
        steps=ENGINE_STEPS,
        occupancy=[
            {"request": request, "engine": "e", "first_step": first, "last_step": last, "tokens": tokens}
            for request, first, last, tokens in members
        ],
    )


def test_steps_beside_a_request_are_its_own_and_those_it_waited_for(engine_connection):
    """All steps of its engine while it was there, with its own tokens where it was in them."""
    found = requests.request_steps(engine_connection, 0, 1, 100)
    assert [(step.step, step.own_tokens) for step in found] == [
        (1, None), (2, 7), (3, 7), (4, 7), (5, 7), (6, 7),
    ]  # fmt: skip


def test_who_shared_a_step(engine_connection):
    """The others in each step are counted by class, with their tokens; mates by steps in common."""
    company = requests.step_company(engine_connection, 0, 0, "e", (1, 8))
    assert [(c.step, c.traffic_class, c.requests, c.tokens) for c in company] == [
        *((step, "image/short", 1, 7) for step in range(2, 7)),
        *((step, "text/short", 1, 1) for step in (7, 8)),
    ]
    (mate,) = requests.step_mates(engine_connection, 0, 0, 10)
    assert (mate.request, mate.first_step, mate.last_step, mate.steps) == (1, 2, 4, 3)


def test_buckets_hold_every_step(engine_connection):
    """However many stretches there are, they have all steps, and the longest step is in one of them."""
    (engine,) = steps.engines(engine_connection)
    since, until = engine.first_unix_ns, engine.last_unix_ns + 1
    assert steps.step_count(engine_connection, engine, since, until) == 8
    for number in (1, 2, 3, 8, 100):
        found = steps.step_buckets(engine_connection, engine, since, until, number)
        assert len(found) <= number
        assert sum(bucket.steps for bucket in found) == 8
        assert sum(bucket.busy_ns for bucket in found) == 43 * MS
        assert max(bucket.longest_ns for bucket in found) == 9 * MS
        assert max(bucket.running for bucket in found) == 8
    longest = steps.longest_steps(engine_connection, engine, since, until, 3)
    assert [step.step for step in longest] == [2, 7, 4]


def test_engine_part_of_time(engine_connection):
    """A time has the steps that were scheduled in it, its end excluded."""
    (engine,) = steps.engines(engine_connection)
    found = steps.steps_between(engine_connection, engine, 20 * MS, 40 * MS, 10)
    assert [(step.step, step.duration_ns) for step in found] == [(2, 9 * MS), (3, 2 * MS)]


def clock_row(process, at_s, ahead_ms=0, **facts):
    """A reading of both clocks, after some seconds, the wall clock ahead of what it was at first."""
    row = {
        "process": process,
        "role": "api",
        "host": "h",
        "clock": "c",
        "stagetrace_version": "1",
        "records": 7,
    }
    monotonic_ns = at_s * 1000 * MS
    return row | {"at_unix_ns": 10**18 + monotonic_ns + ahead_ms * MS, "monotonic_ns": monotonic_ns} | facts


def test_processes_are_told_by_what_they_told(engine_connection):
    """Where no clock was read, an API server is known by its requests, an engine by its steps."""
    found = quality.processes(engine_connection)
    assert [(p.role, p.process, p.requests, p.steps, p.clock, p.lags) for p in found] == [
        ("api", "a", 3, None, None, 0),
        ("engine", "e", None, 8, None, None),
    ]
    assert quality.clocks(engine_connection) == []


def test_every_process_that_wrote_is_listed_once(tmp_path):
    """Also a worker and a server without requests; one that is API server and engine is one."""
    connection = opened(
        tmp_path,
        requests=[request_row(0, instance="both", received_unix_ns=5)],
        steps=[step | {"engine": "both"} for step in ENGINE_STEPS],
        loop_lag=[{"instance": "idle", "at_unix_ns": 9, "duration_ns": n} for n in (3, 4)],
        clocks=[
            clock_row("both", 0, role="api+engine", pid=11, model="m"),
            clock_row("both", 9, role="api+engine", pid=11, model="m"),
            clock_row("idle", 1, version="2"),
            clock_row("w", 2, role="worker"),
        ],
    )
    found = quality.processes(connection)
    assert [(p.role, p.process, p.requests, p.steps, p.records, p.lags) for p in found] == [
        ("api", "idle", None, None, 7, 2),
        ("api+engine", "both", 1, 8, 7, 0),
        ("worker", "w", None, None, 7, None),
    ]
    idle, both, _ = found
    assert (idle.version, idle.longest_lag_ns, idle.first_unix_ns) == ("2", 4, None)
    assert (both.pid, both.host, both.model) == (11, "h", "m")
    assert (both.first_unix_ns, both.last_unix_ns) == (5, 80 * MS)


def test_a_wall_clock_that_drifts(tmp_path):
    """Of a clock is said how far the wall clock moved over all its readings, and by how much of that time."""
    readings = [clock_row("ab"[n % 2], 600 * n, ahead_ms=n) for n in range(13)]
    (clock,) = quality.clocks(opened(tmp_path, clocks=readings))
    assert (clock.processes, clock.readings, clock.hosts) == (2, 13, ["h"])
    assert (clock.span_ns, clock.moved_ns, clock.jump_ns) == (7200 * 1000 * MS, 12 * MS, MS)
    assert clock.ppm == pytest.approx(12e-3 / 7200 * 1e6)


@pytest.mark.parametrize(("hours", "jump_ms", "ppm"), [(0, -10, None), (1, 10, 10e3 / 3600), (1, -11, None)])
def test_drift_is_told_only_where_it_can_be(tmp_path, hours, jump_ms, ppm):
    """Below an hour, and where the clock jumped, no drift is made of what it moved."""
    clocks = [clock_row("a", 0), clock_row("a", 1 + hours * 3600, ahead_ms=jump_ms)]
    (clock,) = quality.clocks(opened(tmp_path, clocks=clocks))
    assert clock.moved_ns == jump_ms * MS
    assert clock.ppm == (None if ppm is None else pytest.approx(ppm, rel=1e-3))


def test_the_largest_jump_of_a_wall_clock(tmp_path):
    """It is between two neighbouring readings of any processes, and dated by the clock as it was last."""
    by_time = [(0, 0), (10, 0), (20, 3000), (30, 3000), (40, -1000), (50, -1000)]
    clocks = [clock_row("ab"[n % 2], at_s, ahead_ms) for n, (at_s, ahead_ms) in enumerate(by_time)]
    clocks.append(clock_row("other", 5, ahead_ms=10**6, clock="d", host="i"))
    one, other = quality.clocks(opened(tmp_path, clocks=clocks[::-1]))
    last = 10**18 - 1000 * MS
    assert (one.moved_ns, one.jump_ns, one.ppm) == (-1000 * MS, -4000 * MS, None)
    assert (one.jump_after_unix_ns, one.jump_before_unix_ns) == (last + 30_000 * MS, last + 40_000 * MS)
    assert (one.first_unix_ns, one.last_unix_ns) == (last, last + 50_000 * MS)
    assert (other.readings, other.moved_ns, other.jump_ns, other.jump_before_unix_ns) == (1, 0, None, None)


def test_a_clock_of_several_datasets_is_one(tmp_path):
    """Runs on one host have its clock in common; a reading that is in two of them counts once."""
    for name, at_s in (("one", 5), ("two", 9)):
        opened(tmp_path / name, clocks=[clock_row("a", 1), clock_row(name, at_s, ahead_ms=at_s)])
    connection = open_dataset([tmp_path / "one", tmp_path / "two"])
    (clock,) = quality.clocks(connection)
    assert (clock.datasets, clock.processes, clock.readings) == (2, 3, 3)
    assert (clock.moved_ns, clock.jump_ns) == (9 * MS, 5 * MS)
    assert len(quality.processes(connection)) == 4


def test_rows_come_in_the_wanted_order(connection):
    """A block of rows is in the order that was asked for."""
    wanted = [int(row) for row in np.random.default_rng(3).permutation(60)[:10]]
    assert [row.row for row in requests.listed_rows(connection, wanted)] == wanted
    assert requests.listed_rows(connection, []) == []


def test_columns_must_be_the_fields(connection):
    """A file whose columns are not the type's is a fault of ours, and said."""
    with pytest.raises(ValueError, match="has the columns"):
        reading.fetch(connection, "span", requests.Choice)
