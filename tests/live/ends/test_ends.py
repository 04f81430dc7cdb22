"""Every end that a request can have on a real server is told as it was."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import struct
import time
from contextlib import asynccontextmanager, suppress
from unittest.mock import ANY
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image
from scenes import (
    COMPLETIONS,
    NUMBERS,
    SECRET,
    body,
    fetching,
    gone,
    part,
    play,
    small_image,
    submitted,
    unique,
    words,
    working,
)

from stagetrace import Outcome, Stage
from stagetrace.records import JobKind
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace_analyzer.demo.media import make_jpeg

TEXT = {"type": "text", "text": f"the lamp on the table {SECRET}"}
LONG = {"max_tokens": 900}
STREAM = {"stream": True}


def picture(width, height, form, *, noise=False, **options):
    """An image as a file, of noise or of a single colour."""
    if noise:
        pixels = np.random.default_rng(1).integers(60, 190, (height, width), np.uint8)
        image = Image.fromarray(pixels).convert("RGB")
    else:
        image = Image.new("RGB", (width, height), (9, 90, 180))
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def slow_picture():
    """54 megapixels that take over a second to decode."""
    return picture(9000, 6000, "JPEG", noise=True, quality=90, progressive=True, subsampling=0)


@pytest.fixture
def file_image(media_folder):
    """Writes an image where the server may load it; returns the part of a message."""

    def write(content):
        path = media_folder / f"{SECRET}-{next(NUMBERS)}.jpg"
        path.write_bytes(content)
        return part(path.as_uri())

    return write


async def closed(writer):
    """Close a connection, whatever the other side did."""
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


class MediaHost:
    """A media server that gives every request the same answer, and none without a status.

    Attributes:
        url: An address on it.
        asked: Set when the first request has come.
    """

    def __init__(self, status, content=b""):
        self._status, self._content, self._writers = status, content, []
        self.asked = asyncio.Event()

    async def _answer(self, reader, writer):
        self._writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        self.asked.set()
        if self._status is None:
            await reader.read()
        else:
            head = b"HTTP/1.1 %d Such\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (self._status, len(self._content)) + self._content)
        writer.close()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/{SECRET}/{next(NUMBERS)}.jpg?{SECRET}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            await closed(writer)


@asynccontextmanager
async def written(client, label, content, length):
    """A connection on which a request has been written; a longer length than its content is an upload that goes on."""
    address = urlsplit(client.server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = [f"POST {COMPLETIONS} HTTP/1.1", "Host: server", "Content-Type: application/json"]
    head += [
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in client.headers(label).items()),
    ]
    writer.write("\r\n".join([*head, "", ""]).encode() + content)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        await closed(writer)


def known(_request):
    """Whether the server knows of a request at all."""
    return True


# --- the client goes away --------------------------------------------------------------------------


def test_client_leaves_in_its_upload(narrow_server, ended):
    """It ends in ``receive``; that vLLM calls half a body a bad request is nobody's error."""

    async def scene(client):
        content = json.dumps(narrow_server.visible | body(TEXT)).encode()
        async with written(client, "left", content, len(content) + 100):
            await client.until("left", known)

    _, requests = play(narrow_server, "leaves in its upload", scene)
    ended("client leaves while it uploads", narrow_server, requests["left"], Outcome.CANCELLED, Stage.RECEIVE)


def test_client_leaves_in_a_fetch(narrow_server, ended):
    """It ends in ``retrieval``."""

    async def scene(client):
        async with MediaHost(None) as host:
            sent = asyncio.create_task(client.send("left", body(part(host.url), TEXT)))
            await host.asked.wait()
            await client.until("left", fetching)
            await gone(sent)

    _, requests = play(narrow_server, "leaves in a fetch", scene)
    ended(
        "client leaves while an image is fetched",
        narrow_server,
        requests["left"],
        Outcome.CANCELLED,
        Stage.RETRIEVAL,
    )


