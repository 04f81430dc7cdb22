"""Spans: a request's records become the SDK's spans, under the names of the conventions, with ids that stay."""

from __future__ import annotations

import re
import runpy
import socket
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import duckdb
import pytest
from busy_spool import write_spool
from opentelemetry.trace import SpanKind, StatusCode

from stagetrace import Recorder, __version__, partition, read_spool
from stagetrace.records import NONE, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.testing import EngineBuilder
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.ingest import ingest_spool
from stagetrace_export import conventions as names
from stagetrace_export.spans import (
    Origin,
    ended_steps,
    parent_of,
    request_spans,
    service_resource,
    step_spans,
)
from stagetrace_vllm.http import PATHS

MS = 1_000_000
TRACE_ID, PARENT_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACE = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"

FACTS = {
    Fact.TRACEPARENT: TRACE,
    Fact.PATH: "/v1/chat/completions",
    Fact.PHASE: "mixture",
    Fact.LABEL: "image/short",
    Fact.ARM: "split",
    Fact.EXTERNAL_ID: "chatcmpl-8d1f",
}


def record(folder):
    """An image request with a parent, encoded in its first of three steps; the second is preempted and repeated."""
    recorder = Recorder(folder)
    recorder.announce(RecordKind.PROCESS_FACT, Fact.MODEL, "tiny")
    recorder.announce(RecordKind.PROCESS_FACT, Fact.VERSION, "0.32.0")
    recorder.record_at(0, RecordKind.RECEIVED, 1)
    for fact, text in FACTS.items():
        recorder.record_at(0, RecordKind.FACT_TEXT, 1, fact, recorder.intern(text))
    scheme, host, modality, form = (recorder.intern(text) for text in ("http", "cdn", "image", "jpeg"))
    name = recorder.define("chatcmpl-8d1f-x")
    key, other, digest = (recorder.define(text) for text in ("chatcmpl-8d1f-x", "chatcmpl-other", "digest"))
    for ms, kind, *fields in (
        (0, RecordKind.FACT_NUMBER, 1, Fact.MAX_TOKENS, 16),
        (0, RecordKind.FACT_NUMBER, 1, Fact.INTENDED_UNIX_NS, 5, 1 << 28),
        (1, RecordKind.ITEM_BEGIN, 1, 0, scheme, host, modality),
        (1, RecordKind.FETCH_BEGIN, 1, 0),
        (21, RecordKind.FETCH_END, 1, 0, 2),
        (21, RecordKind.JOB_SUBMITTED, 1, 0, JobKind.DECODE, 0),
        (21, RecordKind.JOB_STARTED, 1, 0),
        (26, RecordKind.JOB_ENDED, 1, 0),
        (26, RecordKind.MEDIA_DECODED, 1, 0, 5000, 320 << 16 | 240, form),
        (26, RecordKind.ITEM_END, 1, 0),
        (26, RecordKind.JOB_SUBMITTED, 1, 1, JobKind.PROCESS, NONE),
        (27, RecordKind.JOB_STARTED, 1, 1),
        (30, RecordKind.JOB_ENDED, 1, 1),
        (31, RecordKind.ENGINE_REQUEST, 1, name),
        (32, RecordKind.HELD, key, 220, 16, 1),
        (32, RecordKind.ENGINE_ITEM, key, 0, digest, 208, 210),
        (32, RecordKind.ADDED, key),
        (32, RecordKind.STEP, 1, 0, ReasonCode.SEATS << 16, 4, 2),
        (32, RecordKind.HEAD, 1, other),
        (33, RecordKind.STEP, 2, 220, 1 | ReasonCode.NONE << 16, 1, 0),
        (33, RecordKind.MEMBER, key, 2, 220, 0),
        (33, RecordKind.STEP_ITEM, 2, key, 0),
        (33, RecordKind.STEP_BEGIN, 2, recorder.number),
        (35, RecordKind.ENCODE_BEGIN, 2, recorder.number),
        (85, RecordKind.ENCODE_END, 2, recorder.number),
        (93, RecordKind.STEP_DONE, 2, 60 * MS),
        (93, RecordKind.FIRST_TOKEN, key, 2),
        (94, RecordKind.RESPONSE_STARTED, 1, 200, 1),
        (95, RecordKind.FIRST_USEFUL, 1),
        (93, RecordKind.PREEMPTED, key, 3, 221),
        (93, RecordKind.MEMBER, key, 3, 0, 0),
        (93, RecordKind.HELD, other, 5, 16, 0),
        (93, RecordKind.MEMBER, other, 3, 1, 0),
        (93, RecordKind.STEP, 3, 1, 1, 1 | 1 << 16, 1),
        (100, RecordKind.STEP_DONE, 3, 7 * MS),
        (100, RecordKind.STEP, 4, 221, 1, 1, 0),
        (100, RecordKind.MEMBER, key, 4, 221, 0),
        (100, RecordKind.MEMBER, other, 4, 0, 0),
        (107, RecordKind.STEP_DONE, 4, 7 * MS),
        (107, RecordKind.FREED, key, recorder.intern("length_capped"), 3),
        (109, RecordKind.LAST_BYTE, 1),
        (109, RecordKind.ENDED, 1),
    ):
        recorder.record_at(ms * MS, kind, *fields)


