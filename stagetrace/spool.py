"""Reading a spool: segments of all processes -> the timelines of requests.

Joins, see the record kinds: a request in the API server meets the engine's
request by the engine's id of it, the engine meets the worker by the number of
the engine's process and the step, which travel with the scheduler's output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagetrace.clock import ClockPair
from stagetrace.errors import DataError
from stagetrace.process_records import Media, ProcessRecords
from stagetrace.reconcile import Check, mark_contradicted, reconcile
from stagetrace.records import RecordKind
from stagetrace.segment import SUFFIX, SegmentData, SegmentHeader, read_segment
from stagetrace.timeline import EngineRequest, Lag, RequestTimeline, Steps


@dataclass(frozen=True, slots=True)
class Process:
    """A process that wrote into the spool.

    Attributes:
        header: Header of its last segment.
        facts: What it said of itself: ``model``.
        hooks_off: Hook points that were not as known, so that nothing is recorded there.
    """

    header: SegmentHeader
    facts: dict[str, str]
    hooks_off: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpoolData:
    """A spool as read and joined.

    Attributes:
        requests: Ended requests, by time of receipt.
        open_requests: Requests that have not ended.
        engines: Steps of each engine process.
        lags: Lags of the API servers' event loops, by time.
        processes: Who wrote, by process name.
        records: Number of records read.
        set_aside: What could not be used, counted by reason.
        checks: Counts of the same thing by different witnesses.
    """

    requests: list[RequestTimeline]
    open_requests: list[RequestTimeline]
    engines: list[Steps]
    lags: list[Lag]
    processes: dict[str, Process]
    records: int
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
        """Return a pair of both clocks, read by a process."""
        return self.processes[process].header.pair


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
    by_process: dict[str, list[SegmentData]] = defaultdict(list)
    for path in paths:
        try:
            data = read_segment(path)
        except DataError:
            set_aside["unreadable_segment"] += 1
            continue
        set_aside["torn_record"] += data.torn
        by_process[data.header.process].append(data)
    readers = [ProcessRecords(segments, set_aside) for segments in by_process.values()]
    return _join(readers, set_aside)


_Engines = dict[tuple[str, str], list[tuple[ProcessRecords, int]]]
"""Engine requests not yet joined, by clock and id; a client may use an id again."""


def _join(readers: Sequence[ProcessRecords], set_aside: Counter[str]) -> SpoolData:
    engines: _Engines = defaultdict(list)
    by_number: dict[int, ProcessRecords] = {reader.header.number: reader for reader in readers}
    for reader in readers:
        _join_worker(reader, by_number, set_aside)
    steps = {
        r.header.process: Steps(r.header.process, r.steps.values(), r.pauses) for r in readers if r.steps
    }
    for reader in readers:
        for key, request in reader.engine_requests.items():
            request.steps = steps.get(reader.header.process)
            engines[reader.header.clock, request.identifier].append((reader, key))
    for reader in readers:
        _join_engine(reader, engines, set_aside)
    set_aside["engine_request_without_front_end"] += sum(map(len, engines.values()))
    requests = [request for reader in readers for request in reader.requests.values()]
    engine_parts = [
        (steps[r.header.process], list(r.engine_requests.values()))
        for r in readers
        if r.header.process in steps
    ]
    for one, mine in engine_parts:
        set_aside["contradicted_step"] += mark_contradicted(one, mine)
    still_open = [request for request in requests if request.outcome is None]
    set_aside["open_request"] += len(still_open)
    processes = {r.header.process: Process(r.header, r.facts, tuple(r.hooks_off)) for r in readers}
    return SpoolData(
        requests=sorted((r for r in requests if r.outcome is not None), key=lambda r: r.received),
        open_requests=still_open,
        engines=list(steps.values()),
        lags=sorted((lag for reader in readers for lag in reader.lags), key=lambda lag: lag.at),
        processes=processes,
        records=sum(reader.records for reader in readers),
        set_aside=+set_aside,
        checks=reconcile(sum(r.received for r in readers), requests, engine_parts),
    )


def _join_worker(
    reader: ProcessRecords, by_number: dict[int, ProcessRecords], set_aside: Counter[str]
) -> None:
    for (engine, number), found in reader.worker_steps.items():
        owner = by_number.get(engine)
        step = owner.steps.get(number) if owner is not None else None
        if step is None:
            set_aside["worker_step_without_engine"] += 1
            continue
        # Several workers run the same step: it begins with the first and encodes until the last.
        step.begin = _earlier(step.begin, found.begin)
        step.encoder_begin = _earlier(step.encoder_begin, found.encoder_begin)
        step.encoder_end = _later(step.encoder_end, found.encoder_end)
    for step in reader.steps.values():
        before = reader.steps.get(step.number - 1)
        if step.encoder_end is not None and before is not None and before.done is not None:
            # On a device the host only launches the encoder; its part of the step is then not known.
            set_aside["encoder_part_outside_its_step"] += step.encoder_end <= before.done


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((time for time in (one, other) if time is not None), default=None)


def _later(one: int | None, other: int | None) -> int | None:
    return max((time for time in (one, other) if time is not None), default=None)


def _join_engine(reader: ProcessRecords, engines: _Engines, set_aside: Counter[str]) -> None:
    for request, seen in sorted(reader.joins, key=lambda join: join[1].joined or 0):
        waiting = engines.get((reader.header.clock, seen.identifier))
        engine = seen
        if not waiting:
            set_aside["request_without_engine"] += 1
        else:
            waiting.sort(key=_held)
            owner, key = waiting.pop(0)
            engine = owner.engine_requests[key]
            engine.joined, engine.index = seen.joined, seen.index
            _add_media(request, engine, owner.engine_media.get(key, {}), set_aside)
            _add_facts(request, engine)
            if "model" in owner.facts:
                request.facts["model"] = owner.facts["model"]
        for kind, time, text in reader.outputs.get(seen.identifier, ()):
            _add_output(engine, kind, time, text)
        if engine.finish_reason is not None:
            request.facts["finish_reason"] = engine.finish_reason
        request.engine_requests.append(engine)


def _held(found: tuple[ProcessRecords, int]) -> int:
    reader, key = found
    return reader.engine_requests[key].held or 0


def _add_facts(request: RequestTimeline, engine: EngineRequest) -> None:
    """Take the facts of the first of a request's engine requests, and the output tokens of all."""
    before = request.facts.get("output_tokens")
    more = engine.facts.get("output_tokens")
    for name, value in engine.facts.items():
        request.facts.setdefault(name, value)
    if before is not None and more is not None:
        request.facts["output_tokens"] = int(before) + more


