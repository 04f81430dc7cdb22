"""The ASGI middleware: calls become requests."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time

import pytest

import stagetrace
from stagetrace import Outcome, Stage, is_spool, partition, read_spool
from stagetrace.asgi import TracingMiddleware
from stagetrace.recording import LEFT_OUT, current
from stagetrace.testing import check_partition, recorded

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


@pytest.fixture
def spool(tmp_path):
    """A folder that this process records into."""
    with recorded(tmp_path / "spool"):
        yield tmp_path / "spool"


def call(
    app,
    *,
    path="/caption",
    method="POST",
    headers=(),
    incoming=None,
    gone_after=None,
    paths=("/caption",),
    **arguments,
):
    """Make one call; returns what the application sent.  A client may be gone after so many messages."""
    messages = list(incoming or [{"type": "http.request", "body": b"{}", "more_body": False}])
    sent = []

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        if len(sent) == gone_after:
            raise ConnectionResetError
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": list(headers), "root_path": "/root"}
    traced = TracingMiddleware(app, paths, **arguments)
    asyncio.run(traced(scope, receive, send))
    assert current.get() is None
    return sent


def answering(*bodies, status=200, headers=()):
    """An application that reads its call and answers with the given pieces."""

    async def app(_scope, receive, send):
        while (await receive())["more_body"]:
            pass
        with stagetrace.stage(Stage.ENCODE):
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for place, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": place + 1 < len(bodies)})

    return app


def recorded_request(spool):
    """The one request of a spool, sound and covered."""
    data = read_spool(spool)
    assert (data.faults, data.set_aside) == (0, {})
    (request,) = data.requests
    check_partition(request, partition(request))
    return request


def test_answer_in_one_piece(spool):
    """A call is a request with its stages; its first useful byte and its last one are handed out at once."""
    assert (
        len(call(answering(b"a cat"), path="/root/caption", headers=[(b"baggage", b"stagetrace.label=x")]))
        == 2
    )
    request = recorded_request(spool)
    assert request.outcome is Outcome.OK
    assert request.facts == {"path": "/caption", "label": "x", "status": 200, "stream": False}
    assert (
        request.received < request.body_complete < request.first_useful == request.last_byte < request.ended
    )
    parts = partition(request)
    assert [interval.stage for interval in parts.ttft] == [Stage.RECEIVE, Stage.ENCODE, Stage.RESPOND]
    assert parts.completion == parts.ttft


def test_stream(spool):
    """The first piece of a stream that is no comment is the first useful one, and the rest passes."""
    pieces = [b": keep-alive\n\n", b"", b"data: a\n\n", b"data: b\n\n", b"data: c\n\n", b""]
    assert len(call(answering(*pieces, headers=SSE))) == 7
    request = recorded_request(spool)
    assert request.facts["stream"] is True
    assert request.body_complete < request.first_useful < request.last_byte


def test_useful_pieces_are_what_the_server_says(spool):
    """A server may know better which of its events are output."""
    pieces = [b"data: role\n\n", b"data: text\n\n"]
    call(answering(*pieces, headers=SSE), useful=lambda body: b"text" in body)
    request = recorded_request(spool)
    assert request.first_useful == request.last_byte


def test_upload_in_pieces(spool):
    """The body is complete with its last piece."""
    pieces = [{"type": "http.request", "body": b"a", "more_body": more} for more in (True, True, False)]
    call(answering(b"x"), incoming=pieces)
    assert recorded_request(spool).body_complete is not None


def test_error_status(spool):
    """A status from 400 on is an error without a useful byte."""
    call(answering(b"no", status=422))
    request = recorded_request(spool)
    assert (request.outcome, request.facts["error_code"]) == (Outcome.ERROR, "http_422")
    assert request.first_useful is None
    assert request.last_byte is not None


def test_exception_of_the_application(spool):
    """It passes untouched, and its class is the code."""

    async def app(_scope, _receive, _send):
        raise ZeroDivisionError("secret")

    with pytest.raises(ZeroDivisionError):
        call(app)
    request = recorded_request(spool)
    assert (request.outcome, request.facts["error_code"]) == (Outcome.ERROR, "ZeroDivisionError")


def test_no_answer(spool):
    """An application that returns without an answer has failed."""

    async def app(_scope, _receive, _send):
        return

    call(app)
    assert recorded_request(spool).facts["error_code"] == "no_response"


def test_server_that_cancels(spool):
    """A call that the server cancels is lost: its client is still there."""

    async def app(_scope, _receive, _send):
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        call(app)
    assert recorded_request(spool).outcome is Outcome.LOST


def test_client_that_leaves(spool):
    """A client that is gone before the last byte cancels its request there, whatever the server still sends."""

    async def app(_scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"nobody reads it"})

    assert len(call(app)) == 2
    request = recorded_request(spool)
    assert (request.outcome, request.first_useful, request.last_byte) == (Outcome.CANCELLED, None, None)
    assert "status" not in request.facts


def test_client_that_is_gone_when_something_is_sent(spool):
    """Servers tell of it by an error of the operating system, which passes."""
    with pytest.raises(ConnectionResetError):
        call(answering(b"a", b"b", headers=SSE), gone_after=2)
    request = recorded_request(spool)
    assert (request.outcome, request.facts.get("error_code")) == (Outcome.CANCELLED, None)


def test_client_that_has_all_may_leave(spool):
    """After the last byte there is nothing to cancel."""

    async def app(scope, receive, send):
        await answering(b"x")(scope, receive, send)
        await receive()

    call(app)
    assert recorded_request(spool).outcome is Outcome.OK


@pytest.mark.parametrize(
    ("path", "method"), [("/health", "GET"), ("/caption", "OPTIONS"), ("/caption/1", "POST")]
)
def test_other_calls_pass(spool, path, method):
    """Other paths, and calls that only ask what is allowed, are no requests."""

    async def app(scope, receive, send):
        assert current.get() is LEFT_OUT
        await answering()(scope, receive, send)

    call(app, path=path, method=method)
    assert not is_spool(spool)


def test_every_call_is_a_request_without_paths(spool):
    """Without a list of paths all calls are recorded, and no path is: a client chooses it."""

    async def nobody():
        return {"type": "http.disconnect"}

    async def send(_message):
        return

    scope = {"type": "http", "method": "GET", "path": "/of/a/client"}
    asyncio.run(TracingMiddleware(answering_at_once)(scope, nobody, send))
    assert recorded_request(spool).facts == {"status": 204, "stream": False}


async def answering_at_once(_scope, _receive, send):
    """An application that reads nothing."""
    await send({"type": "http.response.start", "status": 204})
    await send({"type": "http.response.body"})


def test_other_scopes_pass(spool):
    """WebSockets and the lifespan pass through, without what an earlier request left in the context."""
    seen = []

    async def app(scope, _receive, _send):
        seen.append((scope["type"], current.get()))

    async def serve():
        with stagetrace.request():
            for scope in ({"type": "lifespan"}, {"type": "websocket", "path": "/caption"}):
                await TracingMiddleware(app)(scope, None, None)

    asyncio.run(serve())
    assert seen == [("lifespan", None), ("websocket", None)]


def test_without_a_folder_calls_pass(tmp_path):
    """Nothing is recorded when no folder is named, and the answer is the application's own."""
    assert [message["type"] for message in call(answering(b"x"))] == [
        "http.response.start",
        "http.response.body",
    ]


