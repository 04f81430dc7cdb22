"""The demonstration's load: each class alone, then both together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, Stream, poisson_plan, sequential_plan
from stagetrace_analyzer.demo.client import Client
from stagetrace_analyzer.demo.media import MediaServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from stagetrace_analyzer.demo.observations import Observation

TEXT_PER_S: Final = 4.0
IMAGES_PER_S: Final = 2.0
REQUESTS: Final = 260
"""Requests of each class in each phase: what a report needs to name a wait, and some to spare."""

WARM_UP_S: Final = 6.0
WARM_UP_ROUNDS: Final = 3
IMAGE_SHARE: Final = 0.6
"""Largest share of the time that the server may be busy with images, see `affordable_images_per_s`."""

PAUSE_S: Final = 1.0
"""Idle seconds between the last answer of a phase and the next phase."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of steady load.

    Attributes:
        name: Sent along with every request as ``stagetrace.phase``.
        streams: What arrives, and how often.
        duration_s: Seconds in which requests arrive; the answers may take longer.
        rounds_in_turn: Requests of each class sent one after the other before that.
        seed: Seed of arrivals and content.
    """

    name: str
    streams: tuple[Stream, ...]
    duration_s: float
    rounds_in_turn: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a phase is: requests that ended, and how many of them failed."""

    phase: str
    ended: int
    failed: int
    total: int


def demo_phases(
    text_per_s: float = TEXT_PER_S,
    images_per_s: float = IMAGES_PER_S,
    requests: int = REQUESTS,
    seed: int = 0,
) -> tuple[Phase, ...]:
    """Return warm-up, text only, image only and mixture, in this order.

    A first request of each class is slow whatever runs beside it; the warm-up takes those.
    The other phases last until about ``requests`` requests of each class have come.
    """
    text, images = Stream(TEXT, text_per_s), Stream(IMAGE, images_per_s)
    text_s, images_s = requests / text_per_s, requests / images_per_s
    return (
        Phase("warm-up", (text, images), WARM_UP_S, WARM_UP_ROUNDS, seed),
        Phase("text only", (text,), text_s, seed=seed),
        Phase("image only", (images,), images_s, seed=seed),
        Phase("mixture", (text, images), max(text_s, images_s), seed=seed),
    )


def affordable_images_per_s(warm_up: Iterable[Observation], wanted_per_s: float = IMAGES_PER_S) -> float:
    """Return the rate wanted, or a lower one where the server is too slow for it.

    Interference shows in a server that is busy more than half of the time; in one that is
    overloaded nothing does.  The fastest image of the warm-up, which met nobody, tells
    how long an image occupies the server.

    Args:
        warm_up: Observations of the warm-up.
        wanted_per_s: Images a second to put on a server that is fast enough.
    """
    alone_ns = [seen.ttft_ns for seen in warm_up if seen.label == IMAGE.label and seen.ttft_ns is not None]
    if not alone_ns:
        return wanted_per_s
    return min(wanted_per_s, IMAGE_SHARE * 1e9 / min(alone_ns))


def run_phases(
    server_url: str,
    phases: Sequence[Phase],
    on_progress: Callable[[Progress], None] | None = None,
) -> list[Observation]:
    """Put the phases on the server, one after the other; each ends with its last answer.

    Args:
        server_url: Base address of a vLLM server that is ready.
        phases: What to send.
        on_progress: Called when a phase starts and when a request of it ends.

    Returns:
        An observation for every request, failed ones included.

    Raises:
        ServerError: The server does not tell its model and tokens.
    """
    return asyncio.run(_run_phases(server_url, phases, on_progress))


async def _run_phases(
    server_url: str, phases: Sequence[Phase], on_progress: Callable[[Progress], None] | None
) -> list[Observation]:
    observations: list[Observation] = []
    with MediaServer() as media:
        async with Client(server_url, media) as client:
            for position, phase in enumerate(phases):
                if position:
                    await asyncio.sleep(PAUSE_S)
                observations += await _run_phase(client, phase, on_progress)
    return observations


async def _run_phase(
    client: Client, phase: Phase, on_progress: Callable[[Progress], None] | None
) -> list[Observation]:
    classes = [stream.traffic for stream in phase.streams]
    in_turn = sequential_plan(phase.name, classes, phase.rounds_in_turn, phase.seed)
    open_loop = poisson_plan(phase.name, phase.streams, phase.duration_s, phase.seed)
    total = len(in_turn.arrivals) + len(open_loop.arrivals)
    ended: list[Observation] = []

    def note(*new: Observation) -> None:
        ended.extend(new)
        if on_progress is not None:
            failed = sum(observation.error is not None for observation in ended)
            on_progress(Progress(phase.name, len(ended), failed, total))

    note()
    return [*await client.run_in_turn(in_turn, note), *await client.run(open_loop, note)]
