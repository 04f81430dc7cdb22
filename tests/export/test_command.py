"""The command: a spool goes to real receivers, and what went, what did not and why is said in a few lines."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from receivers import attributes, grpc_receiver, http_receiver

from stagetrace import Recorder, partition, read_spool
from stagetrace.cli import main
from stagetrace.records import Fact, RecordKind
from stagetrace_export.closed import POSITION_FILE

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
MS = 1_000_000
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
WRITE = "import sys; from pathlib import Path; from busy_spool import write_spool; write_spool(Path(sys.argv[1]), int(sys.argv[2]))"


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """No setting of the surroundings, and little patience."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    for each in logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").filters:
        each.last_log = None  # what it said in another test, it would not say again
    return monkeypatch


@pytest.fixture(scope="module")
def busy(tmp_path_factory):
    """A spool of a server whose processes have ended, as they end."""
    return write(tmp_path_factory.mktemp("busy") / "spool", 60)


def write(folder, requests):
    """Have another process write a spool, and end."""
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", WRITE, folder, str(requests)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    return folder


def sizes(spool):
    """How many requests and how many spans a spool has, by the dataset's own reader."""
    requests = read_spool(spool).requests
    return len(requests), sum(1 + len(partition(request).completion) for request in requests)


def export(*arguments):
    """Run the command as a user does; returns its exit code."""
    return main(["export", *map(str, arguments)])


@pytest.mark.parametrize(("protocol", "receive"), [("grpc", grpc_receiver), ("http/protobuf", http_receiver)])
def test_all_that_is_recorded_arrives(busy, settings, capsys, protocol, receive):
    """Every request of a spool arrives with all its stages, and one line says how many did."""
    with receive() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert export(busy) == 0
        requests, spans = sizes(busy)
        assert len(receiver.spans) == spans
        assert sum(span.kind == span.SPAN_KIND_SERVER for span in receiver.spans) == requests
        once = sorted(span.span_id for span in receiver.spans)
        assert export(busy) == 0
        assert sorted(span.span_id for span in receiver.spans) == sorted(once * 2)
    told = f"stagetrace: {spans} spans of {requests} requests went to {receiver.endpoint}\n"
    assert capsys.readouterr().err == told * 2


