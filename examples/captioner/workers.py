"""The two threads that run the models: one encodes pictures in batches, one writes all captions in step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

import stagetrace
from captioner.models import VisionEncoder, Writer
from stagetrace import Stage
from stagetrace_torch import collect, timed_batch


class _Picture(NamedTuple):
    """A picture in the queue of the encoder."""

    pixels: Tensor
    encoded: Future[Tensor]
    ticket: stagetrace.Ticket


class EncoderWorker:
    """Encodes whatever is in its queue, in batches, on a thread of its own.

    Args:
        encoder: The model.
        batch: Pictures in a batch, at most.
    """

    def __init__(self, encoder: VisionEncoder, batch: int) -> None:
        self._encoder = encoder
        self._device = next(encoder.parameters()).device
        self._batch = batch
        self._queue: SimpleQueue[_Picture] = SimpleQueue()
        threading.Thread(target=self._run, name="encoder", daemon=True).start()

    async def encode(self, pixels: Tensor, ticket: stagetrace.Ticket) -> Tensor:
        """Return the embedding ``[width]`` of a picture, in the host's memory."""
        picture = _Picture(pixels, Future(), ticket)
        self._queue.put(picture)
        return await asyncio.wrap_future(picture.encoded)

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < self._batch and not self._queue.empty():
                batch.append(self._queue.get())
            # Whoever went away meanwhile has cancelled.
            batch = [picture for picture in batch if picture.encoded.set_running_or_notify_cancel()]
            if batch:
                self._encode(batch)

    def _encode(self, batch: list[_Picture]) -> None:
        try:
            pixels = torch.stack([picture.pixels for picture in batch]).to(self._device)
            with timed_batch(self._encoder, [picture.ticket for picture in batch]):
                embeddings = self._encoder(pixels)
            embeddings = embeddings.cpu()
            collect()
        except Exception as error:  # noqa: BLE001 - the requests fail, the worker goes on
            for picture in batch:
                picture.encoded.set_exception(error)
            return
        for picture, embedding in zip(batch, embeddings, strict=True):
            picture.encoded.set_result(embedding)


@dataclass(slots=True, eq=False)
class _Caption:
    """A caption that is being written."""

    pictures: list[Tensor]
    prompt: bytes
    letters: int
    ticket: stagetrace.Ticket
    context: Context = field(default_factory=copy_context)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    written: asyncio.Queue[str | Exception] = field(default_factory=asyncio.Queue)
    state: Tensor | None = None
    last: str = ""
    gone: bool = False
    """Nobody reads it any more."""

    def deliver(self, letter: str | Exception) -> None:
        """Hand a letter to the event loop, or what kept it from being written."""
        self.letters -= 1
        self.loop.call_soon_threadsafe(self.written.put_nowait, letter)


class WriterWorker:
    """Writes captions, on a thread of its own: a step writes a letter of every caption that has a seat.

    Args:
        writer: The model.
        seats: Captions that are written at the same time.
    """

    def __init__(self, writer: Writer, seats: int) -> None:
        self._writer = writer
        self._device = next(writer.parameters()).device
        self._seats = seats
        self._queue: SimpleQueue[_Caption] = SimpleQueue()
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    async def write(self, pictures: list[Tensor], prompt: str, letters: int) -> AsyncIterator[str]:
        """Yield the letters of a caption as they are written."""
        caption = _Caption(pictures, prompt.encode(), letters, stagetrace.wait(Stage.PREFILL))
        self._queue.put(caption)
        try:
            for _ in range(letters):
                letter = await caption.written.get()
                if isinstance(letter, Exception):
                    raise letter
                yield letter
        finally:
            caption.gone = True

    @torch.inference_mode()
    def _run(self) -> None:
        running: list[_Caption] = []
        while True:
            running = [caption for caption in running if caption.letters and not caption.gone]
            try:
                if running:
                    self._step(running)
                self._take_up(running)
            except Exception as error:  # noqa: BLE001 - the requests fail, the worker goes on
                for caption in running:
                    caption.deliver(error)
                running = []

    def _take_up(self, running: list[_Caption]) -> None:
        """Seat captions and read their prompts; wait for one if there is none to write."""
        while len(running) < self._seats and not (running and self._queue.empty()):
            caption = self._queue.get()
            if not caption.gone:
                running.append(caption)
                self._read(caption)

    def _read(self, caption: _Caption) -> None:
        pictures = torch.stack(caption.pictures) if caption.pictures else self._writer.no_pictures()
        pictures = pictures.to(self._device)
        with timed_batch(self._writer, [caption.ticket]):
            caption.state, caption.last = self._writer.read(pictures, caption.prompt)
        _wait_for_a_step([caption])
        collect()
        caption.deliver(caption.last)

    def _step(self, running: list[_Caption]) -> None:
        states = torch.stack([caption.state for caption in running if caption.state is not None])
        with timed_batch(self._writer, [caption.ticket for caption in running]):
            states, letters = self._writer.step(states, "".join(caption.last for caption in running))
            _wait_for_a_step(running)
        collect()
        for caption, state, letter in zip(running, states, letters, strict=True):
            caption.state, caption.last = state, letter
            caption.deliver(letter)


def _wait_for_a_step(captions: list[_Caption]) -> None:
    """Tell that captions wait for their next letter, before anybody hears of this one."""
    for caption in captions:
        if caption.letters > 1 and not caption.gone:
            caption.ticket = caption.context.run(stagetrace.wait, Stage.DECODE)
