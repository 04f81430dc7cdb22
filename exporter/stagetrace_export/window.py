"""The part of a growing spool that still matters: every record is read once, and held until it is cut off.

What lies before the cut is replaced by a frame, which says anew what the engine
records by change, as the engine itself does at the head of each segment.  So
what is held can be joined as if the spool began there.
"""

from __future__ import annotations

import fcntl
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from stagetrace.clock import clock_domain, monotonic_ns, pid_namespace
from stagetrace.errors import DataError
from stagetrace.gaps import NEVER
from stagetrace.process_records import is_gone
from stagetrace.records import MAGIC, RECORD, RECORD_BYTES, RecordKind
from stagetrace.segment import HEADER_BYTES, Record, SegmentData, SegmentHeader, parse_header
from stagetrace.spool import segment_paths
from stagetrace.timeline import Steps

READ_BYTES: Final = 4 << 20
"""So much of the spool's past is read at once: joining what is read takes ten times the memory."""

HELD_BYTES: Final = 16 << 20
"""When more is held, what has been in flight for longest is given up."""

SETTLE_NS: Final = 1_000_000_000
"""A record may be written so much later than the time that it tells."""

_CHUNK_BYTES: Final = 1 << 16
_NO_SLOT: Final = b"\0" * RECORD_BYTES
_ALWAYS: Final = frozenset({RecordKind.DEFINE, RecordKind.PROCESS_FACT, RecordKind.HOOK_OFF})
"""Kinds that are kept as long as their segment: they hold for all of it."""

_ENGINES: Final = int(RecordKind.HELD)
_WORKERS: Final = int(RecordKind.STEP_BEGIN)
_BY_CHANGE: Final = frozenset(
    {
        RecordKind.FRAME,
        RecordKind.STEP,
        RecordKind.HEAD,
        RecordKind.MEMBER,
        RecordKind.FREED,
        RecordKind.PAUSE,
    }
)


class Place(NamedTuple):
    """Where the records of a process were left.

    Attributes:
        segment: Sequence number of the first segment that still matters.
        read: The segment that was read last, and up to which byte of it.
        latest: The highest number of a request so far.
        unfinished: Numbers of the requests received so far that were neither handed out nor set aside.
    """

    segment: int = 0
    read: tuple[int, int] = (0, 0)
    latest: int = 0
    unfinished: frozenset[int] = frozenset()


class _Base(NamedTuple):
    """The step with which the held records of an engine begin: when it was scheduled, and its number."""

    scheduled: int
    number: int


class _Cut(NamedTuple):
    """From when on records are held, by the role they tell of; a worker's by the number of their engine."""

    front_end: int
    engine: int
    workers: Mapping[int, int]

    def of(self, kind: int, engine: int) -> int:
        if kind < _ENGINES:
            return self.front_end
        return self.engine if kind < _WORKERS else self.workers.get(engine, self.front_end)


@dataclass(slots=True)
class _Frame:
    """What an engine had recorded by change when the records that are held begin."""

    base: _Base = field(default_factory=lambda: _Base(0, 0))
    step: Record | None = None
    head: Record | None = None
    pause: Record | None = None
    members: dict[int, Record] = field(default_factory=dict)

    def note(self, record: Record) -> None:
        """Take over what a record says that is not held any more."""
        kind, key = record[6], record[1]
        if kind == RecordKind.FRAME:
            self.step = self.head = None
            self.members.clear()
        elif kind == RecordKind.STEP:
            self.step = record
        elif kind == RecordKind.HEAD:
            self.head = record
        elif kind == RecordKind.PAUSE:
            self.pause = record
        elif kind == RecordKind.MEMBER and record[3]:
            self.members[key] = record
        else:
            self.members.pop(key, None)

    def packed(self) -> bytes:
        """Return it as records."""
        frame = (*self.base, 0, 0, 0, 0, int(RecordKind.FRAME), MAGIC)
        stated = ((*self.base, *record[2:]) for record in (self.step, self.head) if record is not None)
        noted = (self.pause, *self.members.values())
        dated = ((self.base.scheduled, *record[1:]) for record in noted if record is not None)
        return b"".join(RECORD.pack(*record) for record in (frame, *stated, *dated))


