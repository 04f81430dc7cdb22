"""Reconciliation: do independent counts of the same thing agree?

A partition sums to the whole by construction; these checks do not.  Where a
step's members do not match what the scheduler said of it, the step is
``contradicted`` and its time becomes unattributed; nothing is guessed away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stagetrace.timeline import EngineRequest, RequestTimeline, Step, Steps


@dataclass(frozen=True, slots=True)
class Check:
    """Two counts of one thing.

    Attributes:
        name: What is counted.
        expected: As one side tells.
        found: As the other side tells.
        tolerance: Largest relative difference that is none.
    """

    name: str
    expected: float
    found: float
    tolerance: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the two agree."""
        return abs(self.found - self.expected) <= self.tolerance * max(abs(self.expected), 1.0)


LITTLE_TOLERANCE = 0.02
"""Queue lengths are sampled once a step: what comes and goes within one is not seen."""


def mark_contradicted(steps: Steps, engines: Iterable[EngineRequest]) -> int:
    """Mark the steps whose members are not as many as the scheduler said; return their number."""
    members = _members_by_place(steps, engines)
    wrong = [place for place, step in enumerate(steps.steps) if members[place] != step.requests]
    for place in wrong:
        steps.steps[place].contradicted = True
    return len(wrong)


def _members_by_place(steps: Steps, engines: Iterable[EngineRequest]) -> Counter[int]:
    changes: Counter[int] = Counter()
    for engine in engines:
        for first, last in engine.spans(steps):
            changes[first] += 1
            changes[last + 1] -= 1
    members: Counter[int] = Counter()
    running = 0
    for place in range(len(steps.steps)):
        running += changes[place]
        members[place] = running
    return members


def reconcile(
    received: int,
    requests: Sequence[RequestTimeline],
    engines: Sequence[tuple[Steps, Sequence[EngineRequest]]],
) -> list[Check]:
    """Compare counts that must agree.

    Args:
        received: Requests the API servers received.
        requests: Requests that were joined, ended or not.
        engines: The steps of each engine, and its requests.

    Returns:
        One check for each thing counted; see their names.
    """
    checks = [Check("requests received = ended + open", received, len(requests))]
    seen = [engine for request in requests for engine in request.engine_requests]
    answered = [engine for engine in seen if engine.output_first is not None]
    known = sum(_has_first_step(engine) for engine in answered)
    checks.append(Check("first outputs = first tokens with a step", len(answered), known))
    checks += _encoder_checks(engines)
    for steps, mine in engines:
        checks += _queue_checks(steps, mine)
    return checks


def _has_first_step(engine: EngineRequest) -> bool:
    if engine.steps is None or engine.first_token is None:
        return False
    return engine.steps.place(engine.first_token) is not None


def _encoder_checks(engines: Iterable[tuple[Steps, Sequence[EngineRequest]]]) -> Iterator[Check]:
    for steps, mine in engines:
        scheduled = sum(step.encoder_items for step in steps.steps if not step.unseen)
        encoded = sum(
            len(items)
            for engine in mine
            for number, items in engine.encoded.items()
            if (place := steps.place(number)) is not None and _has_encoded(steps.steps[place])
        )
        in_flight = sum(step.encoder_items for step in steps.steps if step.done is None and not step.unseen)
        yield Check("media items scheduled = encoded by the worker", scheduled - in_flight, encoded)


def _has_encoded(step: Step) -> bool:
    return step.encoder_begin is not None and step.done is not None and not step.unseen


def _queue_checks(steps: Steps, engines: Sequence[EngineRequest]) -> Iterator[Check]:
    """Compare queue lengths: the scheduler's own, and those that our waits and work make (Little)."""
    if not steps.steps:
        return
    running = sum(step.requests for step in steps.steps)
    waiting = sum(step.waiting for step in steps.steps)
    members = sum(_members_by_place(steps, engines).values())
    queued = sum(1 for engine in engines for _ in _queued(engine, steps))
    yield Check("requests in steps, summed over steps", running, members)
    yield Check("requests in the queue, summed over steps", waiting, queued, LITTLE_TOLERANCE)


def _queued(engine: EngineRequest, steps: Steps) -> Iterator[int]:
    """Places of steps whose scheduler saw the request in its queue: not yet seated, or preempted."""
    if engine.added is None:
        return
    last = len(steps.steps) if engine.freed is None else steps.scheduled_from(engine.freed)
    seated = [first for first, _ in engine.spans(steps)]
    lost = sorted(place for number, _ in engine.preempted if (place := steps.place(number)) is not None)
    begin: int | None = steps.scheduled_from(engine.added)
    while begin is not None and begin < last:
        end = min((place for place in seated if place >= begin), default=last)
        yield from range(begin, min(end, last))
        begin = min((place for place in lost if place > end), default=None)
