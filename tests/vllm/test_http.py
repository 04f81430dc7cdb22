"""The outermost layer: receipt, first useful byte, last byte, ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from stagetrace import Outcome, Recorder, read_spool
from stagetrace_vllm.delivery import Delivery
from stagetrace_vllm.http import TracedApplication, current_request

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
EMPTY = b'data: {"choices":[{"delta":{"content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"a \\"content\\":\\"x\\""}}]}\n\n'


def run(tmp_path, application, *, path="/v1/chat/completions", headers=(), incoming=()):
    """Send one request through the traced application; returns what it sent and what was recorded."""
    messages = list(incoming) or [{"type": "http.request", "body": b"{}", "more_body": False}]
    sent = []

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    traced = TracedApplication(application, Recorder(tmp_path / "spool"))
    asyncio.run(traced(scope, receive, send))
    if not (tmp_path / "spool").exists():
        return sent, []
    data = read_spool(tmp_path / "spool")
    assert data.faults == 0
    return sent, data.requests


def answering(*bodies, status=200, headers=()):
    """An application that answers with the given pieces."""

    async def application(_scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for place, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": place + 1 < len(bodies)})

    return application


def test_stream(tmp_path):
    """The first useful byte is the first delta with content; role and empty deltas are not."""
    sent, (request,) = run(tmp_path, answering(ROLE, EMPTY, EMPTY, TOKEN, TOKEN, b"", headers=SSE))
    assert len(sent) == 7
    assert request.outcome is Outcome.OK
    assert request.tokens_before == 0
    assert request.facts["stream"] is True
    assert (
        request.received < request.body_complete < request.first_useful < request.last_byte <= request.ended
    )


class Queue:
    """A queue like vLLM's between its outputs and a request's task: what is not taken is merged."""

    def __init__(self):
        self.waiting = None

    def put(self, output):
        if self.waiting is None:
            self.waiting = output
        else:
            self.waiting.outputs.extend(output.outputs)

    async def get(self):
        return self.get_nowait()

    def get_nowait(self):
        taken, self.waiting = self.waiting, None
        return taken


def output(*tokens, index=0):
    """An output of the engine with so many new tokens."""
    return SimpleNamespace(outputs=[SimpleNamespace(index=index, token_ids=list(tokens))])


def test_tokens_are_counted_where_chunks_are_not(tmp_path):
    """A chunk belongs to the first token taken for it, however many were swallowed before or merged after."""
    delivery, queue = Delivery(), Queue()
    delivery.watch(queue, 0, Recorder(tmp_path))
    for token in range(3):
        queue.put(output(token))
        assert queue.get_nowait() is not None
    assert queue.get_nowait() is None
    assert delivery.first(None) == (0, 2)
    queue.put(output(3))
    queue.put(output(4))
    asyncio.run(queue.get())
    assert delivery.first(None) == (0, 3)
    queue.put(output(5, 6, 7, 8))
    queue.get_nowait()
    assert delivery.first(None) == (0, 8)
    delivery.release()
    assert vars(queue) == {"waiting": None}


def test_choices_are_told_apart(tmp_path):
    """With several answers the chunk says whose it is; if not, it belongs to the one whose token came first."""
    delivery, queue = Delivery(), Queue()
    delivery.watch(queue, 0, Recorder(tmp_path))
    delivery.watch(queue, 0, Recorder(tmp_path))
    queue.put(output(1, index=1))
    queue.put(output(1, index=0))
    queue.put(output(1, index=0))
    queue.get_nowait()
    assert delivery.first(None) == (1, 0)
    assert delivery.first(0) == (0, 0)
    queue.put(output(1, index=0))
    queue.get_nowait()
    assert delivery.first(1) == (1, 0)
    assert delivery.first(0) == (0, 2)
    assert delivery.first(7) == (0, 2)


def test_prompts_are_told_apart(tmp_path):
    """Each prompt has a queue of its own; its answers are counted on from those to the prompts before."""
    delivery, queues = Delivery(), [Queue(), Queue()]
    for prompt, queue in enumerate(queues):
        delivery.watch(queue, 2 * prompt, Recorder(tmp_path))
    queues[0].put(output(1, index=1))
    queues[1].put(output(1, index=0))
    queues[1].put(output(1, index=1))
    for queue in queues:
        queue.get_nowait()
    assert [delivery.first(choice) for choice in (None, 1, 2, 3)] == [(2, 0), (1, 0), (2, 0), (3, 0)]
    delivery.release()
    assert [vars(queue) for queue in queues] == [{"waiting": None}] * 2
    late = Queue()
    delivery.watch(late, 4, Recorder(tmp_path))
    assert vars(late) == {"waiting": None}


def test_answer_in_one_piece(tmp_path):
    """Without streaming the first useful byte is the body."""
    _, (request,) = run(tmp_path, answering(b'{"choices":[{"message":{"content":""}}]}'))
    assert request.tokens_before is None
    assert request.first_useful <= request.last_byte
    assert request.facts["stream"] is False


def test_stream_without_content_has_no_useful_byte(tmp_path):
    """Role, keep-alive comments and DONE are not output."""
    _, (request,) = run(tmp_path, answering(ROLE, b": keep-alive\n\n", b"data: [DONE]\n\n", headers=SSE))
    assert request.first_useful is None
    assert request.last_byte is not None


def test_error_has_its_status_as_code(tmp_path):
    """An answer with an error status has no useful byte."""
    _, (request,) = run(tmp_path, answering(b'{"error":{}}', status=422))
    assert (request.outcome, request.facts["error_code"], request.first_useful) == (
        Outcome.ERROR,
        "http_422",
        None,
    )


def test_application_that_raises_raises_to_the_host(tmp_path):
    """The host's exception passes untouched, and the request ends as an error."""

    async def application(_scope, _receive, _send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, application)
    (request,) = read_spool(tmp_path / "spool").requests
    assert (request.outcome, request.facts["error_code"]) == (Outcome.ERROR, "application_error")


