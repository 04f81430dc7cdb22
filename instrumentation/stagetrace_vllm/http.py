"""The API server's outermost layer: a request from its receipt to its last byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from itertools import count
from typing import Any, Final

from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, RecordKind
from stagetrace_vllm.delivery import Delivery
from stagetrace_vllm.lag import LagSampler
from stagetrace_vllm.reading import baggage_facts, is_trace_parent

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Requests that are traced: those that end in the engine and whose stages are known."""

_USEFUL: Final = re.compile(rb'"(?:content|reasoning|reasoning_content|text|arguments|name)":"(?!")')
_UNIX_NS_DIGITS: Final = 19
_FIRST_ERROR: Final = 400
_U32: Final = 0xFFFFFFFF

_RECEIVED = int(RecordKind.RECEIVED)
_BODY_COMPLETE = int(RecordKind.BODY_COMPLETE)
_RESPONSE_STARTED = int(RecordKind.RESPONSE_STARTED)
_FIRST_USEFUL = int(RecordKind.FIRST_USEFUL)
_LAST_BYTE = int(RecordKind.LAST_BYTE)
_DISCONNECTED = int(RecordKind.DISCONNECTED)
_ENDED = int(RecordKind.ENDED)
_FACT_NUMBER = int(RecordKind.FACT_NUMBER)
_FACT_TEXT = int(RecordKind.FACT_TEXT)


class TracedRequest:
    """What is known of a request while it is in the API server."""

    __slots__ = ("body_bytes", "delivery", "failed", "items", "jobs", "number", "streams", "useful")

    def __init__(self, number: int) -> None:
        self.number = number
        self.items = count()
        self.jobs = count()
        self.body_bytes = 0
        self.delivery = Delivery()
        self.streams = False
        self.failed = False
        self.useful = False


current_request: ContextVar[TracedRequest | None] = ContextVar("stagetrace_request", default=None)
"""The request that the running task, or the running job, works for."""


_numbers = count(1)


def _path(scope: Any) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def wrap_config_load(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Make the loaded application of vLLM's server a traced one."""

    def load(self: Any) -> Any:
        result = original(self)
        try:
            if hasattr(getattr(self.app, "state", None), "engine_client"):
                self.loaded_app = TracedApplication(self.loaded_app, recorder)
        except Exception:
            recorder.fault()
        return result

    return load


class TracedApplication:
    """An ASGI application around another one.

    Args:
        application: The application that answers.
        recorder: Where requests are recorded.
    """

    def __init__(self, application: Application, recorder: Recorder) -> None:
        self._application = application
        self._recorder = recorder
        self._lag = LagSampler(recorder)

    def __call__(self, scope: Any, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request; only those of ``PATHS`` get a frame of ours."""
        if scope["type"] == "http" and scope["method"] == "POST" and _path(scope) in PATHS:
            return self._trace(scope, receive, send)
        if current_request.get() is not None:
            # A pipelined request begins in the context of the one before it.
            current_request.set(None)
        return self._application(scope, receive, send)

    async def _trace(self, scope: Any, receive: Receive, send: Send) -> None:
        request = TracedRequest(next(_numbers))
        record, number = self._recorder.record, request.number
        self._begin(request, scope)
        self._lag.enter()
        token = current_request.set(request)
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

    def _begin(self, request: TracedRequest, scope: Any) -> None:
        recorder = self._recorder
        try:
            recorder.record(_RECEIVED, request.number)
            for name, value in scope["headers"]:
                if name == b"traceparent" and is_trace_parent(value):
                    text = recorder.define(value.decode("latin-1"))
                    recorder.record(_FACT_TEXT, request.number, Fact.TRACEPARENT, text)
                elif name == b"baggage":
                    self._note_baggage(request.number, value)
        except Exception:
            recorder.fault()

    def _note_baggage(self, number: int, value: bytes) -> None:
        recorder = self._recorder
        for fact, text in baggage_facts(value):
            if fact is not Fact.INTENDED_UNIX_NS:
                recorder.record(_FACT_TEXT, number, fact, recorder.intern(text))
            elif text.isascii() and text.isdecimal() and len(text) <= _UNIX_NS_DIGITS:
                at = int(text)
                recorder.record(_FACT_NUMBER, number, fact, at & _U32, at >> 32)

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
        elif _USEFUL.search(body):
            request.useful = True
            choice, tokens_before = request.delivery.taken
            self._recorder.record(_FIRST_USEFUL, request.number, tokens_before, choice)
            request.delivery.release()