@dataclass(slots=True)
class _Segment:
    """A segment, and what is held of it.

    Attributes:
        read: Up to which byte it was read.
        hole: A slot that had been taken and not filled when it was read last, 0 for none.
        is_done: All of it was read, or is gone.
        is_lost: It was removed or damaged before all of it was read.
    """

    path: Path
    header: SegmentHeader
    read: int = HEADER_BYTES
    hole: int = 0
    torn: int = 0
    body: bytes = b""
    is_done: bool = False
    is_lost: bool = False

    @property
    def opened(self) -> int:
        return self.header.pair.monotonic_ns

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held but what holds for the segment as a whole."""
        return _ALWAYS.issuperset(_kinds(self.body))

    def take(self, *, is_written: bool, is_last: bool) -> bytes:
        """Read what was written since the last call, and return it with the holes that are in it.

        Behind a hole nothing is taken before the next call, so that the thread can fill it whose slot it is.

        Args:
            is_written: Somebody may still write to it.
            is_last: There is no other call.
        """
        try:
            found = self._read(to_the_end=is_last or not is_written)
        except (OSError, DataError):
            self.is_done = self.is_lost = True
            return b""
        hole = _first_hole(found)
        if hole is not None and not is_last and self.read + hole != self.hole:
            self.hole = self.read + hole
            found = found[:hole]
        else:
            self.is_done = not is_written
        self.read += len(found)
        kept = found if hole is None else b"".join(s for s in _slots(found) if s != _NO_SLOT)
        self.torn += (len(found) - len(kept)) // RECORD_BYTES
        self.body += kept
        return found

    def times(self) -> Iterator[int]:
        """Return the times of the records that are held."""
        for place, kind in enumerate(_kinds(self.body)):
            if kind not in _ALWAYS:
                yield RECORD.unpack_from(self.body, place * RECORD_BYTES)[0]

    def _read(self, *, to_the_end: bool) -> bytes:
        pieces = []
        with self.path.open("rb", buffering=0) as file:
            self.header = parse_header(self.path, file.read(HEADER_BYTES))
            file.seek(self.read)
            while piece := file.read(-1 if to_the_end else _CHUNK_BYTES):
                pieces.append(piece)
                if piece.endswith(_NO_SLOT):
                    break
        found = b"".join(pieces).rstrip(b"\0")
        return found + b"\0" * (-len(found) % RECORD_BYTES)

    def cut(self, cut: _Cut, frame: _Frame) -> None:
        """Let go of the records before the cut; what they recorded by change goes into the frame."""
        kinds = _kinds(self.body)
        if not kinds:
            return
        times = memoryview(self.body).cast("q")[::4].tolist()
        engines = memoryview(self.body).cast("I")[3::8].tolist()
        records = zip(times, kinds, engines, strict=True)
        kept = [kind in _ALWAYS or time >= cut.of(kind, engine) for time, kind, engine in records]
        if all(kept):
            return
        for place, kind in enumerate(kinds):
            if not kept[place] and kind in _BY_CHANGE:
                frame.note(RECORD.unpack_from(self.body, place * RECORD_BYTES))
        self.body = b"".join(slot for slot, is_kept in zip(_slots(self.body), kept, strict=True) if is_kept)

    def data(self, frame: bytes, missing: int) -> SegmentData:
        """Return what is held as a segment, as if so many were missing before it."""
        header = replace(self.header, sequence=self.header.sequence + missing)
        return SegmentData(header, frame + self.body, self.torn)


def _kinds(body: bytes) -> list[int]:
    return memoryview(body).cast("H")[14::16].tolist() if body else []


def _slots(body: bytes) -> Iterator[bytes]:
    return (body[at : at + RECORD_BYTES] for at in range(0, len(body), RECORD_BYTES))


def _first_hole(body: bytes) -> int | None:
    magics = memoryview(body).cast("H")[15::16].tolist() if body else []
    if magics.count(MAGIC) == len(magics):
        return None
    return next(place for place, magic in enumerate(magics) if magic != MAGIC) * RECORD_BYTES


class _Writer:
    """A process that writes, or wrote, into the spool.

    Attributes:
        segments: Those of which something is held, or is still to be read.
        unfinished: When the requests were received that were neither handed out nor set aside, by number.
        removed: Requests of which records were removed before they were handed out.
        not_sampled: Requests that sampling left out.
        has_ended: The process has certainly ended.
    """

    def __init__(self, place: Place) -> None:
        self.segments: list[_Segment] = []
        self.unfinished: dict[int, int] = {}
        self.removed = 0
        self.not_sampled = 0
        self.has_ended = False
        self._place = place
        self._next = self._expected = place.segment
        self._latest = place.latest
        self._awaited = set(place.unfinished)
        self._is_behind_gap = False
        self._frame: _Frame | None = None

    @property
    def place(self) -> Place:
        """Where to go on after a restart."""
        first = self.segments[0].header.sequence if self.segments else self._next
        read = max(((s.header.sequence, s.read) for s in self.segments), default=(self._next, 0))
        unfinished = frozenset(self.unfinished) | self._awaited
        return Place(first, max(read, self._place.read), self._latest, unfinished)

    @property
    def clock(self) -> str:
        return self.segments[0].header.clock

    @property
    def number(self) -> int:
        return self.segments[0].header.number

    def add(self, segment: _Segment) -> None:
        """Add a segment, unless it does not matter any more."""
        sequence = segment.header.sequence
        if sequence < self._next:
            return
        self._next = sequence + 1
        self.segments.append(segment)

    def take(self, segment: _Segment, *, is_last: bool) -> int:
        """Read a segment on, and note the requests that were received; returns the bytes that were read."""
        is_written = segment is self.segments[-1] and not self.has_ended
        begin, sequence = segment.read, segment.header.sequence
        # Nobody is left who could fill a hole.
        found = segment.take(is_written=is_written, is_last=is_last or self.has_ended)
        self._is_behind_gap |= sequence > self._expected
        self._expected = max(self._expected, sequence + 1)
        for place, kind in enumerate(_kinds(found)):
            if kind in {RecordKind.RECEIVED, RecordKind.NOT_SAMPLED}:
                time, number, *_ = RECORD.unpack_from(found, place * RECORD_BYTES)
                is_known = (sequence, begin + place * RECORD_BYTES) < self._place.read
                self._note(time, number, kind, is_known=is_known)
        if (sequence, segment.read) >= self._place.read:
            self.removed += len(self._awaited)
            self._awaited.clear()
        self._is_behind_gap |= segment.is_lost
        return len(found)

    def _note(self, time: int, number: int, kind: int, *, is_known: bool) -> None:
        if self._is_behind_gap:
            self._is_behind_gap = False
            self.removed += max(number - self._latest - 1, 0)
        self._latest = max(self._latest, number)
        if kind == RecordKind.RECEIVED and (not is_known or number in self._awaited):
            self._awaited.discard(number)
            self.unfinished[number] = time
        self.not_sampled += kind == RecordKind.NOT_SAMPLED and not is_known

    def cut(self, cut: _Cut, base: _Base) -> None:
        """Let go of what is before a cut, as if the records began with a step."""
        frame = self._frame or _Frame()
        before = self.held_bytes
        for segment in self.segments:
            segment.cut(cut, frame)
        if self.held_bytes < before:
            self._frame = frame
            frame.base = base
        self._drop_empty()

    def _drop_empty(self) -> None:
        while len(self.segments) > 1 and self.segments[0].is_done and self.segments[0].is_empty:
            dropped = self.segments.pop(0)
            self.segments[0].body = self._heads_of(dropped) + self.segments[0].body
        if self.has_ended and all(segment.is_done and segment.is_empty for segment in self.segments):
            self.segments.clear()

    def _heads_of(self, dropped: _Segment) -> bytes:
        """Return the names, defined in a segment, of requests at the head of the queue later."""
        heads = [] if self._frame is None or self._frame.head is None else [self._frame.head]
        for segment in self.segments:
            places = (place for place, kind in enumerate(_kinds(segment.body)) if kind == RecordKind.HEAD)
            heads += (RECORD.unpack_from(segment.body, place * RECORD_BYTES) for place in places)
        wanted = {head[2].to_bytes(4, "little") for head in heads}
        kinds = _kinds(dropped.body)
        return b"".join(
            slot
            for slot, kind in zip(_slots(dropped.body), kinds, strict=True)
            if kind == RecordKind.DEFINE and slot[:4] in wanted
        )

    @property
    def held_bytes(self) -> int:
        return sum(len(segment.body) for segment in self.segments)

    @property
    def last(self) -> int:
        """Time of the last record that is held, 0 without one."""
        return max((time for segment in self.segments for time in segment.times()), default=0)

    def data(self) -> Iterator[SegmentData]:
        # What is held begins where others were removed, once something was cut off.
        frame, missing = (b"", 0) if self._frame is None else (self._frame.packed(), 1)
        for segment in self.segments:
            yield segment.data(frame, missing)
            frame = b""
            missing += segment.is_lost
        if self.segments and self.segments[-1].is_lost:
            yield replace(self.segments[-1], body=b"", torn=0).data(frame, missing + 1)


class Window:
    """What is held of a spool.

    Args:
        spool: The folder.
        places: Where to go on, by process; a process that has none is read from its oldest segment on.

    Attributes:
        more: Not all that the spool held was read at the last call.
        unreadable: Segments that could not be read, or not to their end.
        given_up: Requests that were in flight for so long that what belongs to them was too much to hold.
    """

    def __init__(self, spool: Path, places: Mapping[str, Place]) -> None:
        self._spool = spool
        self._places = dict(places)
        self._writers: dict[str, _Writer] = {}
        self._paths: dict[Path, str] = {}
        self._horizons: dict[str, int] = {}
        self.more = False
        self.unreadable = 0
        self._gone = 0
        self._left_out = 0
        self.given_up = 0

    # --- reading ---

    def read(self, *, is_last: bool = False) -> None:
        """Read what was written since the last call: the oldest first, and about ``READ_BYTES`` at most.

        Args:
            is_last: Nothing will be written any more, or is not waited for.
        """
        self._list()
        self._note_ended()
        read_at = monotonic_ns()
        unread = sorted(
            ((s, writer) for writer in self._writers.values() for s in writer.segments if not s.is_done),
            key=lambda found: found[0].opened,
        )
        taken, place = 0, 0
        for place, (segment, writer) in enumerate(unread, 1):  # noqa: B007 - how far it got
            taken += writer.take(segment, is_last=is_last)
            self.unreadable += segment.is_lost
            if taken >= READ_BYTES:
                break
        behind = [segment for segment, _ in unread[place:]]
        self.more = bool(behind)
        self._horizons = {clock: _last(writers) for clock, writers in self._by_clock().items()}
        self._horizons[clock_domain()] = read_at
        for segment in reversed(behind):
            self._horizons[segment.header.clock] = segment.opened

    def _list(self) -> None:
        """Find the segments that are new, and forget the processes of which none is left."""
        listed = segment_paths(self._spool)
        found: list[_Segment] = []
        for path in listed:
            if path in self._paths:
                continue
            try:
                with path.open("rb", buffering=0) as file:
                    header = parse_header(path, file.read(HEADER_BYTES))
            except (OSError, DataError):
                self.unreadable += os.path.lexists(path)
                self._paths[path] = ""
                continue
            self._paths[path] = header.process
            found.append(_Segment(path, header))
        for segment in sorted(found, key=lambda segment: segment.header.sequence):
            name = segment.header.process
            if name not in self._writers:
                self._writers[name] = _Writer(self._places.pop(name, Place()))
            self._writers[name].add(segment)
        self._gone += sum(len(place.unfinished) for place in self._places.values())
        self._places.clear()
        self._paths = {path: self._paths[path] for path in listed}
        left = set(self._paths.values())
        for name in [n for n, w in self._writers.items() if n not in left and not w.segments]:
            gone = self._writers.pop(name)
            self._gone += gone.removed
            self._left_out += gone.not_sampled

    def _note_ended(self) -> None:
        """Find out which processes have ended; one that has opened another segment meanwhile has not."""
        lasts = {w: w.segments[-1] for w in self._writers.values() if w.segments and not w.has_ended}
        ended = [writer for writer, last in lasts.items() if _has_ended(last)]
        if ended:
            self._list()
        for writer in ended:
            writer.has_ended = writer.segments[-1] is lasts[writer]

    @property
    def ended(self) -> frozenset[str]:
        """Processes that had ended before the spool was read."""
        return frozenset(n for n, w in self._writers.items() if w.has_ended or not w.segments)

    @property
    def is_written(self) -> bool:
        """Whether a process may go on to write that had written when the spool was read."""
        return len(self.ended) < len(self._writers)

    @property
    def is_empty(self) -> bool:
        """Whether no process has written, as far as is known."""
        return not self._writers

    def horizon(self, clock: str) -> int:
        """Return up to when the records of all processes of a clock were read, on that clock.

        `NEVER` when nobody writes any more whose clock it is, unless it is the clock of here.
        """
        return self._horizons.get(clock, NEVER)

    def segments(self) -> Iterator[SegmentData]:
        """Return all that is held."""
        return (data for writer in self._writers.values() for data in writer.data())

    # --- requests ---

    def unfinished(self) -> Iterator[str]:
        """Return the ids of the requests received so far that were neither handed out nor set aside."""
        return (f"{name}-{number}" for name, w in self._writers.items() for number in w.unfinished)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request was neither handed out nor set aside."""
        name, _, number = request_id.rpartition("-")
        return name in self._writers and int(number) in self._writers[name].unfinished

    @property
    def removed(self) -> int:
        """How many requests were removed from the spool before they were handed out."""
        return self._gone + sum(writer.removed for writer in self._writers.values())

    @property
    def not_sampled(self) -> int:
        """How many requests were left out by sampling."""
        return self._left_out + sum(writer.not_sampled for writer in self._writers.values())

    def places(self) -> dict[str, Place]:
        """Return where to go on after a restart, by process."""
        return {name: writer.place for name, writer in self._writers.items()}

    # --- forgetting ---

    def forget(self, finished: Iterable[str], engines: Iterable[Steps]) -> None:
        """Let go of requests, and of all records that no other request needs.

        Args:
            finished: Ids of requests that were handed out or set aside.
            engines: The steps of the engines, as they were joined from what is held.
        """
        for request_id in finished:
            name, _, number = request_id.rpartition("-")
            del self._writers[name].unfinished[int(number)]
        steps = {one.engine: one for one in engines}
        self._cut(steps)
        if self.held_bytes > HELD_BYTES:
            self._give_up()
            self._cut(steps)

    @property
    def held_bytes(self) -> int:
        """Bytes of records that are held."""
        return sum(writer.held_bytes for writer in self._writers.values())

    def _by_clock(self) -> dict[str, list[_Writer]]:
        found: dict[str, list[_Writer]] = {}
        for writer in self._writers.values():
            if writer.segments:
                found.setdefault(writer.clock, []).append(writer)
        return found

    def _cut(self, steps: Mapping[str, Steps]) -> None:
        names = {id(writer): name for name, writer in self._writers.items()}
        for clock, writers in self._by_clock().items():
            settled = self.horizon(clock) - SETTLE_NS
            oldest = min((t for w in writers for t in w.unfinished.values()), default=settled)
            time = min(oldest, settled)
            bases = {w: _base(steps.get(names[id(w)]), time) for w in writers}
            workers = {w.number: min(time, base.scheduled) for w, base in bases.items()}
            for writer, base in bases.items():
                over = writer.has_ended and writer.last < time
                cut = _Cut(time, min(time, base.scheduled), workers)
                writer.cut(_Cut(NEVER, NEVER, {}) if over else cut, base)

    def _give_up(self) -> None:
        """Give up the requests that were received in the older half of the time that is held."""
        for clock, writers in self._by_clock().items():
            times = sorted(time for writer in writers for time in writer.unfinished.values())
            if not times:
                continue
            middle = (times[0] + self.horizon(clock)) // 2
            self.given_up += bisect_right(times, middle)
            for writer in writers:
                writer.unfinished = {n: time for n, time in writer.unfinished.items() if time > middle}


