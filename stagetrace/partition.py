"""Where a request's time went: its partition into stages, for both horizons.

The front-end part is a chain of jobs: whatever lies between the end of one job
and the start of the next is the wait of the next.  The engine part is cut by
steps: in a step is work, not in it is a wait with the reason the scheduler
had.  Nothing is guessed: where records are missing or contradict each other,
the time is ``unattributed``.

A server without hooks tells its stages and waits itself, through the recording
API: its parts are cut to one line, and what it did not tell is unattributed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from stagetrace.critical_path import critical_path
from stagetrace.records import JobKind
from stagetrace.stages import Horizon, Kind, Outcome, Reason, Stage
from stagetrace.timeline import EngineRequest, Item, Job, Part, RequestTimeline, Step, Steps


class Interval(NamedTuple):
    """A stretch of time in one stage; nanoseconds of the monotonic clock.

    Attributes:
        stage: Where the request was.
        begin: Begin.
        end: End, always after the begin.
        reason: Why it waited in the engine, or None.
        holder: The engine's id of the request at the head of the queue, when that is another one.
        item: The media item, in the stages of one.
        first_step: First engine step it covers, or None.
        last_step: Last engine step it covers, or None.
        recompute: Work done again after a preemption.
    """

    stage: Stage
    begin: int
    end: int
    reason: Reason | None = None
    holder: str | None = None
    item: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    recompute: bool = False

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.begin


_OWN_WAITS: Final = {
    Reason.ENCODER_BUDGET: Stage.ENCODE_WAIT,
    Reason.ENCODER_CACHE: Stage.ENCODE_WAIT,
    Reason.REMOTE_EMBEDDING: Stage.EMBEDDING_TRANSFER_WAIT,
    Reason.REMOTE_KV: Stage.KV_TRANSFER_WAIT,
}
"""Waits named after the reason that keeps the request itself out of steps."""


_LOADING: Final = frozenset({Stage.RETRIEVAL, Stage.MEDIA_DECODE_WAIT, Stage.MEDIA_DECODE})
_DECODING: Final = frozenset({Stage.DECODE_WAIT, Stage.DECODE})
_SILENT: Final = frozenset({Stage.RECEIVE, Stage.RESPOND, Stage.UNATTRIBUTED})
"""Where hooks say nothing of what the server did, so that it may tell itself."""

IDLE_NS: Final = 5_000_000
"""A gap between two steps up to here is scheduling and belongs to the later one; a longer one is a wait."""

_NEVER: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages of a request, in order of time, without gap or overlap.

    Attributes:
        ttft: From receipt to the first useful byte; empty when none was sent.
        completion: From receipt to the last byte, or to the end of a request that broke off.
        critical_item: The media item that was ready last, or None.
    """

    ttft: tuple[Interval, ...]
    completion: tuple[Interval, ...]
    critical_item: int | None = None

    def of(self, horizon: Horizon) -> tuple[Interval, ...]:
        """Return the intervals of one horizon."""
        return self.ttft if horizon is Horizon.TTFT else self.completion

    def waiting(self, horizon: Horizon) -> int:
        """Nanoseconds spent in waits."""
        return sum(i.duration for i in self.of(horizon) if i.stage.kind is Kind.WAIT)


def partition(request: RequestTimeline) -> Partition:
    """Partition a request's time into stages.

    Args:
        request: The joined records of one request; their order does not matter.

    Returns:
        Intervals of both horizons.  Each horizon is covered exactly once: the
        first interval begins at ``request.received``, each one begins where
        the one before it ends, and the last one ends with the horizon.
    """
    end = request.last_byte if request.last_byte is not None else request.ended
    if request.parts and not request.is_hooked:
        return _as_told(request, end)
    front = _FrontEnd.of(request, request.received if end is None else end)
    completion: tuple[Interval, ...] = ()
    if end is not None:
        completion = _cover(request.received, end, _until_end(request, front, end))
    ttft: tuple[Interval, ...] = ()
    if request.first_useful is not None:
        path = _until_first_useful(request, front, request.first_useful)
        ttft = _cover(request.received, request.first_useful, path)
    if request.parts:
        ttft, completion = _with_parts(request, ttft), _with_parts(request, completion)
    return Partition(ttft=ttft, completion=completion, critical_item=front.critical_item)