def spans_of(folder, *, steps=False):
    """The spans of every request of a spool, a list each, by the request's number."""
    data = read_spool(folder)
    origin = Origin.of(data, load_rules(), steps=steps)
    return {
        request.request_id.partition("-")[2]: request_spans(request, partition(request), origin)
        for request in data.requests
    }


@pytest.fixture
def spans(tmp_path):
    """The spans of the recorded image request."""
    record(tmp_path / "spool")
    return spans_of(tmp_path / "spool")["1"]


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A spool of a busy server, with every kind of end."""
    folder = tmp_path_factory.mktemp("busy") / "spool"
    write_spool(folder)
    return folder


def test_span_of_a_request(spans):
    """A request is a SERVER span named after operation and model, with exactly the attributes that are known."""
    root = spans[0]
    assert (root.name, root.kind, root.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    assert root.end_time - root.start_time == 109 * MS
    found = dict(root.attributes)
    assert re.fullmatch(r"[0-9a-f]{12}-1", found.pop("stagetrace.request.id"))
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-8d1f",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 220,
        "gen_ai.usage.image.input_tokens": 208,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "stagetrace.phase": "mixture",
        "stagetrace.label": "image/short",
        "stagetrace.arm": "split",
        "stagetrace.intended_unix_ns": 5 | 1 << 60,
        "stagetrace.class": "image/short",
        "stagetrace.outcome": "ok",
        "stagetrace.ttft.duration": 0.095,
        "stagetrace.ttft.waiting": 0.002,
        "stagetrace.completion.duration": 0.109,
        "stagetrace.completion.waiting": 0.009,
        "stagetrace.media.items": 1,
        "stagetrace.media.bytes": 5000,
        "stagetrace.media.pixels": 76800,
    }


def test_spans_of_stages(spans):
    """Every interval of the completion horizon is a child, with its stage, kind and place."""
    root, *stages = spans
    assert {span.kind for span in stages} == {SpanKind.INTERNAL}
    assert all(span.parent == root.context for span in stages)
    told = [
        (span.name, (span.end_time - span.start_time) / MS, span.attributes["stagetrace.horizon"])
        for span in stages
    ]
    assert told == [
        ("receive", 1, "both"),
        ("retrieval", 20, "both"),
        ("media_decode", 5, "both"),
        ("preprocess.wait", 1, "both"),
        ("preprocess", 3, "both"),
        ("handoff", 2, "both"),
        ("prefill.wait", 1, "both"),
        ("prefill", 2, "both"),
        ("encode", 50, "both"),
        ("prefill", 8, "both"),
        ("decode.wait", 7, "completion"),
        ("prefill", 7, "completion"),
        ("respond", 2, "completion"),
    ]
    assert dict(stages[6].attributes) == {
        "stagetrace.stage": "prefill.wait",
        "stagetrace.kind": "wait",
        "stagetrace.reason": "seats",
        "stagetrace.holder": "chatcmpl-other",
        "stagetrace.horizon": "both",
        "stagetrace.occurrence": 1,
        "stagetrace.step.first": 1,
        "stagetrace.step.last": 1,
    }
    assert dict(stages[11].attributes) == {
        "stagetrace.stage": "prefill",
        "stagetrace.kind": "work",
        "stagetrace.horizon": "completion",
        "stagetrace.occurrence": 3,
        "stagetrace.step.first": 4,
        "stagetrace.step.last": 4,
        "stagetrace.recompute": True,
    }
    assert stages[1].attributes["stagetrace.item"] == 0


def test_end_of_the_ttft_horizon(spans):
    """The first useful byte is an event of the request, at its instant, with the stage that ended there."""
    (event,) = spans[0].events
    assert (event.name, event.timestamp - spans[0].start_time) == ("stagetrace.first_useful_byte", 95 * MS)
    assert dict(event.attributes) == {"stagetrace.stage": "respond"}


def test_unix_time_is_that_of_the_clock_pair(tmp_path):
    """Times are those of the wall clock by the process's own pair of clocks, to the nanosecond."""
    record(tmp_path)
    data = read_spool(tmp_path)
    (request,) = data.requests
    root, first, *_ = spans_of(tmp_path)["1"]
    unix = data.pair(request.instance).unix
    assert (root.start_time, root.end_time) == (unix(request.received), unix(request.last_byte))
    assert (first.start_time, first.end_time) == (unix(0), unix(MS))


