"""CPU time of a request: without tracing, with the plug-in, with vLLM's own tracing; bytes of a request.

Three equal servers stand side by side: one without tracing, one with the plug-in, one
with vLLM's own spans, which go to a receiver in a process of its own.  Blocks of requests
go to them in turn, eight requests at a time, and differences are taken block by block,
for each process of the server: the worker's CPU time is almost all model, and its noise
would hide everything else.

    python tests/benchmarks/serving.py
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import statistics
import subprocess
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

AT_A_TIME = 8
BLOCKS = 10
T_95 = 2.26
"""Student's t at 95 % for ten blocks."""

LONG = dataclasses.replace(TEXT, label="long", max_tokens=1000)
REQUESTS = {TEXT: 160, IMAGE: 80, LONG: 8}
"""Requests of a block, by traffic."""

HERE = Path(__file__).parent
ROLES = {"EngineCore": "engine", "Worker": "worker"}

Spent = Mapping[str, float]
"""CPU time of a request in microseconds, by process role."""


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Run a receiver of spans; yields its address, and says at the end how many have come."""
    command = [sys.executable, str(HERE / "receiver.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            print(f"vLLM's own tracing sent {process.stdout.read().strip()} spans")


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
    """Send a block of requests, so many at a time."""
    for place in range(0, REQUESTS[traffic], AT_A_TIME):
        arrivals = tuple(Arrival(0, traffic, seed + place + number) for number in range(AT_A_TIME))
        done = await client.run(ArrivalPlan("bench", arrivals))
        failed = [observation.error for observation in done if observation.error is not None]
        if failed:
            raise SystemExit(f"requests failed: {failed}")


async def measure(servers: Sequence[VllmServer], traffic: TrafficClass) -> list[list[Spent]]:
    """Put blocks on the servers in turn; returns what a request took, by server and block."""
    spent: list[list[Spent]] = [[] for _ in servers]
    with MediaServer() as media:
        for number in range(-1, BLOCKS):
            for turn in range(len(servers)):
                place = (number + turn) % len(servers)
                server, pids = servers[place], servers[place].pids()
                async with Client(server.url, media) as client:
                    before = cpu_us(pids)
                    await block(client, traffic, seed=1000 * (number + 2))
                    # Readers of queues come to rest, and vLLM's spans leave, before the next block.
                    await asyncio.sleep(1.2)
                    after = cpu_us(pids)
                if number >= 0:
                    spent[place].append(
                        {role: (after[role] - before[role]) / REQUESTS[traffic] for role in after}
                    )
    return spent


def lines(traffic: str, arms: Sequence[str], spent: Sequence[Sequence[Spent]]) -> Iterator[str]:
    """Describe every arm by process, with its mean difference from the first one and its 95 % interval."""
    for roles in (["api"], ["engine"], ["worker"], ["api", "engine"], ["api", "engine", "worker"]):
        sums = [[sum(each[role] for role in roles) for each in arm] for arm in spent]
        yield f"{traffic:<6} {'+'.join(roles):<18} {arms[0]}: {statistics.mean(sums[0]):.0f} us a request"
        for arm, ours in zip(arms[1:], sums[1:], strict=True):
            differences = [b - a for a, b in zip(sums[0], ours, strict=True)]
            half = T_95 * statistics.stdev(differences) / math.sqrt(len(differences))
            yield f"{'':<25} {arm}: {statistics.mean(differences):+7.0f} +- {half:.0f} us"


def recorded_bytes(spool: Path) -> int:
    """Bytes of all records in a spool."""
    return sum(len(read_segment(path).body) for path in segment_paths(spool))


def main() -> None:
    """Run the benchmark and print its table."""
    with tempfile.TemporaryDirectory() as scratch, receiver() as address:
        folder = Path(scratch)
        model = make_model(folder / "model", TINY)
        calm = {"PYTHONPATH": str(HERE / "calm")}
        servers = {
            "without": VllmServer(model, folder / "without.log", environment=calm),
            "plug-in": VllmServer(model, folder / "plug-in.log", environment=calm, spool=folder / "spool"),
            "vLLM's tracing": VllmServer(
                model,
                folder / "tracing.log",
                environment=calm | {"OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"},
                arguments=(f"--otlp-traces-endpoint={address}",),
            ),
        }
        with contextlib.ExitStack() as stack:
            for server in servers.values():
                stack.enter_context(server)
                server.wait_ready()
            recorded = 0
            for traffic, requests in REQUESTS.items():
                begin = time.monotonic()
                spent = asyncio.run(measure(list(servers.values()), traffic))
                print(*lines(traffic.label, list(servers), spent), sep="\n")
                total = recorded_bytes(folder / "spool")
                of_one = (total - recorded) / (requests * (BLOCKS + 1))
                steps = traffic.max_tokens * 2 * RECORD_BYTES
                print(
                    f"{traffic.label:<6} {of_one:9.0f} bytes a request; alone, {steps} more for {traffic.max_tokens} steps"
                )
                recorded = total
                sys.stderr.write(f"{traffic.label}: {time.monotonic() - begin:.0f} s\n")


if __name__ == "__main__":
    main()
