"""Reading a spool: segments of all processes -> the timelines of requests.

Joins, see the record kinds: a request in the API server meets the engine's
request by the engine's id of it, the engine meets the worker by the number of
the engine's process and the step, which travel with the scheduler's output.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagetrace.clock import ClockPair
from stagetrace.errors import DataError
from stagetrace.gaps import NEVER, Cut, Gap, cut_between
from stagetrace.process_records import Cost, Media, ProcessRecords
from stagetrace.reconcile import Check, mark_contradicted, reconcile
from stagetrace.records import RecordKind
from stagetrace.segment import SUFFIX, SegmentData, SegmentHeader, read_segment
from stagetrace.stages import Outcome
from stagetrace.timeline import EngineRequest, Item, Lag, RequestTimeline, Step, Steps
from stagetrace.told import complete, join_resumed

_BROKEN_OFF: Final = ("error", "abort")
"""Reasons for which vLLM ends an answer before its end."""

JUMP_NS: Final = 10_000_000
"""Less is the inaccuracy of reading two clocks at one instant."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that wrote into the spool.

    Attributes:
        header: Header of its last segment.
        facts: What it said of itself: ``service``, ``model``, and the ``version`` of its software.
        hooks_off: Hook points that were not as known, so that nothing is recorded there.
        gaps: When it did not record, and why.
        cost: What recording has cost its busy thread.
        roles: What it does: ``api``, ``engine``, ``worker``, or a role of its own; in alphabetical order.
        readings: Both clocks whenever it opened a segment, in that order.
        records: Number of records that it wrote.
    """

    header: SegmentHeader
    facts: dict[str, str]
    hooks_off: tuple[str, ...]
    gaps: tuple[Gap, ...]
    cost: Cost
    roles: tuple[str, ...]
    readings: tuple[ClockPair, ...]
    records: int


@dataclass(frozen=True, slots=True)
class SpoolData:
    """A spool as read and joined.

    Attributes:
        requests: Ended requests, by time of receipt.
        open_requests: Requests that have not ended.
        engines: Steps of each engine process.
        lags: Lags of the API servers' event loops, by time.
        processes: Who wrote, by process name.
        pairs: Both clocks at one instant, by the monotonic clock's name.
        records: Number of records read.
        not_sampled: Requests that were left out by sampling.
        removed: Segments that were removed to make room, and their bytes.
        set_aside: What could not be used, counted by reason.
        checks: Counts of the same thing by different witnesses.
    """

    requests: list[RequestTimeline]
    open_requests: list[RequestTimeline]
    engines: list[Steps]
    lags: list[Lag]
    processes: dict[str, Process]
    pairs: dict[str, ClockPair]
    records: int
    not_sampled: int
    removed: tuple[int, int]
    set_aside: Counter[str]
    checks: list[Check]

    @property
    def dropped(self) -> int:
        """Records that the writing processes lost."""
        return sum(process.header.dropped for process in self.processes.values())

    @property
    def faults(self) -> int:
        """Internal faults that the writing processes counted."""
        return sum(process.header.faults for process in self.processes.values())

    def pair(self, process: str) -> ClockPair:
        """Return a pair of both clocks: the last one read by any process that shares this one's clock.

        So a jump of the wall clock moves nothing on a host against anything else there.
        """
        return self.pairs[self.processes[process].header.clock]


def segment_paths(folder: Path) -> list[Path]:
    """List the segment files of a spool folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def is_spool(folder: Path) -> bool:
    """Tell whether a folder holds at least one segment file."""
    return folder.is_dir() and next(folder.glob(f"*{SUFFIX}"), None) is not None


def read_spool(folder: Path) -> SpoolData:
    """Read all segments of a spool folder and join their records.

    The spool may still be written to.  A segment that cannot be read is set
    aside and counted, the others are used.

    Raises:
        DataError: The folder holds no segment.
    """
    paths = segment_paths(folder)
    if not paths:
        raise DataError(
            f"{folder}: no segments here", hint="STAGETRACE_SPOOL names the folder a server records into"
        )
    set_aside: Counter[str] = Counter()
    segments: dict[tuple[str, int], SegmentData] = {}
    for path in paths:
        try:
            data = read_segment(path)
        except DataError:
            # What is gone by now was removed to make room, and what is missing then is seen later.
            set_aside["unreadable_segment"] += os.path.lexists(path)
            continue
        place = data.header.process, data.header.sequence
        if place in segments:
            # Somebody's copy: the longer one was made later.
            set_aside["doubled_segment"] += 1
            data = max(segments[place], data, key=lambda data: len(data.body))
        segments[place] = data
    return join_segments(segments.values(), set_aside)


