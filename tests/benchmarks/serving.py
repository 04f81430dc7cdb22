"""CPU time of a request over all processes, with and without the plug-in, interleaved.

Two equal servers stand side by side, one with the plug-in and one without; blocks of
requests go to one and the other in turn, and the difference is taken block by block.

    python tests/benchmarks/serving.py [BLOCKS]
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stagetrace import read_spool
from stagetrace.records import RECORD_BYTES
from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, Arrival, ArrivalPlan, TrafficClass
from stagetrace_analyzer.demo.client import Client
from stagetrace_analyzer.demo.media import MediaServer
from stagetrace_analyzer.demo.model import TINY, make_model
from stagetrace_analyzer.demo.server import VllmServer

REQUESTS = 40
BLOCKS = 12
CALM = Path(__file__).parent / "calm"
_TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")


def cpu_us(pids: Sequence[int]) -> float:
    """User and system time of processes, in microseconds."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_US


async def block(client: Client, traffic: TrafficClass, seed: int) -> None:
    """Send a block of requests, one after the other."""
    arrivals = tuple(Arrival(0, traffic, seed + place) for place in range(REQUESTS))
    done = await client.run_in_turn(ArrivalPlan("bench", arrivals))
    failed = [observation.error for observation in done if observation.error is not None]
    if failed:
        raise SystemExit(f"requests failed: {failed}")


async def measure(servers: Sequence[VllmServer], traffic: TrafficClass, blocks: int) -> list[list[float]]:
    """CPU time of a request in microseconds, by server and block."""
    spent: list[list[float]] = [[] for _ in servers]
    with MediaServer() as media:
        for number in range(-1, blocks):
            order = list(range(len(servers)))
            for place in order if number % 2 else order[::-1]:
                server, pids = servers[place], servers[place].pids()
                async with Client(server.url, media) as client:
                    before = cpu_us(pids)
                    await block(client, traffic, seed=1000 * (number + 2))
                    # Both queues' readers come to rest, so that no polling leaks into the next block.
                    await asyncio.sleep(1.5)
                    if number >= 0:
                        spent[place].append((cpu_us(pids) - before) / REQUESTS)
    return spent


def report(name: str, without: Sequence[float], with_plugin: Sequence[float]) -> None:
    """Print both arms, and the mean difference with its 95 % interval over the blocks."""
    differences = [ours - theirs for theirs, ours in zip(without, with_plugin, strict=True)]
    mean = statistics.mean(differences)
    half = 2.2 * statistics.stdev(differences) / math.sqrt(len(differences))
    print(
        f"{name:<6} without {statistics.mean(without):9.0f} us  with {statistics.mean(with_plugin):9.0f} us  "
        f"difference {mean:6.0f} +- {half:.0f} us a request  (budget for an image: 100 us)"
    )


def main() -> None:
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model", TINY)
        calm = {"PYTHONPATH": str(CALM)}
        off = VllmServer(model, folder / "off.log", environment=calm)
        on = VllmServer(model, folder / "on.log", environment=calm, spool=folder / "spool")
        with off, on:
            off.wait_ready()
            on.wait_ready()
            for traffic in (TEXT, IMAGE):
                begin = time.monotonic()
                report(traffic.label, *asyncio.run(measure((off, on), traffic, blocks)))
                sys.stderr.write(f"{traffic.label}: {time.monotonic() - begin:.0f} s\n")
        data = read_spool(folder / "spool")
    records = data.records / len(data.requests)
    print(f"bytes  {records * RECORD_BYTES:9.0f} a request, its steps included (budget: 2000 + 64 a step)")


if __name__ == "__main__":
    main()