def test_client_leaves_in_decoding(narrow_server, ended, slow_picture, file_image):
    """It ends in ``media_decode``, though the thread goes on; who waits behind it ends in the wait for the thread."""

    async def scene(client):
        image = file_image(unique(slow_picture))
        sent = asyncio.create_task(client.send("decoding", body(image, TEXT)))
        await client.until("decoding", working(JobKind.DECODE))
        await client.leave("behind", body(small_image(), TEXT), submitted(JobKind.DECODE))
        await gone(sent)
        await client.until("decoding", lambda request: request.jobs[0].ended is not None)

    _, requests = play(narrow_server, "leaves in decoding", scene)
    decoding = requests["decoding"]
    (job,) = decoding.jobs
    assert job.ended > decoding.ended + 10_000_000
    ended(
        "client leaves while an image is decoded",
        narrow_server,
        decoding,
        Outcome.CANCELLED,
        Stage.MEDIA_DECODE,
    )
    ended(
        "client leaves while its image waits for a thread",
        narrow_server,
        requests["behind"],
        Outcome.CANCELLED,
        Stage.MEDIA_DECODE_WAIT,
    )


def test_client_leaves_in_preprocessing(narrow_server, ended, file_image):
    """It ends in ``preprocess``, though the thread goes on."""
    plain = picture(6000, 4000, "JPEG")

    async def scene(client):
        await client.leave("left", body(file_image(unique(plain)), TEXT), working(JobKind.PROCESS))
        await client.until("left", lambda request: all(job.ended is not None for job in request.jobs))

    _, requests = play(narrow_server, "leaves in preprocessing", scene)
    left = requests["left"]
    assert max(job.ended for job in left.jobs) > left.ended + 10_000_000
    ended(
        "client leaves while its image is processed", narrow_server, left, Outcome.CANCELLED, Stage.PREPROCESS
    )


def test_client_leaves_in_the_queue(narrow_server, ended):
    """It ends in ``prefill.wait``; those in the seats go on and end well."""

    async def scene(client):
        others = [await client.start("seated", body(TEXT, **LONG)) for _ in range(2)]
        sent = asyncio.create_task(client.send("left", body(TEXT)))
        await client.queued(1)
        await gone(sent)
        await client.queued(0)
        await asyncio.gather(*(other.read for other in others))

    _, requests = play(narrow_server, "leaves in the queue", scene)
    ended(
        "client leaves while it waits for a seat",
        narrow_server,
        requests["left"],
        Outcome.CANCELLED,
        Stage.PREFILL_WAIT,
        finish="aborted",
    )
    ended("answer as long as it may be", narrow_server, requests["seated"], Outcome.OK, finish="length")


@pytest.mark.parametrize("stream", [True, False])
def test_client_leaves_in_the_answer(narrow_server, ended, stream):
    """It ends in ``decode``, whether it has seen tokens or not."""

    async def scene(client):
        if stream:
            answer = await client.start("left", body(TEXT, **LONG))
            await gone(answer.read)
        else:
            sent = asyncio.create_task(client.send("left", body(TEXT, **LONG)))
            await client.seated(1)
            await asyncio.sleep(0.2)
            await gone(sent)
        await client.seated(0)

    _, requests = play(narrow_server, f"leaves in the answer {stream}", scene)
    left = requests["left"]
    assert (left.first_useful is not None) == stream
    assert left.last_byte is None
    what = "client leaves in the middle of a stream" if stream else "client leaves before the whole answer"
    ended(what, narrow_server, left, Outcome.CANCELLED, Stage.DECODE, finish="aborted")


def test_cut_stream(narrow_server, ended):
    """A connection that is reset in the middle of a stream cancels its request as one that is closed does."""

    async def scene(client):
        content = json.dumps(narrow_server.visible | body(TEXT, **LONG, **STREAM)).encode()
        async with written(client, "cut", content, len(content)) as (reader, writer):
            for _ in range(5):
                await reader.readuntil(b"\n\n")
            # Closed with an answer unread and no patience, it is reset.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await client.seated(0)

    _, requests = play(narrow_server, "cut stream", scene)
    ended(
        "connection is reset in the middle of a stream",
        narrow_server,
        requests["cut"],
        Outcome.CANCELLED,
        Stage.DECODE,
        finish="aborted",
    )


