"""An open-loop client: requests leave when they are due, whatever became of the earlier ones."""

from __future__ import annotations

import asyncio
import http
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

import aiohttp
import numpy as np

from stagetrace.attributes import BAGGAGE_INTENDED_UNIX_NS, BAGGAGE_LABEL, BAGGAGE_PHASE
from stagetrace.errors import ServerError
from stagetrace_analyzer.demo.media import data_url, make_jpeg
from stagetrace_analyzer.demo.model import WORDS
from stagetrace_analyzer.demo.observations import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from stagetrace_analyzer.demo.arrivals import Arrival, ArrivalPlan
    from stagetrace_analyzer.demo.media import MediaServer

DEFAULT_TIMEOUT_S: Final = 120.0

_LETTERS: Final = "abcdefghij"
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class _Origin:
    """The start of a plan on both clocks."""

    unix_ns: int = field(default_factory=time.time_ns)
    monotonic_ns: int = field(default_factory=time.monotonic_ns)

    def offset_ns(self) -> int:
        return time.monotonic_ns() - self.monotonic_ns


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    status: int | None = None
    first_useful_ns: int | None = None
    chunks: int = 0
    error: str | None = "truncated"

    def take(self, text: str | None, now_ns: int) -> None:
        if text:
            self.chunks += 1
            if self.first_useful_ns is None:
                self.first_useful_ns = now_ns