def join_segments(segments: Iterable[SegmentData], set_aside: Counter[str]) -> SpoolData:
    """Join the records of segments, of which no two are the same.

    Args:
        segments: The segments, in any order.
        set_aside: Counter of what could not be used, by reason; added to.
    """
    by_process: dict[str, list[SegmentData]] = defaultdict(list)
    for data in segments:
        set_aside["torn_record"] += data.torn
        by_process[data.header.process].append(data)
    readers = [ProcessRecords(mine, set_aside) for mine in by_process.values()]
    return _join(readers, set_aside)


_Engines = dict[tuple[str, str], list[tuple[ProcessRecords, int]]]
"""Engine requests not yet joined, by clock and id; a client may use an id again."""


def _join(readers: Sequence[ProcessRecords], set_aside: Counter[str]) -> SpoolData:
    engines: _Engines = defaultdict(list)
    by_number: dict[int, ProcessRecords] = {reader.header.number: reader for reader in readers}
    gaps = _Gaps(readers)
    _leave_open(readers, by_number)
    for reader in readers:
        _join_worker(reader, by_number, gaps, set_aside)
    gaps.mark_unseen()
    steps = {
        r.header.process: Steps(r.header.process, r.steps.values(), r.pauses) for r in readers if r.steps
    }
    for reader in readers:
        for key, request in reader.engine_requests.items():
            request.steps = steps.get(reader.header.process)
            engines[reader.header.clock, request.identifier].append((reader, key))
    for reader in readers:
        _join_engine(reader, engines, gaps, set_aside)
    gaps.count_unjoined(engines, set_aside)
    join_resumed(readers, set_aside)
    requests = [request for reader in readers for request in reader.requests.values()]
    complete(requests, set_aside)
    engine_parts = [
        (steps[r.header.process], [*r.engine_requests.values(), *r.others])
        for r in readers
        if r.header.process in steps
    ]
    for one, mine in engine_parts:
        set_aside["encoder_part_outside_its_step"] += one.encoder_parts_outside()
        set_aside["contradicted_step"] += mark_contradicted(one, mine)
    still_open = [request for request in requests if request.outcome is None]
    set_aside["open_request"] += len(still_open)
    processes = {reader.header.process: _process(reader) for reader in readers}
    return SpoolData(
        requests=sorted((r for r in requests if r.outcome is not None), key=lambda r: r.received),
        open_requests=still_open,
        engines=list(steps.values()),
        lags=sorted((lag for reader in readers for lag in reader.lags), key=lambda lag: lag.at),
        processes=processes,
        pairs={
            reader.header.clock: reader.header.pair
            for reader in sorted(readers, key=lambda reader: reader.header.pair.monotonic_ns)
        },
        records=sum(reader.records for reader in readers),
        removed=(sum(r.removed_segments for r in readers), sum(r.removed_bytes for r in readers)),
        not_sampled=sum(len(reader.not_sampled) for reader in readers),
        set_aside=+set_aside,
        checks=[
            *reconcile(sum(r.received for r in readers), requests, engine_parts),
            *_clock_checks(readers),
        ],
    )


def _process(reader: ProcessRecords) -> Process:
    """Return who wrote; an engine may run its worker itself, and the first record tells one role only."""
    did = {"api": reader.requests, "engine": reader.steps, "worker": reader.worker_steps}
    roles = reader.roles | {role for role, some in did.items() if some}
    return Process(
        header=reader.header,
        facts=reader.facts,
        hooks_off=tuple(reader.hooks_off),
        gaps=tuple(reader.gaps),
        cost=reader.cost,
        # The role "process" is that of one whose first record tells none.
        roles=tuple(sorted(roles - {"process"} or roles)),
        readings=tuple(reader.pairs),
        records=reader.records,
    )


def _clock_checks(readers: Iterable[ProcessRecords]) -> Iterator[Check]:
    """Compare how far the wall clock was ahead of the monotonic one whenever a segment was opened."""
    found: dict[str, list[int]] = defaultdict(list)
    for reader in readers:
        found[reader.header.clock] += [pair.unix_ns - pair.monotonic_ns for pair in reader.pairs]
    for ahead in found.values():
        jump = max(ahead) - min(ahead)
        if jump > JUMP_NS:
            yield Check("seconds by which the wall clock jumped", 0, jump / 1e9)