def test_several_spools_into_a_file(busy, tmp_path, capsys):
    """Several spools go one after the other into one file, which is not overwritten."""
    other = write(tmp_path / "other", 6)
    to = tmp_path / "traces.jsonl"
    assert export(busy, other, "--to", f"file:{to}") == 0
    found = [
        span
        for line in to.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert len(found) == sizes(busy)[1] + sizes(other)[1]
    said = capsys.readouterr().err
    assert said == f"stagetrace: {len(found)} spans of 66 requests went to {to}\n"
    assert export(busy, "--to", f"file:{to}") == 2
    assert export(busy, "--to", f"file:{to}", "--force") == 0
    assert "exists" in capsys.readouterr().err


def test_steps(busy, tmp_path, capsys):
    """With ``--steps`` the engine's steps come along, and are counted."""
    assert export(busy, "--to", "none", "--steps") == 0
    steps = sum(len(steps.steps) for steps in read_spool(busy).engines)
    assert f" requests and of {steps} steps went to none" in capsys.readouterr().err


def test_console(busy):
    """The console exporter prints every span, as the SDK has it; nothing else is printed there."""
    ran = subprocess.run(
        [sys.executable, "-m", "stagetrace", "export", busy, "--to", "console"],
        capture_output=True,
        text=True,
        check=True,
    )
    decoder, at, spans = json.JSONDecoder(), 0, []
    while at < len(ran.stdout.rstrip()):
        span, at = decoder.raw_decode(ran.stdout, at)
        spans.append(span)
        at += 1
    assert len(spans) == sizes(busy)[1]


def record(folder, *flags):
    """Record a short request for each of the flags of a client's trace."""
    recorder = Recorder(folder)
    for number, flag in enumerate(flags):
        recorder.record_at(MS, RecordKind.RECEIVED, number)
        recorder.record_at(MS, RecordKind.FACT_TEXT, number, Fact.TRACEPARENT, recorder.define(TRACE + flag))
        recorder.record_at(2 * MS, RecordKind.LAST_BYTE, number)
        recorder.record_at(2 * MS, RecordKind.ENDED, number)


def test_traces_that_are_not_sampled_are_left_out(tmp_path, settings, capsys):
    """Requests of clients that do not sample their trace are counted and not sent, unless all are wanted."""
    record(tmp_path / "spool", "01", "00", "00")
    with grpc_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert export(tmp_path / "spool") == 0
        assert [span.name for span in receiver.spans] == ["request", "receive"]
        said = capsys.readouterr().err.splitlines()
        assert said[1] == "stagetrace: set aside: 2 parent not sampled"
        assert export(tmp_path / "spool", "--all") == 0
        assert len(receiver.spans) == 2 + 6
        assert "set aside" not in capsys.readouterr().err


def test_class_rules(busy, tmp_path, settings):
    """Requests have the traffic class that the given rules give them."""
    rules = tmp_path / "classes.toml"
    rules.write_text('[[class]]\nname = "pictures"\nwhere = { modality = "image" }\n')
    with grpc_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        export(busy, "--classes", rules)
        classes = {attributes(span).get("stagetrace.class") for span in receiver.spans}
    assert classes == {None, "pictures", "other"}


@pytest.mark.parametrize(("protocol", "timeout"), [("grpc", "0.5"), ("http/protobuf", "2")])
def test_nobody_at_the_endpoint(busy, settings, capsys, protocol, timeout):
    """A receiver that is not there is one line that names it and the reason."""
    settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    settings.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", timeout)
    assert export(busy) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stagetrace: http://127.0.0.1:9 does not take the spans: ")
    assert "onnection refused" in line
    assert line.endswith("(hint: look at the variables that begin with OTEL_EXPORTER_OTLP)")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("headers", ["Bearer s3cr3t", "authorization=Bearer s3cr3t\n"])
def test_secrets_are_not_told(busy, settings, capfd, protocol, headers):
    """Neither headers that cannot be read or sent, nor what an endpoint has of a user and a key, is ever printed."""
    settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:pa55word@127.0.0.1:9/?key=k3yk3y")
    settings.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    settings.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    assert export(busy) == 2
    told = "".join(capfd.readouterr())
    assert told.startswith("stagetrace: http://127.0.0.1:9/ does not take the spans: ")
    assert not {word for word in ("s3cr3t", "pa55word", "k3yk3y") if word in told}, told


def test_disk_that_is_full(busy, capsys):
    """It is one line and exit code 2, also when the file is closed."""
    assert export(busy, "--to", "file:/dev/full", "--force") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stagetrace: /dev/full does not take the spans: No space left on device")


@pytest.mark.parametrize("name", ["OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"])
def test_numbers_that_are_too_large(busy, settings, capsys, name):
    """A number that nothing can be made of is one line that names the variable."""
    settings.setenv(name, "9" * 20)
    assert export(busy, "--follow", "--to", "none") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"stagetrace: {name}=9999")


def test_what_went_before_a_failure_is_told(busy, settings, capsys):
    """When the receiver stops taking spans in between, it is said how many it has."""
    settings.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    settings.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with http_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        takes = receiver.takes
        receiver.takes = lambda *sent: len(receiver.traces) < 3 and takes(*sent)
        settings.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
        assert export(busy) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        f"stagetrace: 150 spans went to {receiver.endpoint}, which then took no more"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], "no segments here"),
        ([".", "--prometheus", "127.0.0.1:0"], "--prometheus needs --follow"),
        ([".", "--until-ended"], "--until-ended needs --follow"),
        ([".", "..", "--follow"], "--follow takes one spool"),
        ([".", "--grace", "0"], "--grace needs --follow"),
        ([".", "--follow", "--grace", "-1"], "--grace -1: no time to wait"),
        ([".", "--follow", "--grace", "inf"], "--grace inf: no time to wait"),
        ([".", "--follow", "--force"], "--force would lose what was sent before"),
        ([".", "--follow", "--grace", "nan"], "--grace nan: no time to wait"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, told):
    """A user's mistake is one line and exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert export(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_no_requests(tmp_path, capsys):
    """A spool without a request that has ended is not enough; what is under way is counted."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    assert export(tmp_path, "--to", "none") == 3
    told = "stagetrace: 0 spans of 0 requests went to none\nstagetrace: set aside: 1 open\n"
    assert capsys.readouterr().err == told
    recorder.record(RecordKind.ENDED, 1)
    assert export(tmp_path, "--to", "none") == 0


