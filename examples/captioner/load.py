"""Put load on the captioner: ``python -m captioner.load http://127.0.0.1:8000``.

Text, one image and many images, each alone and then together, as open-loop Poisson arrivals
with a fixed seed.  It needs stagetrace[demo], whose arrivals and image server it uses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

import httpx

from stagetrace_analyzer.demo.arrivals import Arrival, Stream, TrafficClass, poisson_plan
from stagetrace_analyzer.demo.media import MediaServer, data_url, make_jpeg
from stagetrace_analyzer.demo.model import WORDS

TEXT: Final = TrafficClass("text", words=5)
IMAGE: Final = TrafficClass("image", words=5, images=1)
IMAGES: Final = TrafficClass("images", words=5, images=4)
STREAMS: Final = (Stream(TEXT, 6.0), Stream(IMAGE, 4.0), Stream(IMAGES, 1.5))
_TIMEOUT_S: Final = 60.0


def phases(streams: Iterable[Stream] = STREAMS) -> list[tuple[str, list[Stream]]]:
    """Return each class alone, then all together."""
    return [(f"{stream.traffic.label} only", [stream]) for stream in streams] + [("mixture", [*streams])]


def body(arrival: Arrival, media: MediaServer) -> dict[str, object]:
    """Return the body of a request."""
    traffic = arrival.traffic
    words = random.Random(arrival.seed).choices(WORDS, k=traffic.words)  # noqa: S311 - no secret
    return {
        "images": [_image(arrival, number, media) for number in range(traffic.images)],
        "prompt": " ".join(words),
        "max_tokens": traffic.max_tokens,
        "stream": traffic.stream,
    }


def headers(phase: str, label: str, intended_unix_ns: int | None = None) -> dict[str, str]:
    """Return the headers that tell the server's trace what a request is."""
    members = {"stagetrace.phase": phase, "stagetrace.label": label}
    if intended_unix_ns is not None:
        members["stagetrace.intended_unix_ns"] = str(intended_unix_ns)
    return {"baggage": ",".join(f"{name}={quote(value, safe='')}" for name, value in members.items())}


async def run(url: str, seconds: float, seed: int = 0) -> dict[str, Counter[str]]:
    """Send all phases, and count how the requests of each ended."""
    ended = {}
    with MediaServer() as media:
        async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=httpx.Limits()) as client:
            for phase, streams in phases():
                plan = poisson_plan(phase, streams, seconds, seed)
                ended[phase] = await _run_phase(client, media, phase, plan.arrivals)
    return ended


async def _run_phase(
    client: httpx.AsyncClient, media: MediaServer, phase: str, arrivals: Iterable[Arrival]
) -> Counter[str]:
    began_ns, began_unix_ns = time.monotonic_ns(), time.time_ns()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            content = body(arrival, media)
            due = headers(phase, arrival.traffic.label, began_unix_ns + arrival.offset_ns)
            await asyncio.sleep((began_ns + arrival.offset_ns - time.monotonic_ns()) / 1e9)
            tasks.append(group.create_task(_send(client, content, due)))
    return Counter(task.result() for task in tasks)


async def _send(client: httpx.AsyncClient, content: dict[str, object], due: dict[str, str]) -> str:
    """Send a request, read its answer, and say how it ended."""
    try:
        async with client.stream("POST", "/caption", json=content, headers=due) as response:
            lines = [line async for line in response.aiter_lines()]
    except httpx.HTTPError as error:
        return type(error).__name__
    if response.status_code != httpx.codes.OK:
        return str(response.status_code)
    return "ok" if not content["stream"] or "data: [DONE]" in lines else "truncated"


def _image(arrival: Arrival, number: int, media: MediaServer) -> str:
    traffic, seed = arrival.traffic, (arrival.seed << 16) + number
    if traffic.image_delay_ms is None:
        return data_url(make_jpeg(seed, traffic.image_size))
    return media.url(seed, delay_ms=traffic.image_delay_ms, size=traffic.image_size)


def main() -> None:
    """Read the command line, send the load, print what became of it."""
    parser = argparse.ArgumentParser(prog="captioner.load", description="Puts load on the captioner.")
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(options.url, options.seconds, options.seed)), indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