class Client:
    """Sends plans to one OpenAI-compatible vLLM server; an async context manager.

    Args:
        server_url: Base address of the server, without a slash at the end.
        media: Where the server fetches images.
        timeout_s: Seconds after which a request counts as failed.

    Raises:
        ServerError: On entering, when the server does not tell its model and tokens.
    """

    def __init__(self, server_url: str, media: MediaServer, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._server_url = server_url
        self._media = media
        self._timeout_s = timeout_s
        self._constant: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            # A connection each, as from many clients: a kept one may be closed just as it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        try:
            self._constant = await self._greedy_letters()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def run(
        self, plan: ArrivalPlan, on_done: Callable[[Observation], None] | None = None
    ) -> list[Observation]:
        """Send every request when it is due, wait for the last answer, return them as planned.

        Failures are observations.  Ends at the latest the timeout after the last arrival.
        """
        origin = _Origin()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for arrival in plan.arrivals:
                body = self._body(arrival)  # drawn before it is due, so that drawing delays nothing
                await asyncio.sleep((arrival.offset_ns - origin.offset_ns()) / 1e9)
                tasks.append(group.create_task(self._send(plan.phase, arrival, body, origin, on_done)))
        return [task.result() for task in tasks]

    async def run_in_turn(
        self, plan: ArrivalPlan, on_done: Callable[[Observation], None] | None = None
    ) -> list[Observation]:
        """Send every request when the one before has ended; each is intended when it is sent."""
        return [
            await self._send(plan.phase, arrival, self._body(arrival), _Origin(), on_done)
            for arrival in plan.arrivals
        ]

    async def _send(
        self,
        phase: str,
        arrival: Arrival,
        body: Mapping[str, Any],
        origin: _Origin,
        on_done: Callable[[Observation], None] | None,
    ) -> Observation:
        request_id = uuid.uuid4().hex
        intended_unix_ns = origin.unix_ns + arrival.offset_ns
        headers = _headers(request_id, phase, arrival.traffic.label, intended_unix_ns)
        answer = _Answer()
        sent_ns = origin.offset_ns()
        try:
            await self._receive(body, headers, answer, origin)
        except Exception as error:  # noqa: BLE001  whatever failed, the load goes on
            answer.error = type(error).__name__
        observation = Observation(
            request_id=request_id,
            phase=phase,
            label=arrival.traffic.label,
            intended_unix_ns=intended_unix_ns,
            intended_ns=arrival.offset_ns,
            sent_ns=sent_ns,
            first_useful_ns=answer.first_useful_ns,
            last_ns=origin.offset_ns(),
            status=answer.status,
            error=answer.error,
            output_chunks=answer.chunks,
        )
        if on_done is not None:
            on_done(observation)
        return observation

    async def _receive(
        self, body: Mapping[str, Any], headers: Mapping[str, str], answer: _Answer, origin: _Origin
    ) -> None:
        url = f"{self._server_url}/v1/chat/completions"
        async with self._session.post(url, json=body, headers=headers) as response:
            answer.status = response.status
            if response.status != http.HTTPStatus.OK:
                answer.error = "http"
            elif body["stream"]:
                await _read_stream(response, answer, origin)
            else:
                choice = (await response.json())["choices"][0]
                answer.take(choice["message"]["content"], origin.offset_ns())
                answer.error = None

    def _body(self, arrival: Arrival) -> dict[str, Any]:
        traffic = arrival.traffic
        words = np.random.default_rng(arrival.seed).choice(WORDS, traffic.words)
        images = [
            {"type": "image_url", "image_url": {"url": self._image(arrival, item)}}
            for item in range(traffic.images)
        ]
        text = {"type": "text", "text": " ".join(["", *words])}
        return {
            **self._constant,
            "messages": [{"role": "user", "content": [*images, text]}],
            "max_tokens": traffic.max_tokens,
            "stream": traffic.stream,
        }

    def _image(self, arrival: Arrival, item: int) -> str:
        traffic = arrival.traffic
        seed = (arrival.seed << 16) + item
        if traffic.image_delay_ms is None:
            return data_url(make_jpeg(seed, traffic.image_size))
        return self._media.url(seed, delay_ms=traffic.image_delay_ms, size=traffic.image_size)

    async def _greedy_letters(self) -> dict[str, Any]:
        """Return the request parameters for answers of a fixed length that are visible text.

        A random model left alone answers with special and partial tokens, which have no text.
        """
        try:
            async with self._session.get(f"{self._server_url}/v1/models", raise_for_status=True) as response:
                model = (await response.json())["data"][0]["id"]
            letters = [await self._token_id(model, letter) for letter in _LETTERS]
        except (aiohttp.ClientError, TimeoutError, KeyError, IndexError, ValueError) as error:
            raise ServerError(
                f"{self._server_url} does not answer as a vLLM server does ({type(error).__name__})",
                hint="it must offer /v1/models and /tokenize",
            ) from error
        return {"model": model, "temperature": 0, "ignore_eos": True, "allowed_token_ids": letters}

    async def _token_id(self, model: str, letter: str) -> int:
        body = {"model": model, "prompt": letter, "add_special_tokens": False}
        async with self._session.post(
            f"{self._server_url}/tokenize", json=body, raise_for_status=True
        ) as response:
            token_id: int = (await response.json())["tokens"][0]
        return token_id


def _headers(request_id: str, phase: str, label: str, intended_unix_ns: int) -> dict[str, str]:
    baggage = {
        BAGGAGE_PHASE: phase,
        BAGGAGE_LABEL: label,
        BAGGAGE_INTENDED_UNIX_NS: str(intended_unix_ns),
    }
    return {
        "X-Request-Id": request_id,
        "baggage": ",".join(f"{key}={quote(value, safe='')}" for key, value in baggage.items()),
    }


async def _read_stream(response: aiohttp.ClientResponse, answer: _Answer, origin: _Origin) -> None:
    """Read server-sent events to the end; complete only with the final mark."""
    async for line in response.content:
        now_ns = origin.offset_ns()
        payload = line.removeprefix(_DATA).strip()
        if payload == _DONE:
            answer.error = None if answer.error == "truncated" else answer.error
        elif line.startswith(_DATA):
            chunk = json.loads(payload)
            if "error" in chunk:
                answer.error = "server"
            for choice in chunk.get("choices", ()):
                answer.take(choice["delta"].get("content"), now_ns)