def _cover(begin: int, end: int, parts: Iterable[Interval]) -> tuple[Interval, ...]:
    """Lay parts over ``[begin, end)``: gaps become unattributed, overlaps go to the earlier part."""
    covered: list[Interval] = []
    cursor = begin
    for part in parts:
        first, last = max(part.begin, cursor), min(part.end, end)
        if last <= first:
            continue
        if first > cursor:
            covered.append(Interval(Stage.UNATTRIBUTED, cursor, first))
        whole = first == part.begin and last == part.end
        covered.append(part if whole else part._replace(begin=first, end=last))
        cursor = last
    if cursor < end:
        covered.append(Interval(Stage.UNATTRIBUTED, cursor, end))
    return tuple(covered)


def _until_end(request: RequestTimeline, front: _FrontEnd, end: int) -> Iterator[Interval]:
    yield from front.intervals
    engine = _last_to_finish(request)
    if engine is None:
        yield from _without_engine(request, front, end)
        return
    yield from _until_held(request, front, engine)
    died = _has_died(engine, request)
    if request.last_byte is not None and not died:
        yield from _until_delivered(engine, _end_of_output(engine, end), end)
    elif engine.held is None:
        yield Interval(Stage.HANDOFF, front.handed_off, end)
    else:
        yield from _walk(engine, end, died=died)


def _has_died(engine: EngineRequest, request: RequestTimeline) -> bool:
    """Whether an engine died with a request: the client was told of an error, the engine never ended it."""
    return request.outcome is Outcome.ERROR and engine.output_finished is None and engine.freed is None


def _until_first_useful(request: RequestTimeline, front: _FrontEnd, end: int) -> Iterator[Interval]:
    yield from front.intervals
    engine = _first_to_deliver(request)
    if engine is None:
        yield from _without_engine(request, front, end)
        return
    yield from _until_held(request, front, engine)
    yield from _until_delivered(engine, _end_of_first_useful(engine, request.tokens_before, end), end)


def _until_held(request: RequestTimeline, front: _FrontEnd, engine: EngineRequest) -> Iterator[Interval]:
    """Go from the last job until the engine holds the request, through the rounds that had to end before."""
    begin = front.handed_off
    for before, joined in _rounds_before(request.engine_requests, engine):
        if before.held is None:
            return
        yield Interval(Stage.HANDOFF, begin, before.held)
        begin = _end_of_output(before, joined)
        yield from _walk(before, begin)
        jobs = [job for job in _preprocessing_jobs(request, begin, joined) if job.started is not None]
        last = max((_ended(job, joined) for job in jobs), default=begin)
        yield from _fill(_without(jobs, (), joined), begin, last, Stage.PREPROCESS_WAIT)
        begin = last
    if engine.held is not None:
        yield Interval(Stage.HANDOFF, begin, engine.held)


def _until_delivered(engine: EngineRequest, stop: int, end: int) -> Iterator[Interval]:
    """Go through the engine, to the step that ends at ``stop``, and out again."""
    yield from _walk(engine, stop)
    yield Interval(Stage.RESPOND, stop, end)


# --- recording API ---------------------------------------------------------------------------------


def _as_told(request: RequestTimeline, end: int | None) -> Partition:
    """Partition a request of whose stages the server itself told."""
    received, useful = request.received, request.first_useful
    ready = [item for item in request.items.values() if item.ready is not None]
    last = max(ready, key=lambda item: (item.ready or 0, item.index), default=None)
    first = _parts_of_first_output(request)
    return Partition(
        ttft=() if useful is None else _cover(received, useful, _along_parts(request, first, useful)),
        completion=() if end is None else _cover(received, end, _along_parts(request, request.parts, end)),
        critical_item=None if last is None else last.index,
    )