def test_client_leaves_two_answers(narrow_server, ended):
    """Both of the engine's requests are given up."""

    async def scene(client):
        answer = await client.start("left", body(TEXT, n=2, temperature=1, max_tokens=300))
        await client.seated(2)
        await gone(answer.read)
        await client.seated(0)

    _, requests = play(narrow_server, "leaves two answers", scene)
    left = requests["left"]
    assert [engine.aborted for engine in left.engine_requests] == [True, True]
    assert all(engine.freed is not None for engine in left.engine_requests)
    ended(
        "client leaves two answers (n=2)",
        narrow_server,
        left,
        Outcome.CANCELLED,
        Stage.DECODE,
        finish="aborted",
    )


# --- refused ---------------------------------------------------------------------------------------

REFUSED = [
    ("not a number of tokens", body(TEXT, max_tokens=-1), 400, Stage.PREPROCESS),
    ("no messages", {"max_tokens": 1}, 400, Stage.RECEIVE),
    ("unknown model", body(TEXT, model=SECRET), 404, Stage.RECEIVE),
    (
        "prompt longer than the model's context",
        body({"type": "text", "text": f"{SECRET} " * 1000}),
        400,
        Stage.PREPROCESS,
    ),
    ("more images than allowed", body(*[part(f"http://127.0.0.1/{SECRET}")] * 5), 400, Stage.RECEIVE),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_refused(narrow_server, ended, case):
    """A request that is not valid ends in the stage that found it out."""
    what, request_body, status, stage = case
    answers = []

    async def scene(client):
        answers.append(await client.send("refused", request_body, status=status))

    _, requests = play(narrow_server, what, scene)
    ended(
        what,
        narrow_server,
        requests["refused"],
        Outcome.ERROR,
        stage,
        code=f"http_{status}",
        answer=answers[0],
    )


# --- media that cannot be had ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "answered", "status"),
    [
        ("image is not found", (404,), 422),
        ("image is forbidden", (403,), 422),
        ("media server fails", (503,), 500),
        ("image is larger than may be fetched", (200, b"a" * 1_100_000), 422),
        ("media server does not answer in time", (None,), 500),
    ],
)
def test_media_that_cannot_be_fetched(narrow_server, ended, what, answered, status):
    """A request whose image cannot be fetched ends in ``retrieval``."""
    answers = []

    async def scene(client):
        async with MediaHost(*answered) as host:
            answers.append(await client.send("failed", body(part(host.url), TEXT), status=status))

    _, requests = play(narrow_server, what, scene)
    found = requests["failed"]
    ended(
        what, narrow_server, found, Outcome.ERROR, Stage.RETRIEVAL, code=f"http_{status}", answer=answers[0]
    )


def test_media_host_that_is_not_there(narrow_server, ended):
    """A refused connection ends in ``retrieval``."""
    answers = []

    async def scene(client):
        async with MediaHost(200) as host:
            pass
        answers.append(await client.send("failed", body(part(host.url), TEXT), status=500))

    _, requests = play(narrow_server, "no host", scene)
    ended(
        "media server refuses the connection",
        narrow_server,
        requests["failed"],
        Outcome.ERROR,
        Stage.RETRIEVAL,
        code="http_500",
        answer=answers[0],
    )


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("image is cut off", make_jpeg(1)[:3000]),
        ("image is no image", SECRET.encode() * 100),
        ("image has more pixels than may be decoded", picture(9000, 7000, "PNG")),
    ],
)
def test_media_that_cannot_be_decoded(narrow_server, ended, what, content, file_image):
    """A request whose image cannot be decoded ends in ``media_decode``, wherever the image is from."""
    answers = {}

    async def scene(client):
        async with MediaHost(200, content) as host:
            for label, image in (("http", part(host.url)), ("file", file_image(content))):
                answers[label] = await client.send(label, body(image, TEXT), status=400)

    _, requests = play(narrow_server, what, scene)
    for label, found in requests.items():
        ended(
            f"{what} ({label})",
            narrow_server,
            found,
            Outcome.ERROR,
            Stage.MEDIA_DECODE,
            code="http_400",
            answer=answers[label],
        )