def test_spans_are_the_rows_of_the_dataset(busy, tmp_path):
    """For every request of a busy server its spans are exactly the rows of the dataset's completion horizon."""
    ingest_spool(busy, tmp_path / "dataset")
    columns = "stage, kind, reason, holder, horizon, occurrence, item, first_step, last_step, recompute"
    rows = duckdb.sql(
        f"SELECT request_id, begin_ns, duration_ns, {columns} FROM '{tmp_path}/dataset/stages/*.parquet' "
        f"JOIN '{tmp_path}/dataset/requests/*.parquet' USING (request) "
        "WHERE horizon IN ('both', 'completion') ORDER BY ALL"
    ).fetchall()
    wanted = [names.STAGE, names.KIND, names.REASON, names.HOLDER, names.HORIZON, names.OCCURRENCE]
    wanted += [names.ITEM, names.FIRST_STEP, names.LAST_STEP]
    found = [
        (
            root.attributes[names.REQUEST_ID],
            span.start_time - root.start_time,
            span.end_time - span.start_time,
            *map(span.attributes.get, wanted),
            span.attributes.get(names.RECOMPUTE, False),
        )
        for root, *stages in spans_of(busy).values()
        for span in stages
    ]
    assert len(rows) > 300
    assert sorted(found, key=repr) == sorted(rows, key=repr)
    columns = "request_id, outcome, ended_stage, label, max_tokens, output_tokens, ttft_ns, completion_ns"
    rows = duckdb.sql(f"SELECT {columns} FROM '{tmp_path}/dataset/requests/*.parquet'").fetchall()
    wanted = [names.REQUEST_ID, names.OUTCOME, names.ENDED_STAGE, names.LABEL, names.REQUEST_MAX_TOKENS]
    wanted += [names.OUTPUT_TOKENS, names.TTFT_DURATION, names.COMPLETION_DURATION]
    found = [tuple(map(root.attributes.get, wanted)) for root, *_ in spans_of(busy).values()]
    seconds = [(*row[:-2], *(None if ns is None else ns / 1e9 for ns in row[-2:])) for row in rows]
    assert sorted(found, key=repr) == sorted(seconds, key=repr)


def test_stages_fill_their_request(busy):
    """The stages begin and end with the request and leave no gap, however it ended."""
    for root, *stages in spans_of(busy).values():
        assert [a.end_time for a, _ in pairwise(stages)] == [b.start_time for _, b in pairwise(stages)]
        assert (stages[0].start_time, stages[-1].end_time) == (root.start_time, root.end_time)


def test_ids_stay_and_are_distinct(busy):
    """Two exports of a spool give the same ids; no two spans have the same."""
    once, again = ([span for spans in spans_of(busy).values() for span in spans] for _ in range(2))
    assert [span.context for span in once] == [span.context for span in again]
    assert len({span.context.span_id for span in once}) == len(once)
    assert len({span.context.trace_id for span in once}) == len(spans_of(busy))
    assert all(span.context.is_valid and span.context.trace_flags.sampled for span in once)


