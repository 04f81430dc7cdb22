"""CPU time of a request, with and without the plug-in, interleaved; bytes of a request.

Two equal servers stand side by side, one with the plug-in and one without.  Blocks of
requests go to one and the other in turn, and differences are taken block by block, for
each process of the server: the worker's CPU time is almost all model, and its noise
would hide everything else.

    python tests/benchmarks/serving.py
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stagetrace.records import RECORD_BYTES
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, Arrival, ArrivalPlan, TrafficClass
from stagetrace_analyzer.demo.client import Client
from stagetrace_analyzer.demo.media import MediaServer
from stagetrace_analyzer.demo.model import TINY, make_model
from stagetrace_analyzer.demo.server import VllmServer

REQUESTS = 40
BLOCKS = 8
CALM = Path(__file__).parent / "calm"
ROLES = {"EngineCore": "engine", "Worker": "worker"}
T_95 = 2.36
"""Student's t at 95 % for eight blocks."""

Spent = Mapping[str, float]
"""CPU time of a request in microseconds, by process role."""


def cpu_us(pids: Sequence[int]) -> dict[str, float]:
    """CPU time that processes have used, in microseconds, by role; helpers count as ``other``."""
    spent: dict[str, float] = defaultdict(float)
    for pid in pids:
        role = "api"
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        for part, known in ROLES.items():
            if part in name or part.encode() in command:
                role = known
        if b"resource_tracker" in command:
            role = "other"
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            spent[role] += int(thread.read_text(encoding="utf-8").split()[0]) / 1000
    return spent


async def block(client: Client, traffic: TrafficClass, seed: int) -> None:
    """Send a block of requests, one after the other."""
    arrivals = tuple(Arrival(0, traffic, seed + place) for place in range(REQUESTS))
    done = await client.run_in_turn(ArrivalPlan("bench", arrivals))
    failed = [observation.error for observation in done if observation.error is not None]
    if failed:
        raise SystemExit(f"requests failed: {failed}")


async def measure(servers: Sequence[VllmServer], traffic: TrafficClass) -> list[list[Spent]]:
    """Put blocks on the servers in turn; returns what a request took, by server and block."""
    spent: list[list[Spent]] = [[] for _ in servers]
    with MediaServer() as media:
        for number in range(-1, BLOCKS):
            places = range(len(servers)) if number % 2 else reversed(range(len(servers)))
            for place in places:
                server, pids = servers[place], servers[place].pids()
                async with Client(server.url, media) as client:
                    before = cpu_us(pids)
                    await block(client, traffic, seed=1000 * (number + 2))
                    # The queues' readers come to rest, so that no polling leaks into the next block.
                    await asyncio.sleep(1.2)
                    after = cpu_us(pids)
                if number >= 0:
                    spent[place].append({role: (after[role] - before[role]) / REQUESTS for role in after})
    return spent


def lines(traffic: str, without: Sequence[Spent], with_plugin: Sequence[Spent]) -> Iterator[str]:
    """Describe both arms by process, with the mean difference and its 95 % interval over the blocks."""
    for roles in (["api"], ["engine"], ["worker"], ["api", "engine"], ["api", "engine", "worker"]):
        theirs = [sum(spent[role] for role in roles) for spent in without]
        ours = [sum(spent[role] for role in roles) for spent in with_plugin]
        differences = [b - a for a, b in zip(theirs, ours, strict=True)]
        half = T_95 * statistics.stdev(differences) / math.sqrt(len(differences))
        yield (
            f"{traffic:<6} {'+'.join(roles):<18} {statistics.mean(theirs):9.0f} us without"
            f"{statistics.mean(ours):9.0f} us with, difference {statistics.mean(differences):6.0f} +- {half:.0f} us"
        )


def recorded_bytes(spool: Path) -> int:
    """Bytes of all records in a spool."""
    return sum(len(read_segment(path).body) for path in segment_paths(spool))


def main() -> None:
    """Run the benchmark and print its table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model", TINY)
        calm = {"PYTHONPATH": str(CALM)}
        off = VllmServer(model, folder / "off.log", environment=calm)
        on = VllmServer(model, folder / "on.log", environment=calm, spool=folder / "spool")
        with off, on:
            off.wait_ready()
            on.wait_ready()
            recorded = 0
            for traffic in (TEXT, IMAGE):
                begin = time.monotonic()
                print(*lines(traffic.label, *asyncio.run(measure((off, on), traffic))), sep="\n")
                total = recorded_bytes(folder / "spool")
                of_one = (total - recorded) / (REQUESTS * (BLOCKS + 1))
                steps = traffic.max_tokens * 2 * RECORD_BYTES
                print(
                    f"{traffic.label:<6} {of_one:9.0f} bytes a request, about {steps} of them its {traffic.max_tokens} steps'"
                )
                recorded = total
                sys.stderr.write(f"{traffic.label}: {time.monotonic() - begin:.0f} s\n")


if __name__ == "__main__":
    main()
