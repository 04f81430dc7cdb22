"""Exporters: spans arrive in real receivers, as the standard variables say, or it is known that they did not."""

from __future__ import annotations

import base64
import json
import logging
import os

import pytest
from busy_spool import write_spool
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from receivers import attributes, counting_relay, grpc_receiver, http_receiver

from stagetrace import UsageError, partition, read_spool
from stagetrace_analyzer.classes import load_rules
from stagetrace_export.exporters import open_delivery
from stagetrace_export.spans import Origin, request_spans

PROTOCOLS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def spans(tmp_path_factory):
    """The spans of all requests of a busy server."""
    folder = tmp_path_factory.mktemp("busy") / "spool"
    write_spool(folder)
    data = read_spool(folder)
    origin = Origin.of(data, load_rules())
    return [span for r in data.requests for span in request_spans(r, partition(r), origin)]


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """No setting of the surroundings, and little patience."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    for each in logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters:
        each.last_log = None  # what it said in another test, it would not say again
    return monkeypatch


@pytest.fixture(params=PROTOCOLS)
def receiver(request, settings):
    """A receiver of each protocol, to which the variables lead."""
    with PROTOCOLS[request.param]() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        receiver.protocol = request.param
        yield receiver


def deliver(spans, to=None, **options):
    """Export spans; returns whether all were taken, how many were, and why the last were not."""
    with open_delivery(to, **options) as delivery:
        return delivery.export(spans), delivery.spans, delivery.reason


def test_every_span_arrives(receiver, spans):
    """A receiver decodes every span once, with the ids, times, kind, status and attributes it was made with."""
    assert deliver(spans)[:2] == (True, len(spans))
    found = {span.span_id.hex(): (resource, scope, span) for resource, scope, span in receiver.placed_spans}
    assert len(found) == len(receiver.spans) == len(spans) > 400
    for span in spans:
        resource, scope, got = found[f"{span.context.span_id:016x}"]
        assert got.trace_id.hex() == f"{span.context.trace_id:032x}"
        assert got.parent_span_id.hex() == ("" if span.parent is None else f"{span.parent.span_id:016x}")
        assert (got.name, got.start_time_unix_nano, got.end_time_unix_nano) == (
            span.name,
            span.start_time,
            span.end_time,
        )
        assert (got.kind, got.status.code) == (span.kind.value + 1, span.status.status_code.value)
        assert attributes(got) == dict(span.attributes)
        assert resource == dict(span.resource.attributes)
        assert scope.name == "stagetrace"


def test_batches_are_bounded(receiver, spans, settings):
    """No message holds more spans than the standard variable allows."""
    settings.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100")
    deliver(spans)
    sizes = [
        sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
        for request in receiver.traces
    ]
    assert sum(sizes) == len(spans)
    assert sizes[:-1] == [100] * (len(sizes) - 1)


def test_headers(receiver, spans, settings):
    """Headers of the variables reach the receiver."""
    settings.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue,authorization=Bearer%20abc")
    deliver(spans[:3])
    (headers,) = receiver.headers
    assert (headers["x-tenant"], headers["authorization"]) == ("blue", "Bearer abc")


def test_compression_over_http(spans, settings):
    """Over HTTP the body is compressed when the variable says so."""
    with http_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        deliver(spans[:50])
        settings.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        deliver(spans[:50])
        assert receiver.encodings == ["", "gzip"]
        sizes = [int(headers["content-length"]) for headers in receiver.headers]
        assert sizes[1] < 0.5 * sizes[0]
        assert receiver.traces[0] == receiver.traces[1]


def test_compression_over_grpc(spans, settings):
    """Over gRPC fewer than half as many bytes go over the wire when the variable says so."""
    sent = []
    with grpc_receiver() as receiver:
        for compression in ("none", "gzip"):
            if compression != "none":
                settings.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
            with counting_relay(receiver.endpoint) as (endpoint, counted):
                settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
                assert deliver(spans[:200])[0]
            sent.append(sum(counted))
        assert len(receiver.spans) == 400
    assert sent[1] < 0.5 * sent[0]


def test_variables_for_traces_win(receiver, spans, settings):
    """The variable for traces alone beats the one for all signals."""
    settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOBODY)
    path = "" if receiver.protocol == "grpc" else "/v1/traces"
    settings.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint + path)
    settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", next(p for p in PROTOCOLS if p != receiver.protocol))
    settings.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", receiver.protocol)
    assert deliver(spans[:3])[:2] == (True, 3)
    assert len(receiver.spans) == 3


def test_an_overloaded_receiver_is_asked_again(receiver, spans):
    """A batch that is refused for overload is sent again after a while, and arrives once."""
    receiver.refuse = 1
    assert deliver(spans[:9])[:2] == (True, 9)
    assert len(receiver.headers) == 2
    assert len(receiver.spans) == 9


def test_a_receiver_that_takes_too_long(receiver, spans, settings):
    """A batch that is not answered within the timeout was not taken, and what is behind it is not sent."""
    settings.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    settings.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    receiver.delay_s = 1.0
    taken, number, reason = deliver(spans[:20])
    assert (taken, number) == (False, 0)
    assert reason
    assert "\n" not in reason


@pytest.mark.parametrize(
    "case",
    [
        ("grpc", "0.5", "refused"),
        ("http/protobuf", "2", "refused"),
        ("http/protobuf", "0.5", "no connection, or no answer in time"),
    ],
)
def test_nobody_at_the_endpoint(spans, settings, case, capfd):
    """That nobody listens is known, by its reason when it was tried twice, and the SDK says nothing itself."""
    protocol, timeout, told = case
    settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOBODY)
    settings.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", timeout)
    taken, number, reason = deliver(spans[:3])
    assert (taken, number) == (False, 0)
    assert told in reason
    assert "\n" not in reason
    assert capfd.readouterr() == ("", "")


def test_wrong_path_over_http(spans, settings):
    """An endpoint that is another service's is told by its answer."""
    with http_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        settings.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", receiver.endpoint + "/elsewhere")
        taken, _, reason = deliver(spans[:3])
        assert not taken
        assert "404" in reason