def test_the_clients_span_is_the_parent(spans):
    """With a ``traceparent`` all spans are in its trace, below the client's span; the flags are passed on."""
    assert {span.context.trace_id for span in spans} == {TRACE_ID}
    assert (spans[0].parent.span_id, spans[0].parent.is_remote) == (PARENT_ID, True)
    assert {span.context.trace_flags for span in spans} == {1}


def with_fact(folder, *texts, **numbers):
    """Record a short request with facts; texts are pairs of fact and text."""
    recorder = numbers.get("recorder") or Recorder(folder)
    recorder.record_at(MS, RecordKind.RECEIVED, 1)
    for fact, text in texts:
        recorder.record_at(MS, RecordKind.FACT_TEXT, 1, fact, recorder.intern(text))
    ended = numbers.get("ended")
    if "status" in numbers:
        recorder.record_at(2 * MS, RecordKind.RESPONSE_STARTED, 1, numbers["status"])
    if ended != "gone":
        recorder.record_at(3 * MS, RecordKind.LAST_BYTE, 1)
    recorder.record_at(3 * MS, RecordKind.DISCONNECTED if ended == "gone" else RecordKind.ENDED, 1)
    (request,) = read_spool(folder).requests
    return request


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (TRACE, True),
        (TRACE[:-1] + "0", False),
        ("cc" + TRACE[2:] + "-of-the-future", True),
        ("ff" + TRACE[2:], None),
        (TRACE.replace(f"{TRACE_ID:032x}", "0" * 32), None),
        (TRACE.replace(f"{PARENT_ID:016x}", "0" * 16), None),
        (TRACE[:-3], None),
        (TRACE.upper(), None),
        ("", None),
    ],
)
def test_traceparent(tmp_path, text, sampled):
    """What is no valid ``traceparent`` is no parent, and the trace is then our own."""
    request = with_fact(tmp_path, (Fact.TRACEPARENT, text))
    parent = parent_of(request)
    assert (None if parent is None else parent.trace_flags.sampled) is sampled
    (root, *_) = spans_of(tmp_path)["1"]
    assert (root.context.trace_id == TRACE_ID) is (sampled is not None)
    assert root.context.is_valid
    assert root.context.trace_flags.sampled is (sampled is not False)


@pytest.mark.parametrize(
    ("facts", "numbers", "told"),
    [
        ((), {"status": 200}, ("ok", None, StatusCode.UNSET)),
        ((), {"status": 400}, ("error", "400", StatusCode.UNSET)),
        ((), {"status": 503}, ("error", "503", StatusCode.ERROR)),
        (((Fact.ERROR, "engine_dead"),), {"status": 200}, ("error", "engine_dead", StatusCode.ERROR)),
        ((), {"ended": "gone"}, ("cancelled", "cancelled", StatusCode.UNSET)),
    ],
)
def test_status_and_error_type(tmp_path, facts, numbers, told):
    """A server's error is one, a client's mistake or its leaving is none; what happened is told either way."""
    with_fact(tmp_path, *facts, **numbers)
    (root, *_) = spans_of(tmp_path)["1"]
    outcome, error_type, status = told
    assert root.attributes[names.OUTCOME] == outcome
    assert root.attributes.get(names.ERROR_TYPE) == error_type
    assert root.status.status_code is status
    assert root.status.description is None


