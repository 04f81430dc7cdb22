"""The exporter that a server starts beside itself: when it is started, and that it outlives the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from receivers import http_receiver

from stagetrace.attributes import EXPORT_VARIABLE, SPOOL_VARIABLE
from stagetrace.process_records import has_died
from stagetrace_export import follow
from stagetrace_export.follow import LOCK_FILE
from stagetrace_vllm.export import LOG_FILE

SERVER = """
import multiprocessing, os, sys
from pathlib import Path
multiprocessing.current_process().name = sys.argv[2]
if sys.argv[1] == "hidden":
    sys.modules["opentelemetry"] = None
from stagetrace import Recorder
from stagetrace.records import RecordKind as K
from stagetrace_vllm.export import start_exporter
start_exporter()
recorder = Recorder(Path(os.environ.get("STAGETRACE_SPOOL", "nowhere")))
print("started", flush=True)
for line in sys.stdin:
    for number in range(int(line)):
        for kind in (K.RECEIVED, K.LAST_BYTE, K.ENDED):
            recorder.record(kind, number)
    print("recorded", flush=True)
"""


@pytest.fixture
def spool(tmp_path):
    """The folder of a spool; whoever exports it is killed at the end."""
    folder = tmp_path / "spool"
    yield folder
    with suppress(OSError, ValueError):
        os.kill(int((folder / LOCK_FILE).read_text()), signal.SIGKILL)


@contextmanager
def server(spool, receiver=None, *, export="otlp", packages="there", name="MainProcess"):
    """A process that starts an exporter as a vLLM server does, and records as many requests as it is told."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "STAGETRACE_"))}
    if spool is not None:
        environment[SPOOL_VARIABLE] = str(spool)
    if export is not None:
        environment[EXPORT_VARIABLE] = export
    if receiver is not None:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
    environment |= {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", SERVER, packages, name]
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "started\n"
            yield process
        finally:
            process.kill()


def record(process, count):
    """Have a server record requests."""
    process.stdin.write(f"{count}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "recorded\n"


def wait_for(condition, what, seconds=40):
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def exporter_of(spool):
    """The process id of the exporter that holds a spool's lock."""

    def read():
        with suppress(OSError, ValueError):
            pid = int((spool / LOCK_FILE).read_text())
            return None if has_died(pid) else pid
        return None

    return wait_for(read, "no exporter was started")


def stat(pid):
    """Parent, session and nice value of a process, see proc(5)."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[3]), int(fields[16])


def test_it_outlives_a_killed_server(spool):
    """It leaves the server's process tree and session; when the server is killed it exports the rest, and ends."""
    with http_receiver() as receiver, server(spool, receiver) as process:
        exporter = exporter_of(spool)
        parent, session, nice = stat(exporter)
        assert parent != process.pid
        assert session not in {exporter, os.getsid(process.pid)}
        assert nice == min(os.nice(0) + 10, 19)
        assert Path(f"/proc/{exporter}/fd/0").readlink() == Path(os.devnull)
        assert Path(f"/proc/{exporter}/fd/2").readlink() == spool / LOG_FILE
        assert (spool / LOG_FILE).stat().st_mode & 0o777 == 0o600
        record(process, 30)
        process.kill()
        wait_for(lambda: has_died(exporter), "the exporter did not end")
        assert sum(not span.parent_span_id for span in receiver.spans) == 30
    assert "30 requests" in (spool / LOG_FILE).read_text()


@pytest.mark.slow
def test_next_server_on_the_same_spool(spool):
    """While the receiver is away a server ends and another one begins; one exporter after the other serves both."""
    with http_receiver() as receiver:
        receiver.refuse = 1 << 30
        with server(spool, receiver) as first:
            exporter = exporter_of(spool)
            record(first, 5)
        time.sleep(1.5)
        with server(spool, receiver) as second:
            time.sleep(1)
            assert exporter_of(spool) == exporter
            assert f"waiting for process {exporter}, which" in (spool / LOG_FILE).read_text()
            receiver.refuse = 0
            record(second, 7)
            wait_for(lambda: len(roots(receiver)) == 12, "not all requests came")
        wait_for(lambda: len(roots(receiver)) == 12 and not is_exported(spool), "the exporter did not end")


def roots(receiver):
    """Ids of the spans of requests."""
    return {span.span_id for span in receiver.spans if not span.parent_span_id}


def is_exported(spool):
    """Whether somebody exports a spool."""
    return follow.exporter_of(spool) is not None


def test_server_that_records_nothing(spool):
    """An exporter whose server ends before its first request ends too."""
    with http_receiver() as receiver, server(spool, receiver) as process:
        exporter = exporter_of(spool)
        time.sleep(0.5)
        process.kill()
        wait_for(lambda: has_died(exporter), "the exporter did not end")
    assert "0 requests exported" in (spool / LOG_FILE).read_text()


@pytest.mark.parametrize("name", ["EngineCore_DP0", "VllmWorker-0", "ApiServer_1"])
def test_only_the_first_front_end_starts_it(spool, name):
    """No engine, no worker and no further front end starts an exporter."""
    with server(spool, name=name) as process:
        record(process, 1)
        time.sleep(0.3)
        assert not (spool / LOG_FILE).exists()


def test_without_a_spool(tmp_path):
    """Where nothing is recorded, nothing is exported, and nothing is said."""
    with server(None) as process:
        time.sleep(0.3)
        process.kill()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("value", ["yes", "jaeger", "otlp,console"])
def test_other_values(spool, value):
    """They are one log line, and nothing is exported."""
    with server(spool, export=value) as process:
        record(process, 1)
        time.sleep(0.3)
        assert not (spool / LOG_FILE).exists()
        process.kill()
        (line,) = process.stderr.read().splitlines()
    assert f"{EXPORT_VARIABLE}={value}" in line
    assert "hint: otlp" in line


def test_missing_extra(spool):
    """It is one log line that says what to install, and the server goes on."""
    with server(spool, packages="hidden") as process:
        record(process, 1)
        assert not (spool / LOG_FILE).exists()
        process.kill()
        (line,) = process.stderr.read().splitlines()
    assert "there is no opentelemetry.sdk" in line
    assert "pip install 'stagetrace[otlp]'" in line


def test_spool_that_cannot_be_made(tmp_path):
    """It is one log line, and the server goes on."""
    (tmp_path / "file").touch()
    with server(tmp_path / "file" / "spool") as process:
        record(process, 1)
        time.sleep(0.5)
        process.kill()
        (line,) = process.stderr.read().splitlines()
    assert "nothing is exported: " in line
    assert "Not a directory" in line


def test_log_is_bounded(tmp_path):
    """A log that has become too long begins anew, while it is written to."""
    code = (
        "import sys, threading, time; from stagetrace_export import detached as d;"
        "d.LOG_BYTES, d._LOG_LOOK_S = 1050, 0.01;"
        "threading.Thread(target=d._bound_log, daemon=True).start();"
        "[(sys.stderr.write('x' * 99 + '\\n'), sys.stderr.flush(), time.sleep(0.002)) for _ in range(300)];"
        # Whatever the last look has left, this is too short to be cut off.
        "time.sleep(0.5); sys.stderr.write('x\\n')"
    )
    with (tmp_path / "log").open("ab") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=True)
    content = (tmp_path / "log").read_bytes()
    assert 0 < len(content) < 10_000
    assert set(content) == set(b"x\n")
