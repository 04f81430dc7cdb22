"""CPU time that our code takes of a request, as a sampling profiler sees it from outside.

A server with the plug-in answers requests, eight at a time, while py-spy looks at each of its processes
200 times a second.  The share of samples in our code, times the CPU time of the process, is what a
request costs.  Unlike the difference between two servers it is not drowned by the noise of a machine.

    python tests/benchmarks/profiling.py
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import serving

from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, TrafficClass
from stagetrace_analyzer.demo.client import Client
from stagetrace_analyzer.demo.media import MediaServer
from stagetrace_analyzer.demo.model import TINY, make_model
from stagetrace_analyzer.demo.server import VllmServer

BLOCKS = {TEXT: 6, IMAGE: 6, serving.LONG: 3}
SAMPLES_PER_S = 200
FUNCTIONS = 12
OURS = ("/stagetrace/", "/stagetrace_vllm/")
STANDARD = f"/python{sys.version_info.major}.{sys.version_info.minor}/"
ROLES = ("api", "engine", "worker")


class Shares(NamedTuple):
    """Shares of the samples of a process.

    Attributes:
        samples: Their number.
        ours: In which our code ran.
        called: In which the standard library ran, called by our code: partly the host's, through our wrappers.
        functions: Our functions with their shares, the greatest first.
    """

    samples: int
    ours: float
    called: float
    functions: Sequence[tuple[str, float]]


def is_ours(frame: str) -> bool:
    """Whether a frame is in our code."""
    return any(folder in frame for folder in OURS)


def is_standard(frame: str) -> bool:
    """Whether a frame is in the standard library."""
    return STANDARD in frame and "site-packages" not in frame


def shares(folded: str) -> Shares:
    """Count the samples of a profile: a stack in each line, with semicolons, and how often it was seen."""
    whole = ours = called = 0
    functions: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        while frames and is_standard(frames[-1]):
            frames.pop()
        whole += int(count)
        if frames and is_ours(frames[-1]):
            inner = is_ours(stack.rpartition(";")[2])
            ours += inner * int(count)
            called += (not inner) * int(count)
            functions[frames[-1].split(" ")[0]] += int(count)
    greatest = [(name, count / whole) for name, count in functions.most_common(FUNCTIONS)]
    return Shares(whole, ours / whole, called / whole, greatest)


@contextlib.contextmanager
def profiled(pids: Mapping[str, int], folder: Path) -> Iterator[dict[str, Shares]]:
    """Profile processes while the block runs; gives the shares of each role at its end."""
    found: dict[str, Shares] = {}
    profilers = {}
    for role, pid in pids.items():
        command = [
            "py-spy",
            "record",
            "--nonblocking",
            "--full-filenames",
            "--format=raw",
            f"--rate={SAMPLES_PER_S}",
        ]
        command += [f"--pid={pid}", f"--output={folder / role}"]
        profilers[role] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    yield found
    for role, profiler in profilers.items():
        profiler.send_signal(signal.SIGINT)
        profiler.wait()
        found[role] = shares((folder / role).read_text(encoding="utf-8"))


def processes(server: VllmServer) -> dict[str, int]:
    """The process of each role."""
    return {role: pid for pid in server.pids() for role, spent in serving.cpu_us([pid]).items() if spent}


async def measure(server: VllmServer, traffic: TrafficClass, folder: Path) -> Iterator[str]:
    """Put blocks on a server; returns what our code took of a request, in lines."""
    pids = {role: pid for role, pid in processes(server).items() if role in ROLES}
    with MediaServer() as media:
        async with Client(server.url, media) as client:
            await serving.block(client, traffic, seed=0)
            with profiled(pids, folder) as found:
                before = serving.cpu_us(server.pids())
                for number in range(BLOCKS[traffic]):
                    await serving.block(client, traffic, seed=1000 * (number + 1))
                after = serving.cpu_us(server.pids())
    requests = BLOCKS[traffic] * serving.REQUESTS[traffic]
    return lines(traffic.label, {role: (after[role] - before[role]) / requests for role in pids}, found)


def lines(traffic: str, spent: Mapping[str, float], found: Mapping[str, Shares]) -> Iterator[str]:
    """Describe what each process spent on a request, and what of it was ours."""
    for role, us in spent.items():
        share = found[role]
        yield (
            f"{traffic:<6} {role:<7}{us:>8.0f} us a request, ours {share.ours * us:>5.0f}"
            f" ({share.ours:.2%} of {share.samples} samples), called by ours {share.called * us:>5.0f}"
        )
        yield "       " + ", ".join(f"{name} {part * us:.0f}" for name, part in share.functions)
    ours = sum(found[role].ours * us for role, us in spent.items())
    called = sum(found[role].called * us for role, us in spent.items())
    yield f"{traffic:<6} all    {sum(spent.values()):>8.0f} us a request, ours {ours:>5.0f} to {ours + called:.0f}"


def main() -> None:
    """Run the benchmark and print its lines."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model", TINY)
        calm = {"PYTHONPATH": str(serving.HERE / "calm")}
        with VllmServer(model, folder / "log", environment=calm, spool=folder / "spool") as server:
            server.wait_ready()
            for traffic in BLOCKS:
                for line in asyncio.run(measure(server, traffic, folder)):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