def _last(writers: Iterable[_Writer]) -> int:
    """Return up to when the records of the writers of a clock that is not ours are known."""
    writers = list(writers)
    return NEVER if all(w.has_ended for w in writers) else max(w.last for w in writers)


def _base(steps: Steps | None, time: int) -> _Base:
    """Return the last step that had ended by a time, or the first one where none had."""
    if steps is None or not steps.steps:
        return _Base(time, 0)
    base = steps.steps[max(steps.ending_after(time) - 1, 0)]
    return _Base(base.scheduled, base.number)


def _has_ended(segment: _Segment) -> bool:
    """Whether the process has ended that wrote a segment, which was its last one."""
    header = segment.header
    is_here = (header.clock, header.pid_namespace) == (clock_domain(), pid_namespace())
    if is_here and is_gone(header):
        return True
    # A process that stopped recording lets go of its segment, and lives on; but no reboot is survived.
    try:
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return not is_here
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stopped = parse_header(segment.path, os.read(descriptor, HEADER_BYTES)).stop
        return not stopped or _is_of_another_boot(header)
    except (OSError, DataError):
        return False
    finally:
        os.close(descriptor)


def _is_of_another_boot(header: SegmentHeader) -> bool:
    boot, is_known, _ = header.clock.partition("/")
    return bool(is_known) and boot != clock_domain().partition("/")[0]