def test_lost_request(tmp_path):
    """A request whose server has ended is lost: an error without a length, and an end all the same."""
    code = (
        "import sys; from stagetrace import Recorder; from pathlib import Path\n"
        "Recorder(Path(sys.argv[1])).record(20, 1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    (root,) = spans_of(tmp_path)["1"]
    assert (root.attributes["error.type"], root.status.status_code) == ("lost", StatusCode.ERROR)
    assert root.start_time == root.end_time
    assert "stagetrace.completion.duration" not in root.attributes


def test_answers_in_order_have_a_finish_reason_each(tmp_path):
    """Several answers have a reason each, in order; one that broke off has ``error``."""
    recorder = Recorder(tmp_path)
    recorder.record_at(0, RecordKind.RECEIVED, 1)
    for index, status in ((1, "length_capped"), (0, "stopped"), (2, None), (3, "repetition")):
        text = recorder.define(f"{index}_id")
        recorder.record_at(1, RecordKind.ENGINE_REQUEST, 1, text, index)
        recorder.record_at(2, RecordKind.HELD, text, 5, 16, 0)
        if status is not None:
            recorder.record_at(3, RecordKind.FREED, text, recorder.intern(status), 3)
    recorder.record_at(9, RecordKind.LAST_BYTE, 1)
    recorder.record_at(9, RecordKind.ENDED, 1)
    (root, *_) = spans_of(tmp_path)["1"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop", "length", "error", "repetition")
    assert root.name == "request"


def test_resource(tmp_path, monkeypatch):
    """A process's resource says who recorded; what ``OTEL_*`` variables say of it wins."""
    record(tmp_path)
    (process,) = read_spool(tmp_path).processes.values()
    (root, *_) = spans_of(tmp_path)["1"]
    ours = {name: root.resource.attributes[name] for name in names.RESOURCE}
    assert ours == {
        "service.name": "vllm",
        "service.instance.id": process.header.process,
        "service.version": "0.32.0",
        "host.name": process.header.host,
        "process.pid": process.header.pid,
        "telemetry.distro.name": "stagetrace",
        "telemetry.distro.version": __version__,
        "stagetrace.role": "api",
    }
    assert (root.instrumentation_scope.name, root.instrumentation_scope.version) == (
        "stagetrace",
        __version__,
    )
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-api")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node-7,deployment.environment.name=canary")
    told = spans_of(tmp_path)["1"][0].resource.attributes
    assert [told[name] for name in ("service.name", "host.name", "deployment.environment.name")] == [
        "chat-api",
        "node-7",
        "canary",
    ]


def test_stages_of_the_engine_have_the_engines_resource(busy):
    """What happened in the front end has its resource, what happened in the engine the engine's."""
    for root, *stages in spans_of(busy).values():
        assert root.resource.attributes["stagetrace.role"] == "api"
        for span in stages:
            role = "engine" if "stagetrace.step.first" in span.attributes else "api"
            assert span.resource.attributes["stagetrace.role"] == role


def spans_of_steps(steps, origin):
    """The spans of all steps of an engine that have ended."""
    return list(
        step_spans(steps, ended_steps(steps), origin.clocks[steps.engine], origin.resources[steps.engine])
    )


def test_steps_that_have_ended():
    """Steps are ready in order; one that must be told its encoder's time waits for two later ones, or the end."""
    engine = EngineBuilder()
    for number in range(6):
        engine.step(10 * number, 10 * number + 9 if number < 5 else None)
    steps = engine.steps()
    assert ended_steps(steps) == ended_steps(steps, final=True) == range(5)
    assert ended_steps(steps, after=2) == range(2, 5)
    steps.steps[2].encoder_items = 1
    assert ended_steps(steps) == range(5)
    steps.steps[2].encoder_items, steps.steps[3].encoder_items = 0, 1
    assert ended_steps(steps) == range(3)
    assert ended_steps(steps, after=3) == range(3, 3)
    assert ended_steps(steps, final=True) == range(5)


def test_steps_are_traces_of_their_own(tmp_path):
    """A step is a trace, its encoder's part a child; stages link to the first and the last step they cover."""
    record(tmp_path)
    data = read_spool(tmp_path)
    origin = Origin.of(data, load_rules(), steps=True)
    (steps,) = data.engines
    found = spans_of_steps(steps, origin)
    assert [span.name for span in found] == ["step", "step", "step.encoder", "step", "step"]
    assert dict(found[1].attributes) == {
        "stagetrace.step.number": 2,
        "stagetrace.step.tokens": 220,
        "stagetrace.step.requests": 1,
        "stagetrace.step.decodes": 0,
        "stagetrace.step.encoder_items": 1,
        "stagetrace.step.running": 1,
        "stagetrace.step.waiting": 0,
        "stagetrace.step.scheduled_unix_ns": origin.clocks[steps.engine].unix(33 * MS),
    }
    assert found[0].attributes["stagetrace.reason"] == "seats"
    assert (found[2].parent, found[2].end_time - found[2].start_time) == (found[1].context, 50 * MS)
    assert len({span.context.trace_id for span in found}) == 4
    _, *stages = spans_of(tmp_path, steps=True)["1"]
    linked = {
        span.attributes["stagetrace.step.first"]: [link.context for link in span.links]
        for span in stages
        if "stagetrace.step.first" in span.attributes
    }
    assert linked == {n: [found[n - (n < 3)].context] for n in range(1, 5)}
    assert all(not span.links for span in spans_of(tmp_path)["1"])


def test_every_attribute_is_in_the_tables(tmp_path, busy):
    """No span has an attribute that the tables do not name, or of another type; the tables name no other."""
    record(tmp_path / "vllm")
    data = read_spool(tmp_path / "vllm")
    origin = Origin.of(data, load_rules(), steps=True)
    (steps,) = data.engines
    of_steps = spans_of_steps(steps, origin)
    with_fact(tmp_path / "other", (Fact.PATH, "/caption"))
    spools = (tmp_path / "vllm", tmp_path / "other", busy)
    requests = [spans for spool in spools for spans in spans_of(spool).values()]
    tables = [
        (names.REQUEST_SPAN, [root.attributes for root, *_ in requests]),
        (names.STAGE_SPAN, [span.attributes for _, *stages in requests for span in stages]),
        (names.STEP, [span.attributes for span in of_steps]),
        (names.RESOURCE, [root.resource.attributes for root, *_ in requests]),
    ]
    sdk = {"telemetry.sdk.language", "telemetry.sdk.name", "telemetry.sdk.version"}
    for table, found in tables:
        assert {name for each in found for name in each} - sdk == set(table)
        for each in found:
            for name, value in each.items():
                assert name in sdk or type(value) is table[name].type, name
        assert all(type(row.example) is row.type for row in table.values())


@pytest.mark.parametrize(
    "module",
    [
        *("_incubating.attributes.gen_ai_attributes", "attributes.http_attributes"),
        *("attributes.url_attributes", "attributes.error_attributes"),
        *("attributes.service_attributes", "attributes.telemetry_attributes"),
        *("_incubating.attributes.host_attributes", "_incubating.attributes.process_attributes"),
    ],
)
def test_names_are_the_conventions(module):
    """Names that are not ours are in OpenTelemetry's own package, but for what is newer than it."""
    registered = vars(import_module(f"opentelemetry.semconv.{module}")).values()
    prefix = {"gen_ai_": "gen_ai.", "http_at": "http."}.get(module.split(".")[-1][:7])
    prefix = prefix or module.split(".")[-1].removesuffix("_attributes") + "."
    ours = {name for name in names.REQUEST_SPAN | names.RESOURCE if name.startswith(prefix)}
    assert ours
    assert ours - set(map(str, registered)) <= {"gen_ai.usage.image.input_tokens"}


def test_other_services(tmp_path):
    """What another server records through the API is a request of that service, by its path."""
    recorder = Recorder(tmp_path)
    recorder.announce(RecordKind.PROCESS_FACT, Fact.SERVICE, "captioner")
    with_fact(tmp_path, (Fact.PATH, "/caption"), recorder=recorder)
    (root, *_) = spans_of(tmp_path)["1"]
    assert root.resource.attributes["service.name"] == root.attributes["gen_ai.provider.name"] == "captioner"
    assert root.attributes["url.path"] == "/caption"
    assert not root.attributes.keys() & {"http.route", "http.request.method", "gen_ai.operation.name"}


def test_every_traced_path_has_an_operation():
    """Each path whose requests are traced has an operation's name."""
    assert names.OPERATIONS.keys() == PATHS.keys()


def test_page_of_attributes_is_made_of_the_tables():
    """``docs/attributes.md`` is what the tool writes from the tables."""
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "write_attributes.py"))
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"]()


def test_resource_of_the_service(tmp_path, monkeypatch):
    """It tells the host, and one spool there from another, the same after a restart; the variables win."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=7")
    one, again, other = (service_resource(tmp_path / name).attributes for name in ("a", "a", "b"))
    assert one == again
    assert one["service.instance.id"] != other["service.instance.id"]
    assert one["host.name"] == socket.gethostname()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine,host.name=theirs")
    told = service_resource(tmp_path).attributes
    assert (told["service.instance.id"], told["host.name"]) == ("mine", "theirs")