def _parts_of_first_output(request: RequestTimeline) -> list[Part]:
    """Return the parts that the first output waited for.

    Prefill makes the first token.  While that is on its way out of a stream, later ones are decoded.
    """
    useful = request.first_useful
    if useful is None or not request.facts.get("stream"):
        return request.parts
    prefills = [part.end for part in request.parts if part.stage is Stage.PREFILL and part.end is not None]
    made = max((end for end in prefills if end <= useful), default=useful)
    if request.tokens_before:
        decodes = sorted(p.begin for p in request.parts if p.stage is Stage.DECODE and p.begin >= made)
        made = next(iter(decodes[request.tokens_before :]), useful)
    return [part for part in request.parts if part.stage not in _DECODING or part.begin < made]


def _along_parts(request: RequestTimeline, parts: Iterable[Part], end: int) -> Iterator[Interval]:
    """Go along parts of a request, and say what the time between them is as far as it is known."""
    line = critical_path(parts, request.received, end)
    output = end if request.first_useful is None else min(request.first_useful, end)
    cursor = request.received
    item = None
    for place, (begin, stop, part) in enumerate(line):
        if not place:
            yield Interval(Stage.RECEIVE, cursor, begin)
        elif part.item is not None and part.item == item and part.stage in _LOADING:
            # What of a media item is neither fetch nor decoding is the wait for its decoding.
            yield Interval(Stage.MEDIA_DECODE_WAIT, cursor, begin, item=item)
        yield Interval(part.stage, begin, stop, item=part.item)
        cursor, item = stop, part.item
    if cursor < output:
        yield Interval(Stage.RESPOND if line else Stage.RECEIVE, cursor, output)
    behind = Stage.DECODE if cursor <= output and request.facts.get("stream") else Stage.RESPOND
    yield Interval(behind, max(cursor, output), end)


def _with_parts(request: RequestTimeline, covered: Sequence[Interval]) -> tuple[Interval, ...]:
    """Lay the parts of a request over what its hooks say nothing of."""
    if not covered:
        return ()
    line = critical_path(request.parts, covered[0].begin, covered[-1].end)
    told = [Interval(part.stage, begin, end, item=part.item) for begin, end, part in line]
    laid: list[Interval] = []
    for interval in covered:
        if interval.stage in _SILENT:
            laid += _fill(told, interval.begin, interval.end, interval.stage)
        else:
            laid.append(interval)
    return tuple(interval for interval in laid if interval.duration)


# --- front end -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FrontEnd:
    """The chain of jobs and media items from receipt to the hand-off."""

    intervals: tuple[Interval, ...]
    handed_off: int
    critical_item: int | None

    @classmethod
    def of(cls, request: RequestTimeline, limit: int) -> _FrontEnd:
        """Build the chain; what has not ended by ``limit`` ends there."""
        items = sorted(request.items.values(), key=attrgetter("index"))
        joined = [e.joined for e in request.engine_requests if e.joined is not None]
        jobs = _preprocessing_jobs(request, request.received, min(joined, default=None))
        begins = [item.begin for item in items] + [job.submitted for job in jobs]
        begin = min(begins + joined, default=limit)
        inline = [item for item in items if item.inline]
        pooled = [item for item in items if not item.inline]
        critical = max(pooled or inline, key=lambda item: (_ready(item, limit), item.index), default=None)
        intervals = [Interval(Stage.RECEIVE, request.received, begin)]
        cursor = begin
        if pooled and critical is not None:
            intervals += _item_intervals(critical, request.jobs, begin, limit)
            cursor = _ready(critical, limit)
        busy = [interval for item in inline for interval in _inline_intervals(item, limit)]
        busy += _without(jobs, inline, limit)
        ends = [_ended(job, limit) for job in jobs] + [_ready(item, limit) for item in inline]
        handed_off = max([cursor, *ends])
        intervals += _fill(busy, cursor, handed_off, Stage.PREPROCESS_WAIT)
        return cls(tuple(intervals), handed_off, None if critical is None else critical.index)


def _ready(item: Item, limit: int) -> int:
    return limit if item.ready is None else item.ready


def _ended(job: Job, limit: int) -> int:
    return limit if job.ended is None else job.ended


def _preprocessing_jobs(request: RequestTimeline, begin: int, end: int | None) -> list[Job]:
    """Return the jobs, other than those of media items, that were submitted in ``[begin, end)``."""
    return [
        job
        for job in request.jobs
        if job.item is None and job.submitted >= begin and (end is None or job.submitted < end)
    ]


