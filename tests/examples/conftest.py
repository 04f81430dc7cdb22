"""The captioner as a real process with a spool, and who talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagetrace import read_spool
from stagetrace.attributes import SPOOL_VARIABLE
from stagetrace.spool import is_spool

EXAMPLES = Path(__file__).parents[2] / "examples"


def pytest_collection_modifyitems(items):
    """What needs the server is live, and may take its time."""
    for item in items:
        if "tests/examples/" in item.path.as_posix() and "start_captioner" in item.fixturenames:
            item.add_marker(pytest.mark.live)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session", autouse=True)
def _examples_can_be_imported():
    """A reader runs the examples in their folder."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


class Captioner:
    """A running captioner, and the folder that it records into."""

    def __init__(self, url, spool):
        self.url, self.spool = url, spool

    def read(self):
        """All that has been recorded until now."""
        return read_spool(self.spool)

    async def until(self, condition, seconds=30):
        """Look at the growing spool until a condition on it holds; return what it gave."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition(self.read()) if is_spool(self.spool) else None
            if found:
                return found
            await asyncio.sleep(0.01)
        raise AssertionError("the server did not come to the awaited point")

    async def ended(self, phase, count):
        """The requests of a phase, once so many have ended and none is open."""

        def found(data):
            mine = [request for request in data.requests if request.facts.get("phase") == phase]
            still_open = any(request.facts.get("phase") == phase for request in data.open_requests)
            return mine if len(mine) >= count and not still_open else None

        requests = await self.until(found)
        assert len(requests) == count
        return requests


@pytest.fixture(scope="session")
def start_captioner(tmp_path_factory):
    """Starts a captioner; a context manager."""
    for needed in ("fastapi", "httpx", "torch", "uvicorn"):
        pytest.importorskip(needed, reason="needs what examples/captioner/requirements.txt lists")

    @contextlib.contextmanager
    def start(*arguments):
        folder = tmp_path_factory.mktemp("captioner")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "captioner", f"--port={port}", "--device=cpu", *arguments],
                cwd=EXAMPLES,
                env=os.environ | {SPOOL_VARIABLE: str(folder / "spool")},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            _wait_ready(process, port, folder / "log")
            yield Captioner(f"http://127.0.0.1:{port}", folder / "spool")
            assert process.poll() is None, (folder / "log").read_text()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    return start


def _wait_ready(process, port, log, seconds=60):
    """Wait until the server takes connections."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError("the captioner did not start")


@pytest.fixture(scope="session")
def captioner(start_captioner):
    """A captioner whose decoding and encoding take one image at a time."""
    with start_captioner("--decode-threads=1", "--encoder-batch=1") as server:
        yield server
