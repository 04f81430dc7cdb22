"""Delays of known size, put into a real server's front end from outside, and the stage they are found in."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket
import time
from urllib.parse import urlsplit

import duckdb
import numpy as np
import pytest
from PIL import Image
from scenes import (
    COMPLETIONS,
    NUMBERS,
    TEXT,
    body,
    fetching,
    part,
    play,
    small_image,
    submitted,
    unique,
    working,
)

from stagetrace import Horizon, Stage, partition
from stagetrace.records import JobKind
from stagetrace_analyzer.demo.media import data_url, make_jpeg
from stagetrace_analyzer.ingest import ingest_spool


def jpeg(width, height, *, slow):
    """A picture that takes as long to decode as it can, or as short."""
    if slow:
        noise = np.random.default_rng(1).integers(60, 190, (height, width), np.uint8)
        picture = Image.fromarray(noise).convert("RGB")
    else:
        picture = Image.new("RGB", (width, height), (9, 90, 180))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90, progressive=slow, subsampling=0)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def pictures():
    """54 megapixels that take over a second to decode and as many that do not; a large plain one, and a middling slow one."""
    return {
        "slow": jpeg(9000, 6000, slow=True),
        "fast": jpeg(9000, 6000, slow=False),
        "large": jpeg(6000, 4000, slow=False),
        "middling": jpeg(4500, 3000, slow=True),
    }


@pytest.fixture
def file_image(media_folder):
    """Writes an image where the server may load it; returns the part of a message."""

    def write(content):
        path = media_folder / f"{next(NUMBERS)}.jpg"
        path.write_bytes(unique(content))
        return part(path.as_uri())

    return write


def test_slow_media_server(front_end, find):
    """A media server that takes a second is a second of ``retrieval``."""

    async def scene(client):
        for label, delay_ms in (("undelayed", 0), ("delayed", 1000)):
            url = front_end.media.url(next(NUMBERS), delay_ms=delay_ms)
            await client.send(label, body(part(url), TEXT))

    _, requests = play(front_end, "slow media server", scene)
    find("slow media server", Stage.RETRIEVAL, 1000, requests["delayed"], requests["undelayed"])
    assert requests["delayed"].items[0].facts["fetch_attempts"] == 1


def test_refused_connection(front_end, find):
    """A refused connection costs vLLM's pause of a second; pause and second attempt are ``retrieval``."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        content = make_jpeg(10_000 + next(NUMBERS))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(content))
        writer.write(content)
        writer.close()

    async def scene(client):
        await client.send("undelayed", body(part(front_end.media.url(next(NUMBERS), delay_ms=0)), TEXT))
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/image.jpg"
        sent = asyncio.create_task(client.send("delayed", body(part(url), TEXT)))
        await client.until("delayed", fetching)
        await asyncio.sleep(0.2)
        async with await asyncio.start_server(answer, sock=bound):
            await sent

    _, requests = play(front_end, "refused connection", scene)
    find("refused connection", Stage.RETRIEVAL, 1000, requests["delayed"], requests["undelayed"])
    assert requests["delayed"].items[0].facts["fetch_attempts"] == 2


def test_slow_decoding(front_end, find, pictures, file_image):
    """Of two images of one size, what one takes longer to decode is ``media_decode``."""

    async def scene(client):
        images = {"undelayed": file_image(pictures["fast"]), "delayed": file_image(pictures["slow"])}
        # The second time the processor knows them, so that decoding is all that differs.
        for image in images.values():
            await client.send("first", body(image, TEXT))
        for label, image in images.items():
            await client.send(label, body(image, TEXT))

    client, requests = play(front_end, "slow decoding", scene)
    find("slow decoding", Stage.MEDIA_DECODE, client.injected_ms, requests["delayed"], requests["undelayed"])


def test_busy_media_pool(front_end, find, pictures, file_image):
    """Behind somebody else's huge image a small one waits in ``media_decode.wait``."""

    async def scene(client):
        await client.send("undelayed", body(small_image(), TEXT))
        other = asyncio.create_task(client.send("other", body(file_image(pictures["slow"]), TEXT)))
        await client.until("other", working(JobKind.DECODE))
        sent = asyncio.create_task(client.send("delayed", body(small_image(), TEXT)))
        await client.until("delayed", submitted(JobKind.DECODE))
        # It has done its harm in this pool, and must not do any in the ones behind.
        other.cancel()
        await sent

    client, requests = play(front_end, "busy media pool", scene)
    find(
        "busy media pool",
        Stage.MEDIA_DECODE_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
    )