def test_media_that_is_not_base64(narrow_server, ended):
    """A data URL that is damaged ends in ``media_decode``."""
    answers = []

    async def scene(client):
        image = part(f"data:image/jpeg;base64,{SECRET}!")
        answers.append(await client.send("failed", body(image, TEXT), status=400))

    _, requests = play(narrow_server, "not base64", scene)
    ended(
        "data URL is damaged",
        narrow_server,
        requests["failed"],
        Outcome.ERROR,
        Stage.MEDIA_DECODE,
        code="http_400",
        answer=answers[0],
    )


# --- errors after HTTP 200 -------------------------------------------------------------------------


async def error_of_stream(client, label, request):
    """Send a request for a stream; return the first error in it."""
    answer = await client.send(label, request | STREAM)
    events = [line.removeprefix(b"data: ") for line in answer.splitlines()]
    return next(event for event in events if event.startswith(b'{"error"'))


def test_internal_error_of_the_engine(narrow_server, ended):
    """Its code is the exception's class in a stream and the status in an answer of one piece."""
    # The letters that the model may say are not in the grammar: the engine ends such a request itself.
    contradiction = body(TEXT, structured_outputs={"regex": "[0-9]+"}, max_tokens=8)
    answers = []

    async def scene(client):
        answers.append(await error_of_stream(client, "stream", contradiction))
        answers.append(await client.send("piece", contradiction, status=500))

    _, requests = play(narrow_server, "contradiction", scene)
    for label, code, answer in zip(
        ("stream", "piece"), ("InternalServerError", "http_500"), answers, strict=True
    ):
        ended(
            f"engine fails at the answer ({label})",
            narrow_server,
            requests[label],
            Outcome.ERROR,
            Stage.PREFILL,
            code=code,
            finish="error",
            answer=answer,
        )


def test_refused_after_the_answer_began(narrow_server, ended):
    """What vLLM checks only when the stream has begun is an error behind HTTP 200."""
    answers = []

    async def scene(client):
        refused = body(TEXT, allowed_token_ids=[10_000_000])
        answers.append(await error_of_stream(client, "refused", refused))

    _, requests = play(narrow_server, "refused late", scene)
    assert requests["refused"].facts["status"] == 200
    ended(
        "not valid, found out after HTTP 200",
        narrow_server,
        requests["refused"],
        Outcome.ERROR,
        Stage.PREPROCESS,
        code="VLLMValidationError",
        answer=answers[0],
    )


# --- ends that are well ----------------------------------------------------------------------------


def test_stop_string(narrow_server, ended):
    """A stop string ends a request well, with tokens to spare."""

    async def scene(client):
        (letter, *_) = narrow_server.visible["allowed_token_ids"]
        await client.send("stopped", body(TEXT, stop="a" * 5, allowed_token_ids=[letter], **LONG))
        await client.seated(0)

    _, requests = play(narrow_server, "stop string", scene)
    assert requests["stopped"].facts["output_tokens"] < 900
    ended("stop string", narrow_server, requests["stopped"], Outcome.OK, finish="stop")


def test_preempted(narrow_server, ended):
    """A server starts only when a request of full length has room: one that is preempted ends well."""

    async def scene(client):
        await asyncio.gather(*(client.send(label, body(words(20), **LONG)) for label in ("first", "second")))

    _, requests = play(narrow_server, "preempted", scene)
    assert any(engine.preempted for r in requests.values() for engine in r.engine_requests)
    for found in requests.values():
        preempted = any(engine.preempted for engine in found.engine_requests)
        what = "preempted because the KV cache is full" if preempted else "beside one that is preempted"
        ended(what, narrow_server, found, Outcome.OK, finish="length")