def _add_output(engine: EngineRequest, kind: int, time: int, text: str | None) -> None:
    if kind == RecordKind.OUTPUT_FIRST:
        engine.output_first = time
    elif kind == RecordKind.OUTPUT_FINISHED:
        engine.output_finished = time
        engine.finish_reason = text
    else:
        engine.aborted = True


def _add_media(
    request: RequestTimeline, engine: EngineRequest, media: dict[int, Media], set_aside: Counter[str]
) -> None:
    """Add what the engine knows of the items; it numbers them by place in the prompt, over all modalities."""
    alike = {item.facts.get("modality") for item in request.items.values()} <= {"image"}
    if media and not (alike and len(media) == len(request.items)):
        set_aside["request_whose_media_items_cannot_be_told_apart"] += 1
        return
    encoded = {item for items in engine.encoded.values() for item in items}
    cached_tokens = engine.facts.get("cached_tokens")
    for index, found in media.items():
        facts = request.items[index].facts
        facts["tokens"] = found.embeddings
        if found.identifier is not None:
            facts["hash"] = found.identifier
        if index in encoded:
            facts["encoder_cache"] = "miss"
        elif cached_tokens is not None and engine.first_token is not None:
            facts["encoder_cache"] = "prefix" if found.last_position < cached_tokens else "hit"