def test_busy_renderer(front_end, find):
    """Behind somebody else's long texts a short one waits in ``preprocess.wait``."""
    texts = 6

    async def scene(client):
        await client.send("undelayed", body(TEXT))
        # Tokenized, and then refused as too long, so that the engine never sees them.
        long = body({"type": "text", "text": "zqxvkj" * 130_000})
        others = [asyncio.create_task(client.send("other", long, status=400)) for _ in range(texts)]
        await client.until("other", submitted(JobKind.TOKENIZE), count=texts)
        await client.send("delayed", body(TEXT))
        await asyncio.gather(*others)

    client, requests = play(front_end, "busy renderer", scene)
    find(
        "busy renderer",
        Stage.PREPROCESS_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
    )


def test_busy_processor(front_end, find, pictures, file_image):
    """Behind somebody else's large images a small one waits for the processor in ``preprocess.wait``."""

    async def scene(client):
        await client.send("undelayed", body(small_image(), TEXT))
        images = [file_image(pictures["large"]) for _ in range(4)]
        other = asyncio.create_task(client.send("other", body(*images, TEXT)))
        await client.until("other", working(JobKind.PROCESS))
        sent = asyncio.create_task(client.send("delayed", body(small_image(), TEXT)))
        await client.until("delayed", submitted(JobKind.PROCESS))
        other.cancel()
        await sent

    client, requests = play(front_end, "busy processor", scene)
    find(
        "busy processor",
        Stage.PREPROCESS_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
    )


