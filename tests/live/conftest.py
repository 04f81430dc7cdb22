"""One real vLLM server for all live tests of a run."""

from __future__ import annotations

import asyncio
import contextlib
import time

import needs
import pytest
from pacing import Pace

from stagetrace import read_spool
from stagetrace.spool import is_spool


def pytest_collection_modifyitems(items):
    """Everything in this folder is live, and may take its time."""
    for item in items:
        if "tests/live/" in item.path.as_posix():
            item.add_marker(pytest.mark.live)
            item.add_marker(pytest.mark.timeout(600))


class LiveServer:
    """A running server, its process, its spool, where it fetches images, and the pace of its steps."""

    def __init__(self, process, spool, media, pace):
        self.process, self.url = process, process.url
        self.spool, self.media, self.paced = spool, media, pace.paced
        self.visible = asyncio.run(visible_text(self.url, media))
        self.may_end = False

    def read(self):
        """All that has been recorded until now."""
        return read_spool(self.spool)

    def requests(self, phase, count):
        """The ended requests of a phase, once there are as many as were sent."""
        deadline = time.monotonic() + 30
        while True:
            found = [r for r in self.read().requests if r.facts.get("phase") == phase]
            if len(found) >= count or time.monotonic() > deadline:
                assert len(found) == count
                return found
            time.sleep(0.1)

    def wait_for(self, condition, seconds=60):
        """Look at the growing spool until a condition on it holds; return what it gave."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition(self.read()) if is_spool(self.spool) else None
            if found:
                return found
            time.sleep(0.01)
        raise AssertionError("the server did not come to the awaited point")


async def visible_text(url, media):
    """Request parameters under which a random model answers in letters, so that every token is text."""
    from stagetrace_analyzer.demo.client import Client

    async with Client(url, media) as client:
        return client._constant


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory):
    """The demonstration's model: encoding an image costs clearly more than its prefill."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import DEMO, make_model

    return make_model(tmp_path_factory.mktemp("model") / "demo", DEMO)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """Starts a server with the plug-in; a context manager."""
    from stagetrace_analyzer.demo.media import MediaServer
    from stagetrace_analyzer.demo.server import VllmServer

    @contextlib.contextmanager
    def start(model, *arguments, environment=None):
        folder = tmp_path_factory.mktemp("server")
        log, spool, pace = folder / "log", folder / "spool", Pace(folder)
        with (
            MediaServer() as media,
            VllmServer(
                model,
                log,
                spool=spool,
                arguments=(*pace.arguments, *arguments),
                environment=pace.environment(environment),
            ) as server,
        ):
            server.wait_ready()
            live = LiveServer(server, spool, media, pace)
            yield live
            if not live.may_end:
                server.check_alive()

    return start


@pytest.fixture(scope="session")
def live_server(demo_model, start_server):
    """A server with the plug-in and four seats."""
    with start_server(demo_model, "--max-num-seqs=4") as server:
        yield server
