"""Testing kit for those who instrument a server or read its records.

``check_partition`` states what must hold for every request, whatever was
recorded of it.  The builders make timelines by hand, in milliseconds, so that
an expected partition can be read off the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from stagetrace.api import start
from stagetrace.partition import Interval, Partition
from stagetrace.recording import close_recorder
from stagetrace.records import JobKind
from stagetrace.stages import Outcome, Reason, Stage
from stagetrace.timeline import EngineRequest, Fetch, Item, Job, Part, RequestTimeline, Step, Steps

MS: Final = 1_000_000
"""Nanoseconds in a millisecond."""


@contextmanager
def recorded(spool: str | os.PathLike[str]) -> Iterator[None]:
    """Record this process into a folder within the block; it must not record elsewhere."""
    start(spool)
    try:
        yield
    finally:
        close_recorder()


def check_partition(request: RequestTimeline, parts: Partition) -> None:
    """Check that both horizons are covered exactly once.

    Raises:
        AssertionError: A gap, an overlap, an empty interval, or a wrong begin or end.
    """
    end = request.last_byte if request.last_byte is not None else request.ended
    _check_cover(parts.ttft, request.received, request.first_useful)
    _check_cover(parts.completion, request.received, end)


def _check_cover(intervals: Sequence[Interval], begin: int, end: int | None) -> None:
    if end is None or end <= begin:
        _require(not intervals, "a horizon without an end has no intervals")
        return
    _require(bool(intervals), "a horizon has intervals")
    _require(intervals[0].begin == begin, "the first interval begins with the horizon")
    _require(intervals[-1].end == end, "the last interval ends with the horizon")
    _require(all(i.duration > 0 for i in intervals), "no interval is empty or negative")
    for before, after in pairwise(intervals):
        _require(before.end == after.begin, f"{after.stage} begins where {before.stage} ends")
    _require(sum(i.duration for i in intervals) == end - begin, "the parts sum to the whole")


def _require(condition: bool, fact: str) -> None:
    if not condition:
        raise AssertionError(f"not so: {fact}")


def summarize(intervals: Iterable[Interval]) -> list[tuple[str, float]]:
    """Return ``(stage, milliseconds)`` of each interval, a wait with its reason as ``stage(reason)``."""
    return [(f"{i.stage}({i.reason})" if i.reason else str(i.stage), i.duration / MS) for i in intervals]


@dataclass
class EngineBuilder:
    """An engine of known steps; all times in milliseconds.

    Args:
        name: Name of its process.
    """

    name: str = "engine"
    _steps: list[Step] = field(default_factory=list)

    def step(
        self,
        scheduled: float,
        done: float | None,
        *,
        tokens: int = 1,
        encoder: tuple[float, float] | None = None,
        device: float | None = None,
        reason: Reason | None = None,
        head: str | None = None,
    ) -> int:
        """Add the next step and return its number; ``device`` is what a device took for the encoder."""
        number = len(self._steps) + 1
        begin, end = (None, None) if encoder is None else encoder
        step = Step(number, scheduled=_ns(scheduled), tokens=tokens, reason=reason, head=head)
        step.done = None if done is None else _ns(done)
        step.encoder_begin = None if begin is None else _ns(begin)
        step.encoder_end = None if end is None else _ns(end)
        step.encoder_device_ns = None if device is None else _ns(device)
        self._steps.append(step)
        return number

    def steps(self) -> Steps:
        """Return the steps."""
        return Steps(self.name, self._steps)


@dataclass
class RequestBuilder:
    """A request of known times; all times in milliseconds."""

    received: float = 0.0
    request: RequestTimeline = field(init=False)

    def __post_init__(self) -> None:
        self.request = RequestTimeline("request-1", "api", received=_ns(self.received))

    def item(
        self,
        begin: float,
        ready: float | None,
        *,
        fetch: tuple[float, float] | None = None,
        inline: bool = False,
    ) -> int:
        """Add a media item and return its index."""
        index = len(self.request.items)
        item = Item(index, begin=_ns(begin), ready=None if ready is None else _ns(ready), inline=inline)
        if fetch is not None:
            item.fetches.append(Fetch(_ns(fetch[0]), _ns(fetch[1]), attempts=1))
        self.request.items[index] = item
        return index

    def job(
        self,
        kind: JobKind,
        submitted: float,
        started: float | None,
        ended: float | None,
        *,
        item: int | None = None,
    ) -> None:
        """Add a job in a thread pool."""
        self.request.jobs.append(
            Job(
                kind,
                item,
                submitted=_ns(submitted),
                started=None if started is None else _ns(started),
                ended=None if ended is None else _ns(ended),
            )
        )

    def part(self, stage: Stage, begin: float, end: float | None, *, item: int | None = None) -> None:
        """Add a part that the server told of; an item is ready with the last of its parts."""
        part = Part(stage, _ns(begin), None if end is None else _ns(end), item)
        self.request.parts.append(part)
        if item is not None:
            known = self.request.items.setdefault(item, Item(item, part.begin))
            known.ready = part.end

    def engine(
        self,
        steps: Steps | None,
        *,
        joined: float,
        held: float | None = None,
        added: float | None = None,
        members: Iterable[tuple[int, int]] = (),
        first_token: int | None = None,
        freed: float | None = None,
        output_first: float | None = None,
        output_finished: float | None = None,
        index: int = 0,
    ) -> EngineRequest:
        """Add the engine's part, or one of several, and return it."""
        name = f"engine-request-{len(self.request.engine_requests) + 1}"
        engine = EngineRequest(name, index=index, joined=_ns(joined), steps=steps)
        engine.held = None if held is None else _ns(held)
        engine.added = None if added is None else _ns(added)
        engine.members = list(members)
        engine.first_token = first_token
        engine.freed = None if freed is None else _ns(freed)
        engine.output_first = None if output_first is None else _ns(output_first)
        engine.output_finished = None if output_finished is None else _ns(output_finished)
        self.request.engine_requests.append(engine)
        return engine

    def answered(
        self, last_byte: float, *, first_useful: float | None = None, tokens_before: int | None = 0
    ) -> RequestTimeline:
        """End the request with its last byte and return its timeline."""
        request = self.request
        request.outcome = Outcome.OK
        request.last_byte = request.ended = _ns(last_byte)
        request.first_useful = None if first_useful is None else _ns(first_useful)
        request.tokens_before = tokens_before
        return request

    def broken_off(self, ended: float) -> RequestTimeline:
        """End the request before its last byte and return its timeline."""
        self.request.outcome = Outcome.CANCELLED
        self.request.ended = _ns(ended)
        return self.request


def _ns(milliseconds: float) -> int:
    return round(milliseconds * MS)