def _item_intervals(item: Item, jobs: Iterable[Job], begin: int, limit: int) -> Iterator[Interval]:
    """Fetch and decoding of an item; everything else of it is ``media_decode.wait``."""
    ready = _ready(item, limit)
    busy = _fetches(item, ready)
    busy += [
        Interval(Stage.MEDIA_DECODE, job.started, _ended(job, ready), item=item.index)
        for job in jobs
        if job.item == item.index and job.kind is JobKind.DECODE and job.started is not None
    ]
    yield from _fill(busy, begin, ready, Stage.MEDIA_DECODE_WAIT, item.index)


def _inline_intervals(item: Item, limit: int) -> Iterator[Interval]:
    """Fetch and decoding of an item that was loaded where it was asked for: nothing of it is a wait."""
    ready = _ready(item, limit)
    yield from _fill(_fetches(item, ready), item.begin, ready, Stage.MEDIA_DECODE, item.index)


def _fetches(item: Item, ready: int) -> list[Interval]:
    return [
        Interval(Stage.RETRIEVAL, fetch.begin, ready if fetch.end is None else fetch.end, item=item.index)
        for fetch in item.fetches
    ]


def _without(jobs: Iterable[Job], inline: Iterable[Item], limit: int) -> Iterator[Interval]:
    """Return what is left of jobs when the items loaded within them are taken out."""
    holes = sorted((item.begin, _ready(item, limit)) for item in inline)
    for job in jobs:
        if job.started is None:
            continue
        cursor, ended = job.started, _ended(job, limit)
        for begin, ready in holes:
            yield Interval(Stage.PREPROCESS, cursor, min(begin, ended))
            cursor = max(cursor, ready)
        yield Interval(Stage.PREPROCESS, cursor, ended)


def _fill(
    busy: Iterable[Interval], begin: int, end: int, rest: Stage, item: int | None = None
) -> Iterator[Interval]:
    """Lay busy stretches over ``[begin, end)``; whatever lies between them is the rest."""
    cursor = begin
    for interval in sorted(busy, key=attrgetter("begin", "end")):
        first, last = max(interval.begin, cursor), min(interval.end, end)
        if last <= first:
            continue
        yield Interval(rest, cursor, first, item=item)
        yield interval._replace(begin=first, end=last)
        cursor = last
    yield Interval(rest, cursor, end, item=item)


# --- engine ----------------------------------------------------------------------------------------


def _without_engine(request: RequestTimeline, front: _FrontEnd, end: int) -> Iterator[Interval]:
    """Cover the rest of a request that never reached an engine: it was refused, or it broke off."""
    if not request.engine_requests:
        answered = request.last_byte is not None
        yield Interval(Stage.RESPOND if answered else Stage.HANDOFF, front.handed_off, end)


def _last_to_finish(request: RequestTimeline) -> EngineRequest | None:
    """Return the engine request that ended last; of a request that broke off, one that was still at work."""
    never = _NEVER if request.last_byte is None else 0
    return max(request.engine_requests, key=lambda e: e.output_finished or e.freed or never, default=None)


def _rounds_before(
    engines: Sequence[EngineRequest], engine: EngineRequest
) -> list[tuple[EngineRequest, int]]:
    """Return the last engine request of each round that had to end before one, and when the next round began.

    A new round begins when the engine is asked again after all earlier answers to the same request: so do
    beam search, tools that a model calls, and a score whose documents follow its query.
    """
    rounds: list[tuple[EngineRequest, int]] = []
    if len(engines) == 1:
        return rounds
    last: EngineRequest | None = None
    finished: int | None = 0
    for one in sorted((e for e in engines if e.joined is not None), key=lambda e: e.joined or 0):
        if last is not None and finished is not None and finished <= (one.joined or 0):
            rounds.append((last, one.joined or 0))
            last, finished = None, 0
        if one is engine:
            break
        if finished is not None:
            finished = None if one.output_finished is None else max(finished, one.output_finished)
        if last is None or (one.output_finished or 0) >= (last.output_finished or 0):
            last = one
    return rounds


def _first_to_deliver(request: RequestTimeline) -> EngineRequest | None:
    if request.tokens_before is None:
        return _last_to_finish(request)
    mine = [engine for engine in request.engine_requests if engine.index == request.choice]
    return mine[0] if mine else _last_to_finish(request)