class _Gaps:
    """What the processes of a server did not record, by their role: a request needs all of them.

    Args:
        readers: The records of all processes.
    """

    def __init__(self, readers: Sequence[ProcessRecords]) -> None:
        self._front_ends = [r for r in readers if "api" in r.roles or r.requests or r.unjoined]
        self._engines = [r for r in readers if "engine" in r.roles or r.steps or r.others]
        self._workers = [r for r in readers if "worker" in r.roles or r.worker_steps]
        self._removed = any(reader.removed_segments for reader in readers)

    def _cut(self, readers: Iterable[ProcessRecords], clock: str, begin: int, end: int) -> Cut | None:
        """Return why a process may not have recorded something, None when nothing is known against it."""
        mine = [reader for reader in readers if reader.header.clock == clock]
        cut = cut_between((gap for reader in mine for gap in reader.gaps), begin, end)
        if cut is None and self._removed and all(reader.opened > begin for reader in mine):
            return Cut.REMOVED
        return cut

    def in_engine(self, clock: str, begin: int, end: int) -> Cut | None:
        """Return why the engine may not have recorded a request, or a step."""
        return self._cut(self._engines, clock, begin, end)

    def mark_unseen(self) -> None:
        """Mark the steps whose encoder's part is missing because the worker did not record it."""
        for reader in self._engines:
            for step in reader.steps.values():
                known = step.encoder_begin is not None and (step.encoder_end or step.encoder_device_ns)
                if step.encoder_items and not known:
                    step.unseen = self._in_worker(reader.header.clock, step) is not None

    def _in_worker(self, clock: str, step: Step) -> Cut | None:
        done = NEVER if step.done is None else step.done
        return self._cut(self._workers, clock, step.scheduled, done)

    def in_worker(self, clock: str, engine: EngineRequest) -> Cut | None:
        """Return why a worker may not have recorded that it encoded items of a request, None when it has."""
        steps = engine.steps
        if steps is None:
            return None
        places = (steps.place(number) for number in engine.encoded)
        unseen = (steps.steps[place] for place in places if place is not None and steps.steps[place].unseen)
        return next((self._in_worker(clock, step) for step in unseen), None)

    def count_unjoined(self, engines: _Engines, set_aside: Counter[str]) -> None:
        """Count the engine's requests of whom no front end has told, by reason."""
        nobodys = {(r.header.clock, name) for r in self._front_ends for name in r.unjoined}
        # Of these a front end has told, but the name was gone.
        nameless = Counter({r.header.clock: r.nameless for r in self._front_ends})
        for (clock, name), left in engines.items():
            for reader, key in left if (clock, name) not in nobodys else ():
                request = reader.engine_requests[key]
                begin, end = request.held or 0, NEVER if request.freed is None else request.freed
                cut = self._cut(self._front_ends, clock, begin, end)
                if cut is None and nameless[clock]:
                    nameless[clock] -= 1
                    cut = Cut.REMOVED
                set_aside["engine_request_" + (cut or "without_front_end")] += 1


def _leave_open(readers: Iterable[ProcessRecords], by_number: dict[int, ProcessRecords]) -> None:
    """Find the last step that a worker began for each engine."""
    last: dict[int, int] = {}
    for reader in readers:
        for engine, number in reader.worker_steps:
            last[engine] = max(last.get(engine, 0), number)
    for engine, number in last.items():
        if engine in by_number:
            by_number[engine].leave_open(number)


def _join_worker(
    reader: ProcessRecords, by_number: dict[int, ProcessRecords], gaps: _Gaps, set_aside: Counter[str]
) -> None:
    for (engine, number), found in reader.worker_steps.items():
        owner = by_number.get(engine)
        step = owner.steps.get(number) if owner is not None else None
        if step is None:
            at = found.begin or found.encoder_begin or 0
            set_aside["worker_step_" + (gaps.in_engine(reader.header.clock, at, at) or "without_engine")] += 1
            continue
        # Several workers run the same step: it begins with the first and encodes until the last,
        # or for as long as the device that took longest.
        step.begin = _earlier(step.begin, found.begin)
        step.encoder_begin = _earlier(step.encoder_begin, found.encoder_begin)
        if found.encoder_deferred:
            step.encoder_device_ns = _later(step.encoder_device_ns, found.encoder_device_ns)
            lost = found.encoder_device_ns is None and step.done is not None
            set_aside["encoder_part_without_device_time"] += lost
        else:
            step.encoder_end = _later(step.encoder_end, found.encoder_end)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((time for time in (one, other) if time is not None), default=None)


def _later(one: int | None, other: int | None) -> int | None:
    return max((time for time in (one, other) if time is not None), default=None)


_EngineMedia = list[tuple[EngineRequest, dict[int, Media]]]
"""A request's engine requests, with the media items of each."""


