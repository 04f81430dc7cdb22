"""Spans of a real server's requests, in real receivers."""

from __future__ import annotations

import asyncio
import os
import time

import aiohttp
import duckdb
import pytest
from receivers import attributes, grpc_receiver, http_receiver
from scenes import COMPLETIONS, body, small_image, words

from stagetrace import Outcome
from stagetrace.cli import main
from stagetrace_analyzer.ingest import ingest_spool

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROTOCOLS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}


@pytest.fixture
def settings(monkeypatch):
    """No setting of the surroundings."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def send(server, phase, requests):
    """Send requests at once, each a label, a body and more headers; returns their statuses."""

    async def one(session, label, request, headers):
        told = {"baggage": f"stagetrace.phase={phase},stagetrace.label={label}"} | headers
        url = server.url + COMPLETIONS
        async with session.post(url, json=server.visible | request, headers=told) as response:
            await response.read()
            return response.status

    async def all_at_once():
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(one(session, *request) for request in requests))

    return asyncio.run(all_at_once())


def parent(flags, trace=TRACE):
    """The header of a client that traces."""
    return {"traceparent": f"00-{trace}-{PARENT}-{flags}"}


@pytest.fixture(scope="module")
def exported(live_server):
    """Requests of every modality, streamed and not, with and without a parent, one of them refused."""
    requests = [
        ("text", body(words(20), max_tokens=6), {}),
        ("text", body(words(20), max_tokens=6, stream=True), parent("01")),
        ("image", body(small_image(), words(5), max_tokens=6, stream=True), {}),
        ("image", body(small_image(), small_image(), words(5), max_tokens=6), parent("01", "1" * 32)),
        ("refused", body(words(20), max_tokens=-1), {}),
        ("unsampled", body(words(20)), parent("00", "2" * 32)),
    ]
    assert send(live_server, "export", requests) == [200, 200, 200, 200, 400, 200]
    return live_server.requests("export", len(requests))


def export(spool, receiver, settings, protocol="grpc"):
    """Export a spool once; returns the decoded spans of the phase, root and stages, by the request's id."""
    settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    assert main(["export", str(spool)]) == 0
    roots = {
        span.span_id: span for span in receiver.spans if attributes(span).get("stagetrace.phase") == "export"
    }
    children = {span_id: [] for span_id in roots}
    for span in receiver.spans:
        children.get(span.parent_span_id, []).append(span)
    return {
        attributes(root)["stagetrace.request.id"]: (root, children[span_id])
        for span_id, root in roots.items()
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_are_the_datasets_intervals(live_server, exported, settings, tmp_path, protocol):
    """What a receiver decodes is, to the nanosecond, the completion horizon that the dataset has of each request."""
    ingest_spool(live_server.spool, tmp_path / "dataset")
    with PROTOCOLS[protocol]() as receiver:
        found = export(live_server.spool, receiver, settings, protocol)
    wanted = {r.request_id: r for r in exported if r.facts["label"] != "unsampled"}
    assert found.keys() == wanted.keys()
    rows = duckdb.sql(
        "SELECT request_id, stage, kind, reason, horizon, occurrence, item, first_step, last_step, "
        f"received_unix_ns + begin_ns, duration_ns FROM '{tmp_path}/dataset/stages/*.parquet' "
        f"JOIN '{tmp_path}/dataset/requests/*.parquet' USING (request) "
        "WHERE horizon <> 'ttft' AND phase = 'export' AND label <> 'unsampled'"
    ).fetchall()
    names = ["stage", "kind", "reason", "horizon", "occurrence", "item", "step.first", "step.last"]
    spans = [
        (
            request_id,
            *(attributes(span).get(f"stagetrace.{name}") for name in names),
            span.start_time_unix_nano,
            span.end_time_unix_nano - span.start_time_unix_nano,
        )
        for request_id, (_, stages) in found.items()
        for span in stages
    ]
    assert len(rows) > 30
    assert sorted(spans, key=repr) == sorted(rows, key=repr)


def test_facts_of_real_requests(live_server, exported, settings):
    """Operation, model, tokens, route, status and versions are those of the server; a refusal is the client's."""
    with grpc_receiver() as receiver:
        found = export(live_server.spool, receiver, settings)
        resources = {attributes(resource.resource)["stagetrace.role"]: attributes(resource.resource)
                     for request in receiver.traces for resource in request.resource_spans}  # fmt: skip
    import vllm

    assert {resource["service.version"] for resource in resources.values()} == {vllm.__version__}
    assert {resource["service.name"] for resource in resources.values()} == {"vllm"}
    assert resources.keys() == {"api", "engine"}
    for request in exported:
        if request.request_id not in found:
            continue
        root, stages = found[request.request_id]
        told = attributes(root)
        assert (told["http.route"], told["gen_ai.operation.name"]) == (COMPLETIONS, "chat")
        assert told["stagetrace.outcome"] == request.outcome.value
        if request.outcome is Outcome.ERROR:
            assert (root.name, told["error.type"], told["http.response.status_code"]) == ("chat", "400", 400)
            assert root.status.code == root.status.STATUS_CODE_UNSET
            continue
        assert root.name == "chat tiny"
        assert told["gen_ai.response.id"].startswith("chatcmpl-")
        assert told["gen_ai.usage.output_tokens"] == told["gen_ai.request.max_tokens"] == 6
        assert told["gen_ai.response.finish_reasons"] == ("length",)
        assert told.get("gen_ai.usage.image.input_tokens") == (208 * len(request.items) or None)
        assert told.get("gen_ai.request.stream", False) is request.facts["stream"]
        (event,) = root.events
        assert event.time_unix_nano - root.start_time_unix_nano == request.first_useful - request.received
        assert any("stagetrace.step.first" in attributes(span) for span in stages)


def test_the_clients_trace_is_joined(live_server, exported, settings, capsys):
    """A request with a ``traceparent`` lies below the client's span; one that is not sampled is left out and counted."""
    with grpc_receiver() as receiver:
        found = export(live_server.spool, receiver, settings)
    joined = {r.request_id: r.facts["traceparent"] for r in exported if "traceparent" in r.facts}
    assert len(joined) == 3
    for request_id, (root, stages) in found.items():
        _, trace, span, _ = joined.get(request_id, "00---").split("-")
        assert root.parent_span_id.hex() == span
        assert {each.trace_id for each in stages} == {root.trace_id}
        assert (root.trace_id.hex() == trace) is (request_id in joined)
    assert "parent not sampled" in capsys.readouterr().err


def test_beside_the_servers_own_tracing(demo_model, start_server, settings):
    """With vLLM's own tracing on, its span of a request and ours are siblings below the client's span."""
    with (
        grpc_receiver() as receiver,
        start_server(
            demo_model,
            f"--otlp-traces-endpoint={receiver.endpoint}",
            environment={"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_SERVICE_NAME": "vllm-itself"},
        ) as server,
    ):
        request = body(small_image(), words(5), max_tokens=4)
        assert send(server, "export", [("image", request, parent("01"))]) == [200]
        (recorded,) = server.requests("export", 1)
        deadline = time.monotonic() + 30
        while not (theirs := [span for span in receiver.spans if span.name == "llm_request"]):
            assert time.monotonic() < deadline, "the server has sent no span"
            time.sleep(0.1)
        found = export(server.spool, receiver, settings)
    ((root, stages),) = found.values()
    (span,) = theirs
    assert root.trace_id.hex() == span.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == span.parent_span_id.hex() == PARENT
    assert root.span_id != span.span_id
    assert recorded.facts["external_id"] == attributes(root)["gen_ai.response.id"]
    # It begins when the request has been received, and ends with its last token.
    assert root.start_time_unix_nano < span.start_time_unix_nano
    assert span.end_time_unix_nano < root.end_time_unix_nano
    assert {stage.name for stage in stages} >= {"receive", "encode", "prefill", "decode", "respond"}
