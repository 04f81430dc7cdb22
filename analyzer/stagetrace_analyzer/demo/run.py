"""Recording the demonstration: model, server, load."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from stagetrace_analyzer.demo import load
from stagetrace_analyzer.demo.load import affordable_images_per_s, demo_phases, run_phases
from stagetrace_analyzer.demo.model import DEMO, make_model
from stagetrace_analyzer.demo.observations import write_observations
from stagetrace_analyzer.demo.server import VllmServer


def record_demo(output: Path, *, text_per_s: float, images_per_s: float, requests: int, seed: int) -> None:
    """Record a run into ``output``: ``spool/``, ``observations.jsonl``, ``server.log``.

    Args:
        output: An existing folder.
        text_per_s: Text requests a second.
        images_per_s: Image requests a second.
        requests: Requests of each class in each of the three phases, about.
        seed: Seed of arrivals and contents.

    Raises:
        MissingExtraError: A package for making the model is not installed.
        ServerError: The server did not start, or died.
    """
    # Written first: it tells a folder of a demo from any other when it is to be replaced.
    write_observations(output / "observations.jsonl", [])
    with _doing("making the model"):
        model = make_model(_cache() / "demo-model", DEMO)
    with VllmServer(model, output / "server.log", spool=output / "spool") as server:
        with _doing("starting vLLM"):
            server.wait_ready()
        with _bars() as show:
            observations = run_phases(server.url, demo_phases(seed=seed)[:1], show)
            affordable = affordable_images_per_s(observations, images_per_s)
            if affordable < images_per_s:
                sys.stderr.write(
                    f"this machine is slow: {affordable:.2f} images a second, not {images_per_s:g}\n"
                )
            observations += run_phases(
                server.url, demo_phases(text_per_s, affordable, requests, seed)[1:], show
            )
        server.check_alive()
    write_observations(output / "observations.jsonl", observations)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagetrace"


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Say on stderr what takes time, and how long it took."""
    begin = time.monotonic()
    with Console(stderr=True).status(what):
        yield
    sys.stderr.write(f"{what}: {time.monotonic() - begin:.0f} s\n")


@contextmanager
def _bars() -> Iterator[Callable[[load.Progress], None]]:
    """Show a bar a phase on stderr; where that is no terminal, a line a phase."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def show(state: load.Progress) -> None:
            if state.phase not in tasks:
                tasks[state.phase] = progress.add_task(state.phase, total=state.total)
                if not console.is_terminal:
                    sys.stderr.write(f"{state.phase}: {state.total} requests\n")
            failed = f" ({state.failed} failed)" if state.failed else ""
            description = state.phase + failed
            progress.update(tasks[state.phase], completed=state.ended, description=description)

        yield show