def _end_of_output(engine: EngineRequest, end: int) -> int:
    """Return the end of the last step of the request whose output was used."""
    known = [time for time in (engine.output_finished, engine.freed, end) if time is not None]
    place = _last_work(engine, min(known))
    return _slot_end(engine, place, min(known))


def _end_of_first_useful(engine: EngineRequest, tokens_before: int | None, end: int) -> int:
    """Return the end of the step whose output made the first useful byte."""
    if tokens_before is None:
        return _end_of_output(engine, end)
    place = _last_work(engine, end)
    steps = engine.steps
    first = None if steps is None or engine.first_token is None else steps.place(engine.first_token)
    if first is None or place is None:
        return _slot_end(engine, place, end)
    state = _States(engine)
    mine = (p for p in range(first, place + 1) if state.tokens(p))
    return _slot_end(engine, next(islice(mine, tokens_before, None), place), end)


def _last_work(engine: EngineRequest, cutoff: int) -> int | None:
    """Return the place of the last step of the request that ended by a time."""
    if engine.steps is None:
        return None
    state = _States(engine)
    places = range(engine.steps.ending_after(cutoff) - 1, -1, -1)
    first = min((number for number, _ in engine.members), default=None)
    for place in places:
        if first is None or engine.steps.steps[place].number < first:
            return None
        if state.tokens(place):
            return place
    return None


def _slot_end(engine: EngineRequest, place: int | None, otherwise: int) -> int:
    end = None if place is None or engine.steps is None else engine.steps.ends[place]
    return otherwise if end is None else end


class _States:
    """What a request does in each slot: its changes, looked up by step."""

    def __init__(self, engine: EngineRequest) -> None:
        self._engine = engine
        self._steps = engine.steps.steps if engine.steps is not None else []
        self._members = sorted(engine.members)
        self._blocked = sorted(engine.blocked, key=itemgetter(0))
        self._again = [self._recomputing(step, tokens) for step, tokens in engine.preempted]

    def tokens(self, place: int) -> int:
        """Tokens of the request in the step at a place."""
        found = bisect_right(self._members, self._steps[place].number, key=itemgetter(0))
        return self._members[found - 1][1] if found else 0

    def _recomputing(self, preempted: int, tokens: int) -> range:
        """Return the steps in which the tokens known at a preemption are computed again."""
        computed = self._engine.resumed.get(preempted)
        if computed is None:
            return range(0)
        first = bisect_left(self._steps, preempted, key=attrgetter("number"))
        for place in range(first, len(self._steps)):
            computed += self.tokens(place)
            if computed >= tokens:
                return range(preempted, self._steps[place].number + 1)
        return range(preempted, self._steps[-1].number + 1 if self._steps else 0)

    def _is_seated(self, number: int) -> bool:
        """Whether the request has been in a step and has not lost its seat since."""
        had = max((step for step, tokens in self._members if tokens and step < number), default=None)
        if had is None:
            return False
        return not any(had < step <= number for step, _ in self._engine.preempted)

    def _block(self, number: int) -> Reason | None:
        found = bisect_right(self._blocked, number, key=itemgetter(0))
        return self._blocked[found - 1][1] if found else None

    def slot(self, place: int, begin: int, end: int) -> Iterator[Interval]:
        """Return what the request did in the slot of a step, within ``[begin, end)``."""
        step = self._steps[place]
        tokens = self.tokens(place)
        if not tokens:
            yield self._wait(step, begin, end)
            return
        first_token = self._engine.first_token
        again = any(step.number in steps for steps in self._again)
        prompt = first_token is None or step.number <= first_token or again
        work = Interval(
            Stage.PREFILL if prompt else Stage.DECODE,
            begin,
            end,
            first_step=step.number,
            last_step=step.number,
            recompute=again,
        )
        part = self._encoder_part(place)
        if part is None:
            yield work
            return
        opened, closed = (min(max(time, begin), end) for time in part)
        yield work._replace(end=opened)
        yield work._replace(stage=Stage.ENCODE, begin=opened, end=closed)
        yield work._replace(begin=closed)

    def _encoder_part(self, place: int) -> tuple[int, int] | None:
        steps = self._engine.steps
        if steps is None or self._steps[place].number not in self._engine.encoded:
            return None
        return steps.encoder_part(place)

    def idle(self, place: int, begin: int, end: int) -> Interval:
        """Return what the request did while the engine scheduled nothing, before the step at a place."""
        steps = self._engine.steps
        paused = steps is not None and steps.was_paused(begin, end)
        stage = Stage.PREFILL_WAIT if self._is_before_first(self._steps[place]) else Stage.DECODE_WAIT
        return Interval(stage, begin, end, Reason.PAUSED if paused else Reason.UNKNOWN)

    def _is_before_first(self, step: Step) -> bool:
        return self._engine.first_token is None or step.number <= self._engine.first_token

    def _wait(self, step: Step, begin: int, end: int) -> Interval:
        own = self._block(step.number)
        stage = Stage.PREFILL_WAIT if self._is_before_first(step) else Stage.DECODE_WAIT
        if own is not None:
            return Interval(
                _OWN_WAITS.get(own, stage), begin, end, own, first_step=step.number, last_step=step.number
            )
        if self._is_seated(step.number):
            reason = step.running_reason or Reason.UNKNOWN
            return Interval(stage, begin, end, reason, first_step=step.number, last_step=step.number)
        holder = None if step.head == self._engine.identifier else step.head
        reason = step.reason or Reason.UNKNOWN
        return Interval(stage, begin, end, reason, holder, first_step=step.number, last_step=step.number)