def test_cancelled_application(tmp_path):
    """A task that the server cancels, as it does when it ends, is a lost request: its client is still there."""

    async def application(_scope, _receive, _send):
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, application)
    (request,) = read_spool(tmp_path / "spool").requests
    assert request.outcome is Outcome.LOST


def test_disconnect_before_the_last_byte(tmp_path):
    """A client that goes away before the end cancels its request."""

    async def application(_scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
        await receive()

    _, (request,) = run(tmp_path, application)
    assert request.outcome is Outcome.CANCELLED
    assert request.first_useful is not None


@pytest.mark.parametrize("status", [200, 400])
def test_answer_to_nobody(tmp_path, status):
    """What is sent when the client has left is no answer: no status, no useful byte, no last one, no error."""

    async def application(_scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"null"})

    sent, (request,) = run(tmp_path, application)
    assert len(sent) == 2
    assert (request.outcome, request.facts) == (Outcome.CANCELLED, {"path": "/v1/chat/completions"})
    assert (request.first_useful, request.last_byte) == (None, None)


NAMED = b'data: {"id":"cmpl-1","choices":[{"index":3,"text":"a"}]}\n\n'


def test_chunk_says_which_answer_it_is_of(tmp_path):
    """A chunk names its answer; the tokens before it are that answer's."""

    async def application(scope, receive, send):
        queue = Queue()
        current_request.get().delivery.watch(queue, 2, Recorder(tmp_path / "other"))
        queue.put(output(1, 2, index=1))
        queue.put(output(1, index=0))
        queue.get_nowait()
        await answering(EMPTY, NAMED, b"", headers=SSE)(scope, receive, send)

    _, (request,) = run(tmp_path, application, path="/v1/completions")
    assert (request.choice, request.tokens_before) == (3, 1)


CREATED = (
    b'event: response.created\ndata: {"response":{"instructions":"i","tools":[{"name":"n"}],"text":"t"}}\n\n'
)
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
MESSAGE_START = b'event: message_start\ndata: {"message":{"id":"m","content":[],"role":"assistant"}}\n\n'
THOUGHT = b'event: content_block_delta\ndata: {"delta":{"type":"thinking_delta","thinking":"a"}}\n\n'


@pytest.mark.parametrize(
    ("path", "first", "useful"),
    [("/v1/responses", CREATED, DELTA), ("/v1/messages", MESSAGE_START, THOUGHT)],
)
def test_first_useful_event_of_other_streams(tmp_path, path, first, useful):
    """What an event repeats of the request is not useful, whatever it holds."""
    _, (request,) = run(tmp_path, answering(first, useful, b"", headers=SSE), path=path)
    assert request.first_useful is not None
    _, requests = run(tmp_path / "without", answering(first, b"", headers=SSE), path=path)
    assert requests[0].first_useful is None


def test_other_paths_are_left_alone(tmp_path):
    """Health checks, metrics and unknown paths are not recorded."""
    sent, requests = run(tmp_path, answering(b"ok"), path="/health")
    assert len(sent) == 2
    assert requests == []


def test_upload_in_pieces(tmp_path):
    """The body is complete with its last piece."""
    pieces = [{"type": "http.request", "body": b"a" * 10, "more_body": True}] * 3
    _, (request,) = run(
        tmp_path,
        answering(b"{}"),
        incoming=[*pieces, {"type": "http.request", "body": b"", "more_body": False}],
    )
    assert request.body_complete is not None


def test_headers(tmp_path):
    """Trace parent and our baggage members are kept, others are not."""
    headers = [
        (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        (
            b"baggage",
            b"user=secret, stagetrace.phase=mixture%201 ;p=1,stagetrace.label=image,stagetrace.intended_unix_ns=1796015969815342382",
        ),
        (b"authorization", b"Bearer secret"),
    ]
    _, (request,) = run(tmp_path, answering(b"{}"), headers=headers)
    assert request.facts["traceparent"].startswith("00-0af7")
    assert request.facts["phase"] == "mixture 1"
    assert request.facts["label"] == "image"
    assert request.facts["intended_unix_ns"] == 1796015969815342382
    spool = b"".join(path.read_bytes() for path in (tmp_path / "spool").iterdir())
    assert b"secret" not in spool


@pytest.mark.parametrize(
    "value",
    [
        b"stagetrace.phase=" + b"x" * 5000,
        b"stagetrace.intended_unix_ns=-1",
        b"stagetrace.intended_unix_ns=" + b"9" * 30,
        b"stagetrace.phase",
        b"\xff\xfe=stagetrace.,,=,",
    ],
)
def test_hostile_baggage_does_no_harm(tmp_path, value):
    """Oversized, malformed and negative members are not taken, and nothing fails."""
    sent, (request,) = run(tmp_path, answering(b"{}"), headers=[(b"baggage", value)])
    assert len(sent) == 2
    assert not {"phase", "intended_unix_ns"} & set(request.facts)
