"""Starting and stopping a server; a stub of it, with the process tree of the real one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from stagetrace.errors import ServerError
from stagetrace_analyzer.demo.server import DEFAULT_ARGUMENTS, VllmServer

STUB = f"""#!{sys.executable}
import http.server, json, os, signal, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
if "--die" in sys.argv:
    print("RuntimeError: no such model")
    print("a remark at exit", flush=True)
    sys.exit(3)
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--silent" in sys.argv:
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([sys.argv[1:], dict(os.environ)]).encode())

port = next(int(a.removeprefix("--port=")) for a in sys.argv if a.startswith("--port="))
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def make_server(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o700)

    def make(*arguments, **options):
        return VllmServer(
            Path("model"), tmp_path / "logs" / "server.log", arguments=arguments, python=str(stub), **options
        )

    return make


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and state(pid) != "Z"]


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def family_of(server, size=3):
    deadline = time.monotonic() + 10
    while len(server.pids()) < size:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return server.pids()


def ask(server):
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:  # noqa: S310  loopback
        return json.load(answer)


def test_leaving_stops_the_whole_tree(make_server):
    """Also the child that made a session of its own."""
    with make_server() as server:
        server.wait_ready(30)
        pids = family_of(server)
        assert len({os.getsid(pid) for pid in pids}) == 2
    assert alive(pids) == []
    assert server.pids() == ()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_stops_it_too(make_server, error):
    """Whatever happens inside, nothing is left."""
    pids = []

    def work():
        with make_server() as server:
            pids.extend(family_of(server))
            raise error

    with pytest.raises(error):
        work()
    assert pids
    assert alive(pids) == []


def test_a_server_that_does_not_listen_is_killed(make_server):
    """After the grace time."""
    with make_server("--deaf") as server:
        server.wait_ready(30)
        pids = family_of(server)
        server.stop(grace_s=0.2)
        assert alive(pids) == []


def test_children_of_a_server_that_died_are_found(make_server):
    """Its session outlives it."""
    with make_server() as server:
        server.wait_ready(30)
        leader, *children = family_of(server)
        kept, gone_astray = sorted(children, key=lambda pid: os.getsid(pid) != leader)
        os.kill(leader, signal.SIGKILL)
        with pytest.raises(ServerError, match="ended with signal 9"):
            server.wait_ready(30)
        os.kill(gone_astray, signal.SIGKILL)
        assert alive([kept]) == [kept]
    assert alive([kept]) == []


def test_a_server_that_dies_early_says_why(make_server):
    """One line: the exit code, the error from the log, and where the log is."""
    with make_server("--die") as server, pytest.raises(ServerError) as caught:
        server.wait_ready(30)
    assert caught.value.message == "the server ended with exit code 3: RuntimeError: no such model"
    assert caught.value.hint == f"its log is {server.log}"


def test_a_server_that_is_never_ready_is_given_up(make_server):
    """With the time it was given."""
    with make_server("--silent") as server, pytest.raises(ServerError, match=r"not ready after 0\.3 s"):
        server.wait_ready(0.3)


def test_an_interpreter_that_is_not_there_is_a_server_error(tmp_path):
    """Named, without a trace."""
    with pytest.raises(ServerError, match="cannot start /nowhere/python"):
        VllmServer(Path("model"), tmp_path / "log", python="/nowhere/python").start()


def test_a_server_that_was_not_started_can_be_asked_and_stopped(make_server):
    """Stopping is always allowed."""
    server = make_server()
    server.stop()
    assert server.pids() == ()
    with pytest.raises(ServerError, match="not started"):
        server.wait_ready(1)


def test_starting_twice_is_refused(make_server):
    """The first one would be lost."""
    with make_server() as server, pytest.raises(ServerError, match="runs already"):
        server.start()


def test_the_callers_arguments_come_last(make_server):
    """So they win over the defaults."""
    with make_server("--max-num-seqs=2") as server:
        server.wait_ready(30)
        arguments, _ = ask(server)
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert arguments[5:] == [*DEFAULT_ARGUMENTS, "--max-num-seqs=2"]


@pytest.mark.parametrize("spool", [None, Path("/var/spool/stagetrace")])
def test_the_spool_is_the_callers_only(make_server, monkeypatch, spool):
    """A spool of the surroundings is not recorded into by accident."""
    monkeypatch.setenv("STAGETRACE_SPOOL", "/somewhere/else")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with make_server(spool=spool, environment={"HF_HUB_OFFLINE": "0"}) as server:
        server.wait_ready(30)
        _, environment = ask(server)
    assert environment.get("STAGETRACE_SPOOL") == (spool and str(spool))
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert environment["no_proxy"] == environment["NO_PROXY"] == "example.org,127.0.0.1"
