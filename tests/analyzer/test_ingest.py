"""Spool to dataset: what a server recorded arrives in typed tables, exactly."""

from __future__ import annotations

import duckdb
import pytest
from damage import Scene

from stagetrace import Recorder, read_spool
from stagetrace.records import NONE, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace_analyzer.ingest import HASH_KEY_VARIABLE, ingest_spool

MS = 1_000_000
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record_image_request(folder):
    """One image request: 1 ms to its item, 20 ms fetch, 5 ms decoding, encoded in its first of three steps."""
    recorder = Recorder(folder)
    at = recorder.record_at
    at(0, RecordKind.RECEIVED, 1)
    at(0, RecordKind.FACT_TEXT, 1, Fact.TRACEPARENT, recorder.define(TRACE))
    at(0, RecordKind.FACT_NUMBER, 1, Fact.MAX_TOKENS, 16)
    scheme, host, modality = (recorder.intern(text) for text in ("http", "cdn", "image"))
    at(1 * MS, RecordKind.ITEM_BEGIN, 1, 0, scheme, host, modality)
    at(1 * MS, RecordKind.FETCH_BEGIN, 1, 0)
    at(21 * MS, RecordKind.FETCH_END, 1, 0, 2)
    at(21 * MS, RecordKind.JOB_SUBMITTED, 1, 0, JobKind.DECODE, 0)
    at(21 * MS, RecordKind.JOB_STARTED, 1, 0)
    at(26 * MS, RecordKind.JOB_ENDED, 1, 0)
    at(26 * MS, RecordKind.MEDIA_DECODED, 1, 0, 5000, 320 << 16 | 240, recorder.intern("jpeg"))
    at(26 * MS, RecordKind.ITEM_END, 1, 0)
    at(26 * MS, RecordKind.JOB_SUBMITTED, 1, 1, JobKind.PROCESS, NONE)
    at(27 * MS, RecordKind.JOB_STARTED, 1, 1)
    at(30 * MS, RecordKind.JOB_ENDED, 1, 1)
    at(31 * MS, RecordKind.ENGINE_REQUEST, 1, recorder.define("id"))
    key = recorder.define("id")
    at(32 * MS, RecordKind.HELD, key, 220, 16, 1)
    at(32 * MS, RecordKind.ENGINE_ITEM, key, 0, recorder.define("digest"), 208, 210)
    at(32 * MS, RecordKind.ADDED, key)
    at(33 * MS, RecordKind.STEP, 1, 220, 1 | ReasonCode.NONE << 16, 1, 0)
    at(33 * MS, RecordKind.MEMBER, key, 1, 220, 0)
    at(33 * MS, RecordKind.STEP_ITEM, 1, key, 0)
    at(33 * MS, RecordKind.STEP_BEGIN, 1, recorder.number)
    at(35 * MS, RecordKind.ENCODE_BEGIN, 1, recorder.number)
    at(85 * MS, RecordKind.ENCODE_END, 1, recorder.number)
    at(93 * MS, RecordKind.STEP_DONE, 1, 60 * MS)
    at(93 * MS, RecordKind.FIRST_TOKEN, key, 1)
    at(93 * MS, RecordKind.STEP, 2, 1, 1, 1 | 1 << 16, 0)
    at(93 * MS, RecordKind.MEMBER, key, 2, 1, 0)
    at(100 * MS, RecordKind.STEP_DONE, 2, 7 * MS)
    at(107 * MS, RecordKind.STEP_DONE, 3, 7 * MS)
    at(107 * MS, RecordKind.FREED, key, recorder.intern("length_capped"), 3)
    at(94 * MS, RecordKind.RESPONSE_STARTED, 1, 200, 1)
    at(95 * MS, RecordKind.FIRST_USEFUL, 1)
    at(109 * MS, RecordKind.LAST_BYTE, 1)
    at(109 * MS, RecordKind.ENDED, 1)


@pytest.fixture
def query(tmp_path, monkeypatch):
    """Ask a dataset made from one image request."""
    monkeypatch.setenv(HASH_KEY_VARIABLE, "key")
    record_image_request(tmp_path / "spool")
    ingest_spool(tmp_path / "spool", tmp_path / "dataset")

    def ask(columns, table, tail=""):
        source = tmp_path / "dataset" / table / "*.parquet"
        return duckdb.sql(f"SELECT {columns} FROM '{source}' {tail}").fetchall()

    return ask


