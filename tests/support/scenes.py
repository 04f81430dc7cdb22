"""Scenes for a real server: requests with names, sent when the server is at an awaited point."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter

import aiohttp

from stagetrace.process_records import ProcessRecords
from stagetrace.records import JobKind
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace_analyzer.demo.media import data_url, make_jpeg
from stagetrace_analyzer.demo.model import WORDS

NUMBERS = itertools.count(1)
TEXT = {"type": "text", "text": "the lamp on the table"}
COMPLETIONS = "/v1/chat/completions"
SECRET = "zqxvkj"  # noqa: S105 - only in that nobody may tell it
"""A word of prompts and of paths of URLs that must not be recorded anywhere."""


def unique(jpeg):
    """The same picture under another hash: what stands behind its end is ignored."""
    return jpeg + next(NUMBERS).to_bytes(4, "big")


def part(url):
    """A part of a message with an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def words(count):
    """A part of a message with so many words, a token each, that nobody has sent before."""
    draw = random.Random(next(NUMBERS))
    return {"type": "text", "text": " ".join(draw.choices(WORDS, k=count))}


def small_image(size=(320, 240)):
    """An image that nobody has seen, in the body."""
    return part(data_url(make_jpeg(10_000 + next(NUMBERS), size)))


def body(*content, **more):
    """A chat completion of one token in one piece."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "stream": False} | more


class Client:
    """Sends requests of one phase, and keeps how long each took."""

    def __init__(self, session, server, phase):
        self.session, self.server, self.phase = session, server, phase
        self.took_ms = {}

    def headers(self, label):
        """How the server is told what a request is."""
        return {"baggage": f"stagetrace.phase={self.phase},stagetrace.label={label}"}

    async def send(self, label, request, *, status=200, block_ms=None):
        """Send a request and return its whole answer; the server's loop may be blocked in the middle of it.

        The answer must have the status, unless that is None.
        """
        began = time.monotonic()
        url = self.server.url + COMPLETIONS
        content = self.server.visible | request
        headers = self.headers(label)
        if block_ms is not None:
            headers["x-block-loop-ms"] = str(block_ms)
        async with self.session.post(url, json=content, headers=headers) as response:
            answer = await response.read()
        self.took_ms[label] = (time.monotonic() - began) * 1e3
        assert status in {response.status, None}, answer[:500]
        return answer

    async def leave(self, label, request, condition):
        """Send a request, and go away as soon as the server has recorded that it fulfils a condition."""
        sent = asyncio.create_task(self.send(label, request))
        await self.until(label, condition)
        await gone(sent)

    async def start(self, label, request):
        """Send a request and wait for the first piece of its answer; returns the stream."""
        stream = Stream(self, label, request)
        while not stream.times:
            assert not stream.read.done(), await stream.read
            await asyncio.sleep(0.002)
        return stream

    async def seated(self, count):
        """Wait until the engine itself says that it runs so many requests."""
        await self._told("running", count)

    async def queued(self, count):
        """Wait until the engine itself says that so many requests are in its queue."""
        await self._told("waiting", count)

    async def _told(self, what, count):
        wanted = f"vllm:num_requests_{what}{{"
        deadline = time.monotonic() + 30
        while True:
            async with self.session.get(self.server.url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            (told,) = (float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))
            if told == count:
                return
            assert time.monotonic() < deadline, f"{told} requests are {what}"
            await asyncio.sleep(0.005)

    async def until(self, label, condition, count=1):
        """Wait until so many requests of a label fulfil a condition; they may be in flight."""
        deadline = time.monotonic() + 30
        while sum(map(condition, self._recorded(label))) < count:
            assert time.monotonic() < deadline, "the requests did not come to the awaited point"
            await asyncio.sleep(0.005)

    def _recorded(self, label):
        """The requests of a label as the API server has recorded them; reading all would take too long."""
        paths = [path for path in segment_paths(self.server.spool) if path.name.startswith("api")]
        if not paths:
            return []
        reader = ProcessRecords([read_segment(path) for path in paths], Counter())
        wanted = {"phase": self.phase, "label": label}
        return [request for request in reader.requests.values() if wanted.items() <= request.facts.items()]

    @property
    def injected_ms(self):
        """How much longer the client waited for the delayed request than for the other."""
        return self.took_ms["delayed"] - self.took_ms["undelayed"]


class Stream:
    """An answer that is being read.

    Attributes:
        times: When each piece came, the first one with the first token.
        read: The task that reads.
    """

    def __init__(self, client, label, request):
        self.times = []
        self.read = asyncio.create_task(self._read(client, label, request))

    async def _read(self, client, label, request):
        content = client.server.visible | request | {"stream": True}
        url = client.server.url + COMPLETIONS
        async with client.session.post(url, json=content, headers=client.headers(label)) as response:
            assert response.status == 200, await response.read()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())

    def longest_silence(self, begin=0):
        """When the longest silence between two pieces began and ended."""
        pairs = itertools.pairwise(self.times[begin:])
        return max(pairs, key=lambda pair: pair[1] - pair[0], default=(0, 0))

    async def silence(self, seconds):
        """Wait until a silence of so many seconds, from now on, is over."""
        known = max(len(self.times) - 1, 0)
        while True:
            began, ended = self.longest_silence(known)
            if ended - began >= seconds:
                return
            assert not self.read.done(), "the answer ended without a silence"
            await asyncio.sleep(0.005)


async def gone(task):
    """Cancel a task that reads an answer, which closes its connection."""
    task.cancel()
    await asyncio.wait([task])


def play(server, phase, scene):
    """Play a scene; returns its client, and the last request of each label, once all have ended."""

    async def within():
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            client = Client(session, server, phase)
            await scene(client)
            return client

    client = asyncio.run(within())

    def ended(data):
        if any(request.facts.get("phase") == phase for request in data.open_requests):
            return None
        return {r.facts["label"]: r for r in data.requests if r.facts.get("phase") == phase}

    return client, server.wait_for(ended)


def working(kind):
    """Whether a job of a kind is being done for a request."""
    return lambda request: any(j.kind is kind and j.started and not j.ended for j in request.jobs)


def processed(request):
    """Whether the processor is done with a request, which goes to the engine next."""
    return any(j.kind is JobKind.PROCESS and j.ended for j in request.jobs)


def fetching(request):
    """Whether the server has begun to fetch an image of a request."""
    return any(item.fetches for item in request.items.values())


def submitted(kind):
    """Whether a job of a kind has been given to its pool for a request."""
    return lambda request: any(job.kind is kind for job in request.jobs)
