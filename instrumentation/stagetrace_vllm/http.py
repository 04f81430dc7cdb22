"""The API server's outermost layer: a request from its receipt to its last byte."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from itertools import count
from typing import Any, Final

from stagetrace.attributes import SAMPLE_VARIABLE
from stagetrace.inbound import record_headers, trace_parent
from stagetrace.recorder import Recorder
from stagetrace.recording import LEFT_OUT, Traced, current, leave, request_numbers
from stagetrace.records import NONE, Fact, RecordKind
from stagetrace.sampling import Sampler
from stagetrace.settings import parse_sampler, setting
from stagetrace_vllm.delivery import Delivery
from stagetrace_vllm.export import start_exporter
from stagetrace_vllm.lag import LagSampler
from stagetrace_vllm.reading import announce_version

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

_RESPONSES: Final = "/v1/responses"

Loaded = defaultdict[str, deque[int]]
"""Media items that were loaded and not yet processed, by modality."""

PATHS: Final = {
    "/v1/chat/completions": "",
    "/v1/chat/completions/batch": "_0",
    "/v1/completions": "-0",
    "/v1/messages": "",
    _RESPONSES: "_0",
} | dict.fromkeys(
    (
        *("/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    ),
    "-0",
)
"""Requests that are traced: those that end in the engine and whose stages are known.

The value is what vLLM puts behind the id in the answer to name the first of the engine's requests.
"""

_USEFUL: Final = re.compile(
    rb'"(?:content|reasoning|reasoning_content|text|thinking|arguments|partial_json|name)":"(?!")'
)
_USEFUL_EVENT: Final = re.compile(rb'"delta":"(?!")')
"""Events of ``/v1/responses`` repeat the request and what was said before; only deltas are new."""

_CHOICE: Final = re.compile(rb'"choices":\[\{"index":(\d+)')
_FIRST_ERROR: Final = 400
_U32: Final = 0xFFFFFFFF

_RECEIVED = int(RecordKind.RECEIVED)
_NOT_SAMPLED = int(RecordKind.NOT_SAMPLED)
_BODY_COMPLETE = int(RecordKind.BODY_COMPLETE)
_RESPONSE_STARTED = int(RecordKind.RESPONSE_STARTED)
_FIRST_USEFUL = int(RecordKind.FIRST_USEFUL)
_LAST_BYTE = int(RecordKind.LAST_BYTE)
_DISCONNECTED = int(RecordKind.DISCONNECTED)
_ENDED = int(RecordKind.ENDED)
_FACT_TEXT = int(RecordKind.FACT_TEXT)
_PATH = int(Fact.PATH)


class TracedRequest:
    """What is known of a request while it is in the API server."""

    __slots__ = (
        "body_bytes",
        "delivery",
        "failed",
        "gone",
        "items",
        "jobs",
        "loaded",
        "number",
        "path",
        "prompt",
        "streams",
        "useful",
    )

    def __init__(self, number: int, path: str) -> None:
        self.number = number
        self.path = path
        self.items = count()
        self.jobs = count()
        self.loaded: Loaded = defaultdict(deque)
        # The one that was last given to the engine.
        self.prompt = -1
        self.body_bytes = 0
        self.delivery = Delivery()
        self.streams = False
        self.failed = False
        self.gone = False
        self.useful = False


current_request: ContextVar[TracedRequest | None] = ContextVar("stagetrace_request", default=None)
"""The request that the running task, or the running job, works for."""

left_out: ContextVar[int | None] = ContextVar("stagetrace_left_out", default=None)
"""Number of the request that the running task works for, when sampling has left it out."""


def _path(scope: Any) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def wrap_config_load(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Make the loaded application of vLLM's server a traced one."""
    sampler = setting(SAMPLE_VARIABLE, parse_sampler, Sampler())

    def load(self: Any) -> Any:
        result = original(self)
        try:
            if hasattr(getattr(self.app, "state", None), "engine_client"):
                announce_version(recorder)
                self.loaded_app = TracedApplication(self.loaded_app, recorder, sampler)
                start_exporter()
        except Exception:
            recorder.fault()
        return result

    return load