class RawConnection:
    """A connection on which a request is written, and its answer read, at the pace of a test."""

    def __init__(self, client, *, receive_buffer=None):
        self.client = client
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setblocking(False)  # noqa: FBT003 - its only parameter

    async def __aenter__(self):
        address = urlsplit(self.client.server.url)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, (address.hostname, address.port))
        return self

    async def __aexit__(self, *_):
        self.socket.close()

    async def write_head(self, label, length):
        """Write the head of a request; the server calls its application at the end of it."""
        head = [f"POST {COMPLETIONS} HTTP/1.1", "Host: server", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {length}"]
        head += [f"{name}: {value}" for name, value in self.client.headers(label).items()]
        await self.write("\r\n".join([*head, "", ""]).encode())

    async def write(self, piece):
        """Write a piece of a request."""
        await asyncio.get_running_loop().sock_sendall(self.socket, piece)

    async def read_all(self):
        """Read until the server closes."""
        loop, pieces = asyncio.get_running_loop(), []
        while piece := await loop.sock_recv(self.socket, 1 << 20):
            pieces.append(piece)
        return b"".join(pieces)


def test_slow_upload(front_end, find, pictures, tmp_path):
    """A body that comes slowly is ``receive``, and its upload is a fact in the dataset."""
    took_ms = {}

    async def upload(client, label, pause_s):
        image = part(data_url(unique(pictures["middling"])))
        content = json.dumps(front_end.visible | body(image, TEXT)).encode()
        pieces = [
            content[place : place + len(content) // 10]
            for place in range(0, len(content), len(content) // 10)
        ]
        async with RawConnection(client) as connection:
            await connection.write_head(label, len(content))
            began = time.monotonic()
            for piece in pieces:
                await asyncio.sleep(pause_s)
                await connection.write(piece)
            took_ms[label] = (time.monotonic() - began) * 1e3
            await connection.read_all()

    async def scene(client):
        await upload(client, "undelayed", 0)
        await upload(client, "delayed", 0.15)

    _, requests = play(front_end, "slow upload", scene)
    injected_ms = took_ms["delayed"] - took_ms["undelayed"]
    find("slow upload", Stage.RECEIVE, injected_ms, requests["delayed"], requests["undelayed"])
    ingest_spool(front_end.spool, tmp_path)
    query = f"SELECT upload_ns / 1e6 FROM '{tmp_path}/requests/*.parquet' WHERE request_id = ?"
    ((upload_ms,),) = duckdb.execute(query, [requests["delayed"].request_id]).fetchall()
    assert upload_ms == pytest.approx(took_ms["delayed"], rel=0.05)


def longest_lag_ms(data, request):
    """The longest lag of the event loop while a request was in flight."""
    lags = [lag for lag in data.lags if request.received < lag.at + lag.duration and lag.at < request.ended]
    return max(lag.duration / 1e6 for lag in lags)


def test_blocked_loop_between_jobs(front_end, find, pictures, file_image, tmp_path):
    """A loop blocked while a job ends is the ``.wait`` of the next job, and a lag as long as the block."""
    block_ms = 2000

    async def scene(client):
        request = body(file_image(pictures["middling"]), TEXT)
        # From the second time on the processor knows the image.
        await client.send("first", request)
        await client.send("undelayed", request)
        await client.send("delayed", request, block_ms=block_ms)

    client, requests = play(front_end, "blocked loop between jobs", scene)
    find(
        "blocked loop between jobs",
        Stage.PREPROCESS_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
    )
    lag_ms = longest_lag_ms(front_end.read(), requests["delayed"])
    assert 0.95 * block_ms <= lag_ms <= 1.1 * block_ms
    ingest_spool(front_end.spool, tmp_path)
    query = f"SELECT max(duration_ns) / 1e6 FROM '{tmp_path}/loop_lag/*.parquet'"
    assert duckdb.sql(query).fetchall()[0][0] >= lag_ms


def test_blocked_loop_before_the_answer(front_end, find):
    """A loop blocked while the engine finishes is ``respond``, and a lag as long as the block."""
    answer = body(TEXT, max_tokens=100)

    def block_ms(client):
        return round(client.took_ms["undelayed"]) + 2000

    async def scene(client):
        with front_end.paced(5):
            await client.send("undelayed", answer)
            await client.send("delayed", answer, block_ms=block_ms(client))

    client, requests = play(front_end, "blocked loop before the answer", scene)
    find(
        "blocked loop before the answer",
        Stage.RESPOND,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
    )
    lag_ms = longest_lag_ms(front_end.read(), requests["delayed"])
    assert 0.95 * block_ms(client) <= lag_ms <= 1.1 * block_ms(client)


def test_slow_reader(front_end, find):
    """A client that does not read holds up the last byte, which is ``respond`` on the way to completion."""
    # Six answers at once, with the probabilities of nearly all tokens: megabytes after a few steps.
    large = {"n": 6, "temperature": 1, "logprobs": True, "top_logprobs": 600}
    request = body(TEXT, max_tokens=25, stream=True, **large)

    async def read(client, label, pause_s):
        content = json.dumps(front_end.visible | request).encode()
        async with RawConnection(client, receive_buffer=1 << 16) as connection:
            began = time.monotonic()
            await connection.write_head(label, len(content))
            await connection.write(content)
            await asyncio.sleep(pause_s)
            answer = await connection.read_all()
            client.took_ms[label] = (time.monotonic() - began) * 1e3
        # More than sockets hold, so that the server has to wait.
        assert len(answer) > 5e6, answer[:1000]

    async def scene(client):
        # The engine's first answer with probabilities takes longer than any other.
        await client.send("first", request | {"max_tokens": 1})
        await read(client, "undelayed", 0)
        await read(client, "delayed", client.took_ms["undelayed"] / 1e3 + 3)

    client, requests = play(front_end, "slow reader", scene)
    find(
        "slow reader",
        Stage.RESPOND,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        horizon=Horizon.COMPLETION,
    )


def test_schemes_side_by_side(front_end, file_image):
    """Of a data URL, a file and an http URL only the last one is fetched; all are decoded and known."""
    content = make_jpeg(10_000 + next(NUMBERS))
    images = {
        "data": part("data:image/jpeg;base64," + base64.b64encode(unique(content)).decode()),
        "file": file_image(content),
        "http": part(front_end.media.url(next(NUMBERS), delay_ms=50)),
    }

    async def scene(client):
        for scheme, image in images.items():
            await client.send(scheme, body(image, TEXT))
        for label in ("undelayed", "delayed"):
            await client.send(label, body(*images.values(), TEXT))

    _, requests = play(front_end, "schemes", scene)
    for scheme in images:
        (item,) = requests[scheme].items.values()
        stages = {interval.stage for interval in partition(requests[scheme]).ttft}
        assert Stage.MEDIA_DECODE in stages
        assert (Stage.RETRIEVAL in stages) == (scheme == "http")
        assert item.facts["scheme"] == scheme
        assert item.facts.get("host") == ("127.0.0.1" if scheme == "http" else None)
        assert item.facts.get("fetch_attempts") == (1 if scheme == "http" else None)
        assert item.facts.get("media_cache") is None
        assert (item.facts["width"], item.facts["height"], item.facts["format"]) == (320, 240, "jpeg")
        assert scheme == "http" or item.facts["bytes"] == len(content) + 4
    together = requests["delayed"].items
    assert [item.facts["scheme"] for item in together.values()] == list(images)
    # The server has seen the http URL before, and keeps what it fetches.
    assert [item.facts.get("media_cache") for item in together.values()] == [None, None, "hit"]
    assert Stage.RETRIEVAL not in {interval.stage for interval in partition(requests["delayed"]).ttft}