def test_page_names_every_option(capsys):
    """The page of the command names every option that its help shows, and no other."""
    with pytest.raises(SystemExit):
        export("--help")
    shown = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE.read_text(encoding="utf-8"))) == shown


def test_python_of_the_page_runs(busy, tmp_path, monkeypatch, capsys):
    """The page's Python example prints every span of a spool."""
    (example,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "stagetrace-demo").mkdir()
    (tmp_path / "stagetrace-demo" / "spool").symlink_to(busy)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, PAGE.name, "exec"), {})  # noqa: S102 - it is our own page
    assert len(capsys.readouterr().out.splitlines()) == sizes(busy)[1]


# --- live ---


def test_follow_until_the_server_has_ended(busy, settings, capsys):
    """Following ends with the server, has sent what exporting once sends, and a restart sends nothing again."""
    (busy / POSITION_FILE).unlink(missing_ok=True)
    with grpc_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        settings.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        assert export(busy, "--follow", "--until-ended") == 0
        live = {span.span_id: span for span in receiver.spans}
        assert len(live) == len(receiver.spans) == sizes(busy)[1]
        assert export(busy, "--follow", "--until-ended") == 0
        assert len(receiver.spans) == len(live)
        assert export(busy) == 0
        assert {span.span_id: span for span in receiver.spans[len(live) :]} == live
        assert "stagetrace.requests" in receiver.last_metrics
    assert f"{len(live)} spans of" in capsys.readouterr().err


def test_metrics_go_where_spans_go(busy, tmp_path, settings):
    """When the variable sends spans elsewhere, metrics do not go over OTLP unless they are asked for."""
    settings.setenv("OTEL_TRACES_EXPORTER", "none")
    with grpc_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        assert export(busy, "--follow", "--until-ended", "--position", tmp_path / "one") == 0
        assert not receiver.metrics
        settings.setenv("OTEL_METRICS_EXPORTER", "otlp")
        assert export(busy, "--follow", "--until-ended", "--position", tmp_path / "other") == 0
        assert "stagetrace.requests" in receiver.last_metrics


def test_follow_with_metrics_until_told_to_stop(busy, tmp_path):
    """Beside the spans a page of metrics is served; on SIGTERM the command says what it did and ends well."""
    arguments = [busy, "--follow", "--to", f"file:{tmp_path / 'traces.jsonl'}", "--prometheus", "127.0.0.1:0"]
    running = subprocess.Popen(
        [sys.executable, "-m", "stagetrace", "export", *arguments, "--position", tmp_path / "position"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        page = re.search(r"http://\S+", running.stderr.readline())[0]
        requests, spans = sizes(busy)
        while counted_on(page) < requests:
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 0
    assert f"{spans} spans of {requests} requests went to {tmp_path / 'traces.jsonl'}" in said


def counted_on(page):
    """How many requests a page of metrics tells of."""
    with urllib.request.urlopen(page, timeout=5) as answer:  # noqa: S310 - it is our own
        found = answer.read().decode()
    counted = re.findall(r"^stagetrace_requests_total{.*} (\d+)", found, flags=re.MULTILINE)
    return sum(map(int, counted))


def test_follow_says_why_it_waits(busy, tmp_path, settings):
    """A receiver that is away is named with the reason, once; what it missed arrives when it is there."""
    from stagetrace_export import command

    settings.setattr(command, "say", (said := []).append)
    settings.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.7")
    settings.setenv("OTEL_METRICS_EXPORTER", "none")
    settings.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with grpc_receiver() as receiver:
        settings.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        receiver.refuse = 1
        position = tmp_path / "position"
        assert export(busy, "--follow", "--until-ended", "--position", position) == 0
        assert len({span.span_id for span in receiver.spans}) == sizes(busy)[1]
    assert said[0].startswith(f"{receiver.endpoint} does not take the spans: ")
    assert said[-1].startswith(f"{sizes(busy)[1]} spans of ")
    assert len(set(said)) == len(said)