class TracedApplication:
    """An ASGI application around another one.

    Args:
        application: The application that answers.
        recorder: Where requests are recorded.
        sampler: Chooses which of them; all when there is none.
    """

    def __init__(self, application: Application, recorder: Recorder, sampler: Sampler | None = None) -> None:
        self._application = application
        self._recorder = recorder
        self._sampler = None if sampler is None or sampler.takes_all else sampler
        self._lag = LagSampler(recorder)

    def __call__(self, scope: Any, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request; only those of ``PATHS`` get a frame of ours."""
        if scope["type"] == "http" and scope["method"] == "POST" and (path := _path(scope)) in PATHS:
            if self._sampler is None or self._is_sampled(self._sampler, scope):
                return self._trace(path, scope, receive, send)
            return self._leave_out(scope, receive, send)
        # A pipelined request begins in the context of the one before it.
        if current_request.get() is not None:
            current_request.set(None)
        if left_out.get() is not None:
            left_out.set(None)
        if current.get() is not None:
            current.set(None)
        return self._application(scope, receive, send)

    def _is_sampled(self, sampler: Sampler, scope: Any) -> bool:
        try:
            return sampler.takes(trace_parent(scope["headers"]))
        except Exception:
            self._recorder.fault()
            return True

    async def _leave_out(self, scope: Any, receive: Receive, send: Send) -> None:
        """Count a request and leave it alone; only the engine's id of it is recorded later."""
        self._lag.enter()
        number = next(request_numbers)
        self._recorder.record(_NOT_SAMPLED, number)
        current_request.set(None)
        token, told = left_out.set(number), current.set(LEFT_OUT)
        try:
            await self._application(scope, receive, send)
        finally:
            self._lag.leave()
            with suppress(ValueError):  # closed by the collector, in a context that is not its own
                left_out.reset(token)
            leave(told, LEFT_OUT)

    async def _trace(self, path: str, scope: Any, receive: Receive, send: Send) -> None:
        request = TracedRequest(next(request_numbers), path)
        record, number = self._recorder.record, request.number
        # First, because it may find out that recording is off, or on again.
        self._lag.enter()
        self._begin(request, scope)
        token = current_request.set(request)
        # What the server's own code tells through the recording API belongs to it too.
        traced = Traced(self._recorder, number)
        told = current.set(traced)
        try:
            await self._application(scope, self._receiving(request, receive), self._sending(request, send))
        except BaseException as error:
            record(_ENDED, number, 1 if isinstance(error, asyncio.CancelledError) else 2)
            raise
        else:
            record(_ENDED, number)
        finally:
            self._lag.leave()
            with suppress(ValueError):  # closed by the collector, in a context that is not its own
                current_request.reset(token)
            traced.over = True
            leave(told, traced)

    def _begin(self, request: TracedRequest, scope: Any) -> None:
        recorder = self._recorder
        try:
            recorder.record(_RECEIVED, request.number)
            recorder.record(_FACT_TEXT, request.number, _PATH, recorder.intern(request.path))
            record_headers(recorder, request.number, scope["headers"])
        except Exception:
            recorder.fault()

    def _receiving(self, request: TracedRequest, receive: Receive) -> Receive:
        async def traced_receive() -> Message:
            message = await receive()
            try:
                self._note_received(request, message)
            except Exception:
                self._recorder.fault()
            return message

        return traced_receive

    def _note_received(self, request: TracedRequest, message: Message) -> None:
        if message["type"] == "http.disconnect":
            request.gone = True
            self._recorder.record(_DISCONNECTED, request.number)
            return
        request.body_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            size = request.body_bytes
            self._recorder.record(_BODY_COMPLETE, request.number, size & _U32, size >> 32)

    def _sending(self, request: TracedRequest, send: Send) -> Send:
        def traced_send(message: Message) -> Awaitable[None]:
            # The bulk of a stream passes without a frame of ours in between.
            if request.useful and message.get("more_body"):
                return send(message)
            return self._send_and_note(request, send, message)

        return traced_send

    async def _send_and_note(self, request: TracedRequest, send: Send, message: Message) -> None:
        await send(message)
        if request.gone:
            return  # servers take what nobody reads, and vLLM goes on to answer
        try:
            if message["type"] == "http.response.start":
                self._note_start(request, message)
            elif message["type"] == "http.response.body":
                self._note_body(request, message)
        except Exception:
            self._recorder.fault()

    def _note_start(self, request: TracedRequest, message: Message) -> None:
        status = message["status"]
        request.failed = status >= _FIRST_ERROR
        request.streams = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )
        self._recorder.record(_RESPONSE_STARTED, request.number, status, request.streams)

    def _note_body(self, request: TracedRequest, message: Message) -> None:
        body = message.get("body", b"")
        if body and not request.useful and not request.failed:
            self._note_first_useful(request, body)
        if not message.get("more_body"):
            self._recorder.record(_LAST_BYTE, request.number)

    def _note_first_useful(self, request: TracedRequest, body: bytes) -> None:
        if not request.streams:
            request.useful = True
            self._recorder.record(_FIRST_USEFUL, request.number, NONE)
        elif (_USEFUL_EVENT if request.path == _RESPONSES else _USEFUL).search(body):
            request.useful = True
            named = _CHOICE.search(body)
            choice, tokens_before = request.delivery.first(None if named is None else int(named[1]))
            self._recorder.record(_FIRST_USEFUL, request.number, tokens_before, choice)
            request.delivery.release()
