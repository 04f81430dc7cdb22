"""From an address to pixels: fetching on the event loop, decoding in a pool of threads."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx
import torch
from PIL import Image
from torch import Tensor

import stagetrace
from captioner.models import SIDE
from stagetrace import Stage

_TIMEOUT_S: Final = 30.0


class MediaError(Exception):
    """A picture that cannot be had; the message goes to the client."""

    status = 422


class UnreachableError(MediaError):
    """The server that should have the picture does not give it."""

    status = 502


class MediaLoader:
    """Loads pictures from ``http``, ``https`` and ``data`` addresses.

    Args:
        threads: Threads that decode.
        max_bytes: Size of the largest file that is fetched.
    """

    def __init__(self, threads: int, max_bytes: int) -> None:
        self._client = httpx.AsyncClient(follow_redirects=True, timeout=_TIMEOUT_S)
        self._pool = ThreadPoolExecutor(threads, "decode")
        self._max_bytes = max_bytes

    async def load(self, url: str, item: int) -> tuple[Tensor, stagetrace.Ticket]:
        """Return the pixels ``[3, SIDE, SIDE]`` of a picture, floats from 0 to 1; it waits for the encoder.

        Raises:
            MediaError: It cannot be reached, or it is no picture.
        """
        if url.startswith("data:"):
            content = url.encode()
        else:
            async with stagetrace.stage(Stage.RETRIEVAL, item):
                content = await self._fetch(url)
        stagetrace.item(item, modality="image", url=url, bytes=len(content))
        ticket = stagetrace.wait(Stage.MEDIA_DECODE, item)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _decode_for, ticket, content, item)

    async def close(self) -> None:
        """Close connections and pool."""
        await self._client.aclose()
        self._pool.shutdown(cancel_futures=True)

    async def _fetch(self, url: str) -> bytes:
        content = bytearray()
        try:
            async with self._client.stream("GET", url) as response:
                response.raise_for_status()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > self._max_bytes:
                        raise MediaError(f"an image is larger than {self._max_bytes} bytes")
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise MediaError("an image has an address that is not http, https or data") from error
        except httpx.HTTPError as error:
            raise UnreachableError(f"an image could not be fetched ({type(error).__name__})") from error
        return bytes(content)


def _decode(content: bytes) -> Tensor:
    try:
        if content.startswith(b"data:"):
            content = base64.b64decode(content.partition(b",")[2], validate=True)
        with Image.open(io.BytesIO(content)) as image:
            small = image.convert("RGB").resize((SIDE, SIDE))
    except (OSError, ValueError, binascii.Error, Image.DecompressionBombError) as error:
        raise MediaError(f"an image cannot be decoded ({type(error).__name__})") from error
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return pixels.view(SIDE, SIDE, 3).permute(2, 0, 1).float() / 255


def _decode_for(ticket: stagetrace.Ticket, content: bytes, item: int) -> tuple[Tensor, stagetrace.Ticket]:
    with ticket.work():
        return _decode(content), stagetrace.wait(Stage.ENCODE, item)
