"""A small server that speaks as vLLM does, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web


@dataclass
class Spoken:
    """What the server was asked, and how it is to answer."""

    url: str = ""
    requests: list[dict] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    arrived_ns: list[int] = field(default_factory=list)
    delay_s: float = 0.0
    status: int = 200
    fault: str | None = None


def event(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}).encode() + b"\n\n"


async def complete(request: web.Request) -> web.StreamResponse:
    spoken = request.app[SPOKEN]
    spoken.arrived_ns.append(time.monotonic_ns())
    body = await request.json()
    spoken.requests.append(body)
    spoken.headers.append(request.headers)
    await asyncio.sleep(spoken.delay_s)
    if spoken.status != 200:
        return web.json_response({"error": "no"}, status=spoken.status)
    if not body["stream"]:
        return web.json_response({"choices": [{"message": {"content": "abc"}}]})
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    await response.write(event(""))
    for _ in range(3):
        await response.write(event("a"))
    if spoken.fault == "server":
        await response.write(b'data: {"error": {"message": "engine died"}}\n\n')
    if spoken.fault != "truncated":
        await response.write(b"data: [DONE]\n\n")
    return response


async def models(_request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "tiny"}]})


async def tokenize(request: web.Request) -> web.Response:
    return web.json_response({"tokens": [ord((await request.json())["prompt"])]})


SPOKEN = web.AppKey("spoken", Spoken)


async def serve(spoken: Spoken, ready: threading.Event, stop: asyncio.Event) -> None:
    app = web.Application()
    app[SPOKEN] = spoken
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    spoken.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    ready.set()
    await stop.wait()
    await runner.cleanup()


@pytest.fixture
def spoken():
    spoken, ready = Spoken(), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(spoken, ready, stop)))
    thread.start()
    assert ready.wait(10)
    yield spoken
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()
