"""The API server's outermost layer: a request from its receipt to its last byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from itertools import count
from typing import Any, Final

from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, RecordKind
from stagetrace_vllm.lag import LagSampler
from stagetrace_vllm.reading import HEADER_MAX_BYTES, baggage_facts

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Requests that are traced: those that end in the engine and whose stages are known."""

_USEFUL: Final = re.compile(rb'"(?:content|reasoning|reasoning_content|text|arguments|name)":"(?!")')
_SERVER_ERROR: Final = 400
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

    __slots__ = ("body_bytes", "failed", "items", "jobs", "number", "outputs_before", "streams", "useful")

    def __init__(self, number: int) -> None:
        self.number = number
        self.items = count()
        self.jobs = count()
        self.body_bytes = 0
        self.outputs_before = 0
        self.streams = False
        self.failed = False
        self.useful = False


current_request: ContextVar[TracedRequest | None] = ContextVar("stagetrace_request", default=None)
"""The request that the running task, or the running job, works for."""


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
        self._numbers = count(1)

    def __call__(self, scope: Any, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request; only those of ``PATHS`` get a frame of ours."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return self._application(scope, receive, send)
        return self._trace(scope, receive, send)

    async def _trace(self, scope: Any, receive: Receive, send: Send) -> None:
        request = TracedRequest(next(self._numbers))
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
            current_request.reset(token)
            self._lag.leave()

    def _begin(self, request: TracedRequest, scope: Any) -> None:
        recorder = self._recorder
        try:
            recorder.record(_RECEIVED, request.number)
            for name, value in scope["headers"]:
                if name == b"traceparent" and len(value) <= HEADER_MAX_BYTES:
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
            elif text.isdecimal() and len(text) < 20:  # noqa: PLR2004 - what 64 bits hold
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
        request.failed = status >= _SERVER_ERROR
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
            self._recorder.record(_FIRST_USEFUL, request.number, request.outputs_before)
        elif body.startswith(b"data: {") and b'"role":' not in body:
            request.outputs_before += 1
