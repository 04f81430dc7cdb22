"""When which request arrives: seeded open-loop plans."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from stagetrace.errors import UsageError
from stagetrace_analyzer.demo.media import DEFAULT_DELAY_MS, DEFAULT_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ARRIVALS: Final = 100_000
"""A plan with more expected arrivals is refused."""

_SEED_RANGE: Final = 2**32


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """What the requests of a class look like.

    Attributes:
        label: Name of the class, sent along as ``stagetrace.label``.
        words: Words of the prompt's text.
        images: Number of images in the prompt.
        image_size: Their width and height in pixels.
        image_delay_ms: Milliseconds until an image that the server fetches arrives;
            None puts the images into the request as ``data:`` addresses.
        max_tokens: Tokens of the answer; every answer has exactly as many.
        stream: Whether the answer comes token by token.
    """

    label: str
    words: int = 20
    images: int = 0
    image_size: tuple[int, int] = DEFAULT_SIZE
    image_delay_ms: int | None = DEFAULT_DELAY_MS
    max_tokens: int = 16
    stream: bool = True


TEXT: Final = TrafficClass("text")
IMAGE: Final = TrafficClass("image", images=1)


@dataclass(frozen=True, slots=True)
class Stream:
    """Independent requests of one class, ``per_s`` a second on average."""

    traffic: TrafficClass
    per_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come.

    Attributes:
        offset_ns: When it is to be sent, from the start of its plan.
        traffic: What it looks like.
        seed: Its content; distinct, so that no cache answers for it.
    """

    offset_ns: int
    traffic: TrafficClass
    seed: int


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """The requests of a phase, in the order of their arrival."""

    phase: str
    arrivals: tuple[Arrival, ...]


def poisson_plan(phase: str, streams: Sequence[Stream], duration_s: float, seed: int) -> ArrivalPlan:
    """Return Poisson arrivals of every stream over ``duration_s`` seconds.

    A class arrives at the same instants whatever runs beside it, so that a class alone
    and in a mixture can be compared; its content depends on the phase as well.

    Raises:
        UsageError: The plan would hold more than `MAX_ARRIVALS` requests.
    """
    expected = sum(stream.per_s for stream in streams) * duration_s
    if expected > MAX_ARRIVALS:
        raise UsageError(f"the plan holds about {expected:.0f} requests; at most {MAX_ARRIVALS} are allowed")
    arrivals = [
        arrival for stream in streams for arrival in _stream_arrivals(phase, stream, duration_s, seed)
    ]
    return ArrivalPlan(phase, tuple(sorted(arrivals, key=lambda arrival: arrival.offset_ns)))


def sequential_plan(phase: str, classes: Sequence[TrafficClass], rounds: int, seed: int) -> ArrivalPlan:
    """Return ``rounds`` requests of each class in turn, all due at once.

    Meant to be sent one after the other; see `Client.run_in_turn`.
    """
    seeds = _rng(seed, phase, "in turn").integers(_SEED_RANGE, size=(rounds, len(classes)))
    return ArrivalPlan(
        phase,
        tuple(
            Arrival(0, traffic, int(content))
            for row in seeds
            for traffic, content in zip(classes, row, strict=True)
        ),
    )


def _stream_arrivals(phase: str, stream: Stream, duration_s: float, seed: int) -> list[Arrival]:
    label = stream.traffic.label
    rng = _rng(seed, label)
    count = rng.poisson(stream.per_s * duration_s)
    # Given their number, the instants of a Poisson process are uniform.
    offsets_ns = np.sort(rng.uniform(0, duration_s * 1e9, count)).astype(np.int64)
    seeds = _rng(seed, phase, label).integers(_SEED_RANGE, size=count)
    return [
        Arrival(int(offset_ns), stream.traffic, int(content))
        for offset_ns, content in zip(offsets_ns, seeds, strict=True)
    ]


def _rng(seed: int, *names: str) -> np.random.Generator:
    return np.random.default_rng([seed, *(zlib.crc32(name.encode()) for name in names)])