def test_left_out_calls_pass(tmp_path, monkeypatch):
    """A call that sampling leaves out is counted."""
    monkeypatch.setenv("STAGETRACE_SAMPLE", "0")
    with recorded(tmp_path):
        assert len(call(answering(b"x"))) == 2
    data = read_spool(tmp_path)
    assert (data.records, data.not_sampled) == (1, 1)


def test_message_that_is_none_is_no_fault_of_the_host(spool):
    """What the middleware does not understand is counted, and passes."""

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start"})

    assert len(call(app)) == 1
    assert read_spool(spool).faults == 1


class Server:
    """A real server in a thread, on a free port of this machine."""

    def __init__(self, app):
        uvicorn = pytest.importorskip("uvicorn", reason="serves")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self._server = uvicorn.Server(
            uvicorn.Config(
                app, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off", ws="none"
            )
        )
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self.port

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join()


def answer_of(port, path, body=b""):
    """Send a body to a path of a server; returns status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body)
    with connection.getresponse() as answer:
        found = answer.status, answer.read()
    connection.close()
    return found


def test_real_server(spool):
    """Calls over the network: an answer, a stream, an error and a client that leaves, each as it ended."""
    left = threading.Event()

    async def app(scope, receive, send):
        if scope["path"] == "/stream":
            return await answering(b"data: a\n\n", b"data: b\n\n", b"", headers=SSE)(scope, receive, send)
        if scope["path"] == "/leave":
            while (await receive())["type"] != "http.disconnect":
                pass
            return left.set()
        if scope["path"] == "/fail":
            raise ZeroDivisionError
        return await answering(b"a cat")(scope, receive, send)

    with Server(TracingMiddleware(app, ["/caption", "/stream", "/fail", "/leave"])) as port:
        assert answer_of(port, "/caption", b"x" * 300_000) == (200, b"a cat")
        assert answer_of(port, "/stream") == (200, b"data: a\n\ndata: b\n\n")
        assert answer_of(port, "/fail")[0] == 500
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /leave HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.1)
        assert left.wait(10)
    data = read_spool(spool)
    assert (data.faults, data.set_aside) == (0, {})
    found = {request.facts["path"]: request for request in data.requests}
    assert {path: (request.outcome, request.facts.get("error_code")) for path, request in found.items()} == {
        "/caption": (Outcome.OK, None),
        "/stream": (Outcome.OK, None),
        "/fail": (Outcome.ERROR, "ZeroDivisionError"),
        "/leave": (Outcome.CANCELLED, None),
    }
    for request in data.requests:
        check_partition(request, partition(request))
    assert [i.stage for i in partition(found["/caption"]).ttft] == [
        Stage.RECEIVE,
        Stage.ENCODE,
        Stage.RESPOND,
    ]


def test_client_that_leaves_in_the_middle_of_a_stream(spool):
    """It cancels the request also where only sending shows it, whatever the application makes of that."""

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        try:
            await send({"type": "http.response.body", "body": b"data: b\n\n", "more_body": True})
        except OSError as error:
            raise LookupError from error

    with pytest.raises(LookupError):
        call(app, gone_after=2)
    request = recorded_request(spool)
    assert (request.outcome, request.facts.get("error_code")) == (Outcome.CANCELLED, None)


def test_failure_behind_the_last_byte(spool):
    """A background task that fails after a whole answer is no failure of the request."""

    async def app(scope, receive, send):
        await answering(b"x")(scope, receive, send)
        raise LookupError

    with pytest.raises(LookupError):
        call(app)
    assert recorded_request(spool).outcome is Outcome.OK


def test_file_that_the_server_sends_itself(spool):
    """An answer that is a path is whole once it is sent."""

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.pathsend", "path": "/nowhere"})

    call(app)
    request = recorded_request(spool)
    assert request.outcome is Outcome.OK
    assert request.first_useful is not None


def test_function_of_the_server_that_fails(spool):
    """One that is to judge output and raises never ends recording: the piece is useful, and that is counted."""

    def judge(_piece):
        raise LookupError

    async def app(scope, receive, send):
        await answering(b"x", headers=SSE)(scope, receive, send)

    call(app, useful=judge)
    data = read_spool(spool)
    assert data.set_aside == {"failed_callback": 1}
    assert data.faults == 0
    assert data.requests[0].first_useful is not None


def test_stream_without_events(spool):
    """A server that streams otherwise than by events says so, and is believed."""

    async def app(scope, receive, send):
        stagetrace.facts(stream=True)
        await answering(b"x")(scope, receive, send)

    call(app)
    assert recorded_request(spool).facts["stream"] is True


def test_one_path(spool):
    """A path alone may be given as it is."""
    call(answering(b"x"), paths="/caption")
    assert recorded_request(spool).facts["path"] == "/caption"