def test_file(spans, tmp_path):
    """A file has a line of OTLP JSON a batch: ids in hexadecimal, 64-bit numbers as texts, enums as numbers."""
    path = tmp_path / "traces.jsonl"
    assert deliver(spans, f"file:{path}")[:2] == (True, len(spans))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [
        span
        for line in lines
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert len(found) == len(spans)
    by_id = {span["spanId"]: span for span in found}
    for span in spans:
        got = by_id[f"{span.context.span_id:016x}"]
        assert got["traceId"] == f"{span.context.trace_id:032x}"
        assert got.get("parentSpanId") == (None if span.parent is None else f"{span.parent.span_id:016x}")
        assert got["startTimeUnixNano"] == str(span.start_time)
        assert got["kind"] == span.kind.value + 1


def test_file_holds_what_a_receiver_is_sent(spans, tmp_path, settings):
    """A line, read by protobuf's own reader once the ids are as it wants them, is the message of the wire."""
    path = tmp_path / "traces.jsonl"
    with grpc_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        deliver(spans[:200])
        deliver(spans[:200], f"file:{path}")
        (line,) = path.read_text().splitlines()

        def in_base64(pairs):
            return {
                key: base64.b64encode(bytes.fromhex(value)).decode() if key.endswith("Id") else value
                for key, value in pairs
            }

        read = json_format.ParseDict(
            json.loads(line, object_pairs_hook=in_base64), ExportTraceServiceRequest()
        )
        assert read == receiver.traces[0]


def test_a_file_is_not_overwritten(spans, tmp_path):
    """A file that exists is left alone, unless it is to be continued or replaced."""
    path = tmp_path / "traces.jsonl"
    to = f"file:{path}"
    deliver(spans[:5], to)
    with pytest.raises(UsageError, match="exists"):
        open_delivery(to)
    deliver(spans[:5], to, append=True)
    assert len(path.read_text().splitlines()) == 2
    deliver(spans[:5], to, force=True)
    assert len(path.read_text().splitlines()) == 1
    with pytest.raises(UsageError, match="cannot write"):
        open_delivery(f"file:{tmp_path}/nowhere/traces.jsonl")


def test_a_full_disk_is_told(spans):
    """What cannot be written was not taken."""
    taken, number, reason = deliver(spans[:5], "file:/dev/full", append=True)
    assert (taken, number) == (False, 0)
    assert reason == "No space left on device"


def test_none_and_what_wins(spans, settings, capsys):
    """``none`` takes everything and sends nothing; what is asked for by hand beats the variable."""
    settings.setenv("OTEL_TRACES_EXPORTER", "console")
    assert deliver(spans[:4], "none")[:2] == (True, 4)
    assert capsys.readouterr().out == ""


def test_other_exporters_are_found_by_name(receiver, spans):
    """Any exporter that a package registers with OpenTelemetry can be named."""
    name = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}[receiver.protocol]
    assert deliver(spans[:4], name)[0]
    assert len(receiver.spans) == 4


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkim", "no exporter 'zipkim'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "unknown protocol"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli", "cannot be set up"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "cannot be set up"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0", "no number of spans"),
    ],
)
def test_wrong_settings(settings, variable, value, told):
    """A setting that cannot be understood is one line that names it."""
    settings.setenv(variable, value)
    with pytest.raises(UsageError, match=told) as error:
        open_delivery(None)
    assert "\n" not in str(error.value)