def test_request(query):
    """A request's row has its times, its facts and how far it was joined."""
    columns = (
        "ttft_ns, completion_ns, outcome, trace_id, parent_span_id, max_tokens, prompt_tokens, output_tokens"
    )
    assert query(columns, "requests") == [(95 * MS, 109 * MS, "ok", TRACE[3:35], TRACE[36:52], 16, 220, 3)]
    columns = (
        "media_items, media_bytes, pixels, stream, status, finish_reason, error_code, ended_stage, joined"
    )
    assert query(columns, "requests") == [
        (1, 5000, 76800, True, 200, "length_capped", None, None, "api+engine+worker")
    ]


def test_media(query):
    """An item's row has its facts, and its hash under the key."""
    columns = "scheme, host, format, bytes, width, height, tokens, fetch_attempts, encoder_cache, slack_ns"
    assert query(columns, "media") == [("http", "cdn", "jpeg", 5000, 320, 240, 208, 2, "miss", 0)]
    ((hashed,),) = query("hash", "media")
    assert len(hashed) == 32
    assert hashed != "digest"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ([RecordKind.DISCONNECTED], ("cancelled", None, "media_decode")),
        ([(RecordKind.RESPONSE_STARTED, 400), RecordKind.LAST_BYTE], ("error", "http_400", "media_decode")),
        ([], ("error", "no_response", "handoff")),
    ],
)
def test_stage_in_which_a_request_ended(tmp_path, ended, told):
    """A refused request ends in the stage before the answer, one whose client leaves in the one it was in."""
    recorder = Recorder(tmp_path / "spool")
    for at, (kind, *fields) in enumerate(
        [
            (RecordKind.RECEIVED,),
            (RecordKind.ITEM_BEGIN, 0, NONE, NONE, NONE),
            (RecordKind.JOB_SUBMITTED, 0, JobKind.DECODE, 0),
            (RecordKind.JOB_STARTED, 0),
            *([] if RecordKind.DISCONNECTED in ended else [(RecordKind.JOB_ENDED, 0, 1)]),
            *((each,) if isinstance(each, RecordKind) else each for each in ended),
            (RecordKind.ENDED,),
        ]
    ):
        recorder.record_at(at * MS, kind, 1, *fields)
    ingest_spool(tmp_path / "spool", tmp_path / "dataset")
    query = f"SELECT outcome, error_code, ended_stage FROM '{tmp_path}/dataset/requests/*.parquet'"
    assert duckdb.sql(query).fetchall() == [told]


def test_items_loaded_one_after_the_other_have_no_slack(tmp_path):
    """Of two items that a job loads itself the first could not have been ready later either."""
    recorder = Recorder(tmp_path / "spool")
    recorder.record_at(0, RecordKind.RECEIVED, 1)
    for item in range(2):
        recorder.record_at((1 + item) * MS, RecordKind.ITEM_BEGIN, 1, item, NONE, NONE, NONE)
        recorder.record_at((1 + item) * MS, RecordKind.ITEM_INLINE, 1, item, 0)
        recorder.record_at((2 + item) * MS, RecordKind.ITEM_END, 1, item)
    recorder.record_at(9 * MS, RecordKind.LAST_BYTE, 1)
    recorder.record_at(9 * MS, RecordKind.ENDED, 1)
    ingest_spool(tmp_path / "spool", tmp_path / "dataset")
    slack = duckdb.sql(f"SELECT slack_ns FROM '{tmp_path}/dataset/media/*.parquet'").fetchall()
    assert slack == [(0,), (0,)]


def test_loop_lag_and_media_cache(tmp_path):
    """A lag is a row with the wall clock of its process; a hit of the media cache is a fact of its item."""
    recorder = Recorder(tmp_path / "spool")
    recorder.record(RecordKind.RECEIVED, 1)
    for item in range(2):
        recorder.record(RecordKind.ITEM_BEGIN, 1, item, NONE, NONE)
    recorder.record(RecordKind.MEDIA_CACHED, 1, 1)
    recorder.record(RecordKind.LAST_BYTE, 1)
    recorder.record(RecordKind.ENDED, 1)
    recorder.record_at(7 * MS, RecordKind.LOOP_LAG, 0, 30 * MS)
    ingest_spool(tmp_path / "spool", tmp_path / "dataset")
    at = read_spool(tmp_path / "spool").pair(recorder.process).unix(7 * MS)
    lags = duckdb.sql(f"FROM '{tmp_path}/dataset/loop_lag/*.parquet'").fetchall()
    assert lags == [(recorder.process, at, 30 * MS)]
    hits = duckdb.sql(
        f"SELECT media_cache FROM '{tmp_path}/dataset/media/*.parquet' ORDER BY item"
    ).fetchall()
    assert hits == [(None,), ("hit",)]