def _join_engine(reader: ProcessRecords, engines: _Engines, gaps: _Gaps, set_aside: Counter[str]) -> None:
    cuts: dict[str, Cut] = {}
    media: dict[str, _EngineMedia] = defaultdict(list)
    for request, seen in sorted(reader.joins, key=lambda join: join[1].joined or 0):
        waiting = engines.get((reader.header.clock, seen.identifier))
        engine = seen
        if not waiting:
            end = NEVER if request.ended is None else request.ended
            cut = gaps.in_engine(reader.header.clock, seen.joined or 0, end)
            if cut is None:
                set_aside["request_without_engine"] += 1
            else:
                cuts[request.request_id] = cut
        else:
            waiting.sort(key=_held)
            owner, key = waiting.pop(0)
            engine = owner.engine_requests[key]
            engine.joined, engine.index, engine.prompt = seen.joined, seen.index, seen.prompt
            media[request.request_id].append((engine, owner.engine_media.get(key, {})))
            if "model" in owner.facts:
                request.facts["model"] = owner.facts["model"]
        for kind, time, text in reader.outputs.get(seen.identifier, ()):
            _add_output(engine, kind, time, text)
        if engine.finish_reason is not None:
            request.facts["finish_reason"] = engine.finish_reason
        request.engine_requests.append(engine)
        cut = gaps.in_worker(reader.header.clock, engine)
        if cut is not None:
            cuts[request.request_id] = cut
    reader.leave_out(cuts)
    for request in reader.requests.values():
        _judge(request)
        _add_facts(request)
        _add_media(request, media[request.request_id], set_aside)


def _judge(request: RequestTimeline) -> None:
    """Make an error of an answer that the engine broke off, though it was handed out as a whole one."""
    reasons = {engine.finish_reason for engine in request.engine_requests}
    broken_off = next((reason for reason in _BROKEN_OFF if reason in reasons), None)
    if request.outcome is Outcome.OK and broken_off is not None:
        request.outcome = Outcome.ERROR
        request.facts["error_code"] = f"engine_{broken_off}"


def _held(found: tuple[ProcessRecords, int]) -> int:
    reader, key = found
    return reader.engine_requests[key].held or 0


def _add_facts(request: RequestTimeline) -> None:
    """Add up the facts of a request's prompts, and the output tokens of all its answers."""
    prompts: dict[int, dict[str, int]] = defaultdict(dict)
    for engine in request.engine_requests:
        # Several answers to one prompt have the prompt in common.
        prompts[engine.prompt] = engine.facts | prompts[engine.prompt]
    answers = [engine.facts for engine in request.engine_requests]
    for name in {name for facts in answers for name in facts}:
        values = [facts.get(name) for facts in (answers if name == "output_tokens" else prompts.values())]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            request.facts[name] = sum(known)


def _add_output(engine: EngineRequest, kind: int, time: int, text: str | None) -> None:
    if kind == RecordKind.OUTPUT_FIRST:
        engine.output_first = time
    elif kind == RecordKind.OUTPUT_FINISHED:
        engine.output_finished = time
        engine.finish_reason = text
    else:
        engine.aborted = True


def _add_media(request: RequestTimeline, seen: _EngineMedia, set_aside: Counter[str]) -> None:
    """Add what the engine knows of the items; it numbers them by place in the prompt, over all modalities.

    The items of several prompts stand in the order of the prompts, and so do the jobs that load them.
    """
    prompts: dict[int, _EngineMedia] = defaultdict(list)
    for engine, media in seen:
        prompts[engine.prompt].append((engine, media))
    known = sum(len(answers[0][1]) for answers in prompts.values())
    alike = {item.facts.get("modality") for item in request.items.values()} <= {"image"}
    if known and not (alike and known == len(request.items)):
        set_aside["request_whose_media_items_cannot_be_told_apart"] += 1
        return
    items = iter(sorted(request.items.values(), key=lambda item: (item.job or 0, item.index)))
    for _, answers in sorted(prompts.items()):
        for place, found in sorted(answers[0][1].items()):
            _add_item_facts(next(items), place, found, [engine for engine, _ in answers])


def _add_item_facts(item: Item, place: int, media: Media, answers: Iterable[EngineRequest]) -> None:
    """Add what the engine knows of the item at a place in a prompt; the first answer may have encoded it."""
    item.facts["tokens"] = media.embeddings
    if media.identifier is not None:
        item.facts["hash"] = media.identifier
    for engine in answers:
        cached_tokens = engine.facts.get("cached_tokens")
        if any(place in items for items in engine.encoded.values()):
            item.facts["encoder_cache"] = "miss"
            return
        if cached_tokens is not None and engine.first_token is not None:
            found = "prefix" if media.last_position < cached_tokens else "hit"
            item.facts.setdefault("encoder_cache", found)
