"""Seeded images, and a small HTTP server that hands them out as slowly as asked."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlencode

import numpy as np
from aiohttp import web
from PIL import Image

from stagetrace.errors import ServerError

if TYPE_CHECKING:
    from types import TracebackType

DEFAULT_SIZE: Final = (320, 240)
"""Width and height of an image in pixels."""

DEFAULT_DELAY_MS: Final = 20
"""Time to the first byte of an image, in milliseconds: a store in the same region."""

_HOST: Final = "127.0.0.1"
_MAX_DELAY_MS: Final = 60_000
_MAX_EDGE_PIXELS: Final = 4096
_START_TIMEOUT_S: Final = 10.0
_SHUTDOWN_S: Final = 0.1  # aiohttp takes 0 for no limit


def make_jpeg(seed: int, size: tuple[int, int] = DEFAULT_SIZE) -> bytes:
    """Return a JPEG of smooth colour and noise; equal seeds give equal bytes.

    Args:
        seed: Not negative.
        size: Width and height in pixels.
    """
    rng = np.random.default_rng(seed)
    width, height = size
    down, across = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    corner, right, below = rng.uniform(0, 255, (3, 3))
    noise = rng.normal(0, 12, (height, width, 1))
    pixels = corner + (right - corner) * across + (below - corner) * down + noise
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def data_url(jpeg: bytes) -> str:
    """Return a JPEG as a ``data:`` address."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()


class MediaServer:
    """An HTTP server of seeded images on a loopback port, in a thread of its own.

    ``/image/<seed>.jpg`` answers with `make_jpeg`; the query may hold ``delay_ms``,
    ``width`` and ``height``.  A thread of its own, because the load runs in another
    event loop and must not be held up by drawing.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._port: int | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S) or self._port is None:
            raise ServerError("the image server did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()

    def url(
        self,
        seed: int,
        *,
        delay_ms: int = DEFAULT_DELAY_MS,
        size: tuple[int, int] = DEFAULT_SIZE,
    ) -> str:
        """Return the address of an image that arrives after ``delay_ms`` milliseconds."""
        query = urlencode({"delay_ms": delay_ms, "width": size[0], "height": size[1]})
        return f"http://{_HOST}:{self._port}/image/{seed}.jpg?{query}"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get(r"/image/{seed:\d+}.jpg", _image)
        # A fetch may be asleep when the server is told to stop; nobody waits for it any more.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, _HOST, 0)
            await site.start()
            self._port = runner.addresses[0][1]
            self._ready.set()
            await self._stop.wait()
        finally:
            self._ready.set()
            await runner.cleanup()


async def _image(request: web.Request) -> web.Response:
    delay_ms = _whole(request, "delay_ms", DEFAULT_DELAY_MS, _MAX_DELAY_MS)
    width = _whole(request, "width", DEFAULT_SIZE[0], _MAX_EDGE_PIXELS)
    height = _whole(request, "height", DEFAULT_SIZE[1], _MAX_EDGE_PIXELS)
    jpeg = make_jpeg(int(request.match_info["seed"]), (max(1, width), max(1, height)))
    await asyncio.sleep(delay_ms / 1000)
    return web.Response(body=jpeg, content_type="image/jpeg")


def _whole(request: web.Request, name: str, default: int, largest: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) <= largest):
        raise web.HTTPBadRequest(text=f"{name} must be a whole number up to {largest}")
    return int(text)
