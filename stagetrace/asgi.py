"""Middleware for ASGI applications: a request for each HTTP call, from its receipt to its last byte."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final

from stagetrace.api import end, is_cancellation, receive
from stagetrace.clock import monotonic_ns
from stagetrace.recording import LEFT_OUT, Traced, current, leave, process_recorder
from stagetrace.records import NONE, Fact, Misuse, RecordKind

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Receive, Send], Awaitable[None]]

_NOT_CALLS: Final = frozenset({"HEAD", "OPTIONS"})
_FIRST_ERROR: Final = 400
_FILES: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
_BY_SERVER: Final = 1
_U32: Final = 0xFFFFFFFF

_BODY_COMPLETE = int(RecordKind.BODY_COMPLETE)
_RESPONSE_STARTED = int(RecordKind.RESPONSE_STARTED)
_FIRST_USEFUL = int(RecordKind.FIRST_USEFUL)
_LAST_BYTE = int(RecordKind.LAST_BYTE)
_DISCONNECTED = int(RecordKind.DISCONNECTED)
_ENDED = int(RecordKind.ENDED)
_FACT_TEXT = int(RecordKind.FACT_TEXT)
_MISUSED = int(RecordKind.MISUSED)


def is_useful(body: bytes) -> bool:
    """Whether a piece of a streamed answer is more than a comment that keeps the connection alive."""
    return not body.startswith(b":")


class TracingMiddleware:
    """Record the HTTP calls of an application as requests; put it outermost.

    What runs within a call may use :func:`stagetrace.stage` and the others.
    Calls of other paths, ``HEAD`` and ``OPTIONS``, WebSockets and the lifespan pass
    through.  A status from 400 on is an error, a client that left cancels its
    request, one that the server cancelled is lost, and an exception of the
    application passes untouched.

    Args:
        app: The application.
        paths: Paths whose calls are recorded, without the application's root path; None is all of them.
        useful: Whether a piece of a stream of server-sent events is useful output; the first one that is
            makes the first useful byte.  Every piece of another answer is.
    """

    def __init__(
        self,
        app: Application,
        paths: Collection[str] | None = None,
        *,
        useful: Callable[[bytes], bool] = is_useful,
    ) -> None:
        self._app = app
        self._paths = None if paths is None else frozenset([paths] if isinstance(paths, str) else paths)
        self._useful = useful

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer a call."""
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if scope["method"] not in _NOT_CALLS and (self._paths is None or path in self._paths):
                await self._trace(path, scope, receive, send)
                return
        # A pipelined request may begin in the context of the one before it; one that is not to be
        # recorded is no misuse either.
        current.set(LEFT_OUT if scope["type"] == "http" else None)
        await self._app(scope, receive, send)

    async def _trace(self, path: str, scope: Any, receive_message: Receive, send: Send) -> None:
        recorder = process_recorder()
        traced = None if recorder is None else receive(recorder, scope.get("headers", ()))
        if recorder is None or traced is None or traced.recorder is None:
            token = current.set(traced)
            try:
                await self._app(scope, receive_message, send)
            finally:
                leave(token, traced)
            return
        if self._paths is not None:  # else a client may have put anything into it
            recorder.record(_FACT_TEXT, traced.number, Fact.PATH, recorder.intern(path))
        call = _Call(traced, self._useful)
        token = current.set(traced)
        error: type[BaseException] | None = None
        try:
            await self._app(scope, call.receiving(receive_message), call.sending(send))
        except BaseException as raised:
            error = type(raised)
            raise
        finally:
            leave(token, traced)
            if error is not None and is_cancellation(error):
                # Servers cancel what still runs when they end; of a client that left they tell otherwise.
                traced.over = True
                traced.record(_ENDED, traced.number, _BY_SERVER)
            else:
                # What fails behind the last byte, or because the client has left, is no end of the request.
                end(traced, None if call.is_over else error, monotonic_ns())


class _Call:
    """What is known of a call while it is answered."""

    __slots__ = ("_body_bytes", "_failed", "_gone", "_streams", "_traced", "_useful", "_whole")

    def __init__(self, traced: Traced, useful: Callable[[bytes], bool]) -> None:
        self._traced = traced
        self._useful = useful
        self._body_bytes = 0
        self._failed = self._gone = self._streams = self._whole = False

    @property
    def is_over(self) -> bool:
        """Whether the last byte was sent, or the client has left."""
        return self._gone or self._whole

    def receiving(self, receive: Receive) -> Receive:
        async def traced_receive() -> Message:
            message = await receive()
            self._guarded(self._note_received, message)
            return message

        return traced_receive

    def sending(self, send: Send) -> Send:
        def traced_send(message: Message) -> Awaitable[None]:
            # Of the bulk of a stream nothing is noted.
            if self._traced.began_output and message.get("more_body"):
                return self._send(send, message)
            return self._send_and_note(send, message)

        return traced_send

    async def _send(self, send: Send, message: Message) -> None:
        try:
            await send(message)
        except OSError:
            self._note_gone()
            raise

    async def _send_and_note(self, send: Send, message: Message) -> None:
        await self._send(send, message)
        if not self._gone:  # servers take what nobody reads
            self._guarded(self._note_sent, message)

    def _guarded(self, note: Callable[[Message], None], message: Message) -> None:
        try:
            note(message)
        except Exception:  # noqa: BLE001 - nothing of ours may reach the host
            if self._traced.recorder is not None:
                self._traced.recorder.fault()

    def _note_gone(self) -> None:
        self._gone = True
        self._traced.record(_DISCONNECTED, self._traced.number)

    def _note_received(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._note_gone()
            return
        self._body_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            size = self._body_bytes
            self._traced.record(_BODY_COMPLETE, self._traced.number, size & _U32, size >> 32)

    def _note_sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._note_start(message)
        elif message["type"] == "http.response.body":
            self._note_body(message.get("body", b""), more=bool(message.get("more_body")))
        elif message["type"] in _FILES:
            self._note_body(b"file", more=bool(message.get("more_body")))

    def _is_useful(self, body: bytes) -> bool:
        try:
            return self._useful(body)
        except Exception:  # noqa: BLE001 - the server's own function: it must not end recording
            self._traced.record(_MISUSED, 0, Misuse.FAILED_CALLBACK)
            return True

    def _note_start(self, message: Message) -> None:
        status = message["status"]
        self._failed = status >= _FIRST_ERROR
        self._streams = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in message.get("headers", ())
        )
        self._traced.record(_RESPONSE_STARTED, self._traced.number, status, self._streams)

    def _note_body(self, body: bytes, *, more: bool) -> None:
        traced, now = self._traced, monotonic_ns()
        first = body and not (self._failed or traced.began_output)
        if traced.recorder is None:
            return
        if first and (not self._streams or self._is_useful(body)):
            traced.began_output = True
            traced.recorder.record_at(now, _FIRST_USEFUL, traced.number, NONE)
        if not more:
            self._whole = True
            traced.recorder.record_at(now, _LAST_BYTE, traced.number)