# --- the server goes away --------------------------------------------------------------------------


async def four_in_flight(client):
    """Send two requests that take the seats and two that wait for them, in a stream and in a piece each."""
    tasks = {}
    for prefix, length in (("", 4000), ("queued ", 1)):
        for label, more in (("streamed", STREAM), ("whole", {})):
            request = body(TEXT, max_tokens=length, **more)
            sent = client.send(prefix + label, request, status=None)
            tasks[prefix + label] = asyncio.create_task(sent)
        await (client.queued(2) if prefix else client.seated(2))
    return tasks


def engine_pid(server):
    """The process that runs the engine."""
    (path,) = (path for path in segment_paths(server.spool) if path.name.startswith("engine"))
    return read_segment(path).header.pid


STAGES = {
    "streamed": Stage.DECODE,
    "whole": Stage.DECODE,
    "queued streamed": Stage.PREFILL_WAIT,
    "queued whole": Stage.PREFILL_WAIT,
}


def test_engine_dies(mortal_server, ended):
    """Requests in flight end where they were when their engine died; one that had not come to it goes its way."""

    async def scene(client):
        async with MediaHost(None) as host:
            fetched = asyncio.create_task(client.send("fetched", body(part(host.url), TEXT), status=500))
            tasks = await four_in_flight(client)
            os.kill(engine_pid(mortal_server), signal.SIGKILL)
            await asyncio.gather(fetched, *tasks.values())

    _, requests = play(mortal_server, "engine dies", scene)
    for label, stage in STAGES.items():
        what = f"engine is killed ({label})"
        ended(what, mortal_server, requests[label], Outcome.ERROR, stage, code="engine_dead")
    what = "engine is killed while an image is fetched"
    ended(what, mortal_server, requests["fetched"], Outcome.ERROR, Stage.RETRIEVAL, code="http_500")


def until_gone(server, pid):
    """Wait until a process of a server is no more."""
    while pid in server.process.pids():
        time.sleep(0.05)


def told_of_its_engine(answer):
    """What vLLM told of an engine that was stopped with its server, and what is known then."""
    if b'{"error":' in answer:
        return "its death is noticed", {"code": "engine_dead", "finish": ANY}
    # A stream without a token may end without a reason.
    assert b'"finish_reason":"abort"' in answer or answer.endswith(b"data: [DONE]\n\n"), answer
    return "engine is heard", {"code": "engine_abort", "finish": "abort"}


def test_server_is_stopped(mortal_server, ended):
    """On SIGTERM vLLM stops its engine; it depends on a race what becomes of the requests in flight, and that is told."""
    told, left = {}, []

    async def scene(client):
        tasks = await four_in_flight(client)
        mortal_server.process._process.terminate()
        await asyncio.to_thread(until_gone, mortal_server, engine_pid(mortal_server))
        await asyncio.sleep(0.5)
        told.update({label: task.result() for label, task in tasks.items() if task.done()})
        left.extend([label for label in tasks if label not in told][:2])
        for label in left:
            await gone(tasks[label])
        await asyncio.to_thread(mortal_server.process.stop, 1)
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    _, requests = play(mortal_server, "server is stopped", scene)
    for label, stage in STAGES.items():
        found = requests[label]
        if label in told:
            how, facts = told_of_its_engine(told[label])
            what = f"server is stopped, {how} ({label})"
            ended(what, mortal_server, found, Outcome.ERROR, stage, **facts)
        elif label in left:
            what = f"server is stopped, client leaves ({label})"
            # How long the engine still worked is recorded only if it came to let go of it.
            ended(what, mortal_server, found, Outcome.CANCELLED, Stage.UNATTRIBUTED, finish=ANY)
        else:
            what = f"server is stopped and killed, client stays ({label})"
            ended(what, mortal_server, found, Outcome.LOST, finish=ANY)
