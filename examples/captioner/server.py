"""The HTTP side: what a request may ask for, and how it is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from torch import Tensor

import stagetrace
from captioner.media import MediaError, MediaLoader
from captioner.models import VisionEncoder, Writer
from captioner.workers import EncoderWorker, WriterWorker
from stagetrace.asgi import TracingMiddleware


@dataclass(frozen=True, slots=True)
class Settings:
    """What an operator may choose."""

    decode_threads: int = 2
    encoder_batch: int = 4
    seats: int = 8
    max_requests: int = 256
    max_image_bytes: int = 64 << 20
    device: str = "cpu"


class CaptionRequest(BaseModel):
    """The body of a request."""

    prompt: Annotated[str, Field(min_length=1, max_length=2000)]
    images: Annotated[list[str], Field(max_length=128)] = []
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 32
    stream: bool = False


class Captioner:
    """Everything between a request and its caption."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        encoder, writer = VisionEncoder(), Writer()
        self._media = MediaLoader(settings.decode_threads, settings.max_image_bytes)
        self._encoder = EncoderWorker(encoder.eval().to(settings.device), settings.encoder_batch)
        self._writer = WriterWorker(writer.eval().to(settings.device), settings.seats)
        self._free = settings.max_requests

    async def caption(self, wanted: CaptionRequest) -> AsyncIterator[str]:
        """Load and encode all pictures, then yield the caption letter by letter."""
        if not self._free:
            raise HTTPException(503, "too many requests")
        self._free -= 1
        try:
            pictures = await self._embed_all(wanted.images)
            async for letter in self._writer.write(pictures, wanted.prompt, wanted.max_tokens):
                yield letter
        finally:
            self._free += 1

    async def close(self) -> None:
        """Let go of connections and threads."""
        await self._media.close()

    async def _embed_all(self, urls: list[str]) -> list[Tensor]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._embed(url, item)) for item, url in enumerate(urls)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _embed(self, url: str, item: int) -> Tensor:
        return await self._encoder.encode(*await self._media.load(url, item))


def create_app(settings: Settings) -> FastAPI:
    """Make the application, with models that are ready."""
    captioner = Captioner(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await captioner.close()

    app = FastAPI(title="captioner", lifespan=lifespan)
    app.add_middleware(TracingMiddleware, paths=["/caption"])

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/caption")
    async def caption(wanted: CaptionRequest) -> Response:
        stagetrace.facts(media_items=len(wanted.images), max_tokens=wanted.max_tokens, stream=wanted.stream)
        letters = captioner.caption(wanted)
        try:
            # The first one comes before the head of the answer, so that a failure has its status.
            first = await anext(letters)
        except MediaError as error:
            raise HTTPException(error.status, str(error)) from error
        if wanted.stream:
            return StreamingResponse(_events(first, letters), media_type="text/event-stream")
        return JSONResponse({"caption": first + "".join([letter async for letter in letters])})

    return app


async def _events(first: str, letters: AsyncIterator[str]) -> AsyncIterator[str]:
    yield _event({"text": first})
    async for letter in letters:
        yield _event({"text": letter})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, str]) -> str:
    return f"data: {json.dumps(content)}\n\n"