def _walk(engine: EngineRequest, stop: int, *, died: bool = False) -> Iterator[Interval]:
    """Cut the time from ``held`` to ``stop`` by steps; neighbours that say the same become one.

    When the engine died, the step that it died in lasts until ``stop``.
    """
    first: Interval | None = None
    last: Interval | None = None
    for interval in _slots(engine, stop, died=died):
        if interval.end <= interval.begin:
            continue
        if first is not None and last is not None:
            if _continues(last, interval):
                last = interval
                continue
            yield _joined(first, last)
        first = last = interval
    if first is not None and last is not None:
        yield _joined(first, last)


def _joined(first: Interval, last: Interval) -> Interval:
    return first if first is last else first._replace(end=last.end, last_step=last.last_step)


def _continues(before: Interval, after: Interval) -> bool:
    return (
        before.end == after.begin
        and before.stage is after.stage
        and before.stage is not Stage.ENCODE
        and (before.reason, before.holder, before.recompute) == (after.reason, after.holder, after.recompute)
    )


def _slots(engine: EngineRequest, stop: int, *, died: bool) -> Iterator[Interval]:
    steps, held = engine.steps, engine.held
    if steps is None or held is None:
        return
    states = _States(engine)
    added = held if engine.added is None else engine.added
    for place in range(steps.ending_after(held), len(steps.steps)):
        begin, end = max(steps.begins[place], held), steps.ends[place]
        if begin >= stop:
            return
        if steps.is_open(place) or (died and steps.is_under_way(place)):
            end = stop
        if end is None or steps.steps[place].contradicted:
            continue
        step = steps.steps[place]
        if step.scheduled < added:
            yield _waiting_for_step(begin, end, step.number)
            continue
        if step.scheduled - begin > IDLE_NS:
            yield _waiting_for_step(begin, min(added, step.scheduled), step.number)
            yield states.idle(place, max(begin, added), step.scheduled)
            begin = step.scheduled
        yield from states.slot(place, begin, min(end, stop))
    yield from _after_the_last_step(states, engine, steps, stop)


def _after_the_last_step(
    states: _States, engine: EngineRequest, steps: Steps, stop: int
) -> Iterator[Interval]:
    """Wait from the last step of an engine until it lets go of the request, as when both are stopped."""
    last = len(steps.steps) - 1
    end = steps.ends[last] if steps.steps else None
    if end is not None and engine.freed is not None:
        yield states.idle(last, max(end, engine.added or end), min(engine.freed, stop))


def _waiting_for_step(begin: int, end: int, number: int) -> Interval:
    return Interval(Stage.PREFILL_WAIT, begin, end, Reason.STEP, first_step=number, last_step=number)