def test_clocks(tmp_path):
    """Both clocks are there as every segment noted them, also a worker's, and one's that told nothing yet."""
    spool = tmp_path / "spool"
    scene = Scene(spool)
    idle = Recorder(spool)
    with scene.clocks():
        idle.announce(RecordKind.PROCESS_FACT, Fact.SERVICE, "captioner")
        idle.record(RecordKind.HOOK_OFF, 0, idle.intern("module:gone"))
        for number in range(1, 6):
            scene.wall += 3600 * 10**9 if number == 3 else 0
            scene.request(number)
    ingest_spool(spool, tmp_path / "dataset")
    table = f"'{tmp_path}/dataset/clocks/*.parquet'"
    found = duckdb.sql(f"SELECT process, pid, host, clock, at_unix_ns, monotonic_ns FROM {table}").fetchall()
    headers = [read_segment(path).header for path in segment_paths(spool)]
    assert sorted(found) == sorted(
        (h.process, h.pid, h.host, h.clock, h.pair.unix_ns, h.pair.monotonic_ns) for h in headers
    )
    assert len({unix - monotonic for *_, unix, monotonic in found}) == 2
    processes = duckdb.sql(
        f"SELECT DISTINCT role, model, service, records FROM {table} ORDER BY role"
    ).fetchall()
    assert [row[:3] for row in processes] == [
        ("api", None, None),
        ("engine", "tiny", None),
        ("process", None, "captioner"),
        ("worker", None, None),
    ]
    assert sum(records for *_, records in processes) == read_spool(spool).records


def test_a_process_of_several_roles(query):
    """An engine that runs its worker itself is both, whatever its first record was."""
    assert query("role", "clocks") == [("api+engine+worker",)]


def test_stages(query):
    """The rows of both horizons add up to them, and what they share is one row."""
    rows = query("horizon, stage, duration_ns / 1000000", "stages", "ORDER BY begin_ns, horizon")
    assert [(horizon, stage, round(ms, 6)) for horizon, stage, ms in rows] == [
        ("both", "receive", 1),
        ("both", "retrieval", 20),
        ("both", "media_decode", 5),
        ("both", "preprocess.wait", 1),
        ("both", "preprocess", 3),
        ("both", "handoff", 2),
        ("both", "prefill", 3),
        ("both", "encode", 50),
        ("both", "prefill", 8),
        ("completion", "decode", 14),
        ("ttft", "respond", 2),
        ("completion", "respond", 2),
    ]


def test_steps_and_occupancy(query):
    """Steps are numbered without gaps; occupancy tells the request's tokens by stretch of steps."""
    columns = "step, tokens, decodes, encoder_items, encoder_end_unix_ns - encoder_begin_unix_ns"
    assert query(columns, "steps") == [(1, 220, 0, 1, 50 * MS), (2, 1, 1, 0, None), (3, 1, 1, 0, None)]
    assert query("first_step, last_step, tokens", "occupancy") == [(1, 1, 220), (2, 3, 1)]


def test_quality(query):
    """Everything reconciles, and nothing was set aside."""
    assert query("bool_and(holds), count(*)", "checks") == [(True, 5)]
    assert query("name, count", "ingest", "WHERE name != 'records'") == [
        ("requests", 1),
        ("dropped", 0),
        ("faults", 0),
    ]


def test_equal_keys_make_equal_hashes(tmp_path, monkeypatch):
    """Media hashes are comparable between datasets under one key, and not otherwise."""
    hashes = []
    record_image_request(tmp_path / "spool")
    for number, key in enumerate(("one", "one", "other", "")):
        monkeypatch.setenv(HASH_KEY_VARIABLE, key)
        ingest_spool(tmp_path / "spool", tmp_path / str(number))
        hashes.append(
            duckdb.sql(f"SELECT hash FROM '{tmp_path / str(number)}/media/*.parquet'").fetchall()[0][0]
        )
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_hostile_numbers_do_not_break_a_dataset(tmp_path):
    """Numbers that do not fit a column are set aside, and the rest is there."""
    record_image_request(tmp_path / "spool")
    recorder = Recorder(tmp_path / "spool")
    recorder.record(RecordKind.RECEIVED, 1)
    recorder.record(RecordKind.FACT_NUMBER, 1, Fact.INTENDED_UNIX_NS, 0xFFFFFFFF, 0xFFFFFFFF)
    recorder.record_at(-5, RecordKind.BODY_COMPLETE, 1)
    recorder.record_at((1 << 63) - 1, RecordKind.ENDED, 1)
    recorder.record(RecordKind.ENDED, 1, 1)
    ingest_spool(tmp_path / "spool", tmp_path / "dataset")
    asked = f"SELECT reason, count FROM '{tmp_path}/dataset/ingest/*.parquet' WHERE name = 'set_aside' ORDER BY ALL"
    assert duckdb.sql(asked).fetchall() == [("impossible_time", 2), ("unknown_value", 1)]
