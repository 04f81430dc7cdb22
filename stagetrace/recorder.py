"""The recorder: one per process, nothing to start, nothing to flush.

A record is packed straight into the mapped segment: no thread, no buffer, and no
lock but while a new segment is opened.  The first one is opened on the first
record, and again after a fork, so that a process which never serves leaves no
file.  A process that is not to record writes into a segment that keeps nothing,
so that nothing has to be asked when a record is made.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import weakref
from itertools import count
from pathlib import Path
from typing import Final

from stagetrace.clock import monotonic_ns
from stagetrace.records import (
    DEFINE,
    MAGIC,
    RECORD,
    TEXT_MAX_BYTES,
    TEXT_PART_BYTES,
    RecordKind,
    StopReason,
)
from stagetrace.room import SPOOL_BYTES, make_room
from stagetrace.segment import SEGMENT_BYTES, Segment, new_header, new_process_name

OFF_FILE: Final = "OFF"
"""A file of this name in the spool folder switches recording off, until it is removed."""

LOOK_NS: Final = 1_000_000_000
"""So often at most it is looked for."""

FAULT_LIMIT: Final = 100
FAULT_WINDOW_NS: Final = 10_000_000_000
"""After so many internal faults within this time a process stops recording for good."""

COST_LIMIT: Final = 0.05
"""A process whose busy thread spends a larger share of its time on recording stops it for good."""

_NEVER_NS: Final = 1 << 62
_U32: Final = 0xFFFFFFFF
_LOCK_S: Final = 0.05
_RETRY_NS: Final = 1_000_000_000
_INTERNED_MAX: Final = 4096

_pack = RECORD.pack_into
_pack_define = DEFINE.pack_into
_DEFINE_KIND = int(RecordKind.DEFINE)
_OWN_COST_KIND = int(RecordKind.OWN_COST)


class Recorder:
    """Writes records of one process into a spool folder.

    No method raises: what cannot be written is counted.  Records may come from
    any thread (the interpreter's lock makes taking a slot atomic).

    Args:
        folder: Spool folder; made with mode 0700 on the first record.
        segment_bytes: Size of a segment file.
        spool_bytes: Size that the folder may reach before its oldest segments are removed.

    Attributes:
        role: What the process does; None leaves it to the kind of the first record.
        dropped: Records lost.
        faults: Internal faults.
        stopped: Nothing is recorded, so nothing need be found out.
        epoch: Changes whenever what is recorded by change must be recorded again: a segment was
            opened, or recording goes on after it was off.
        look_at: When :meth:`look` is due, on the monotonic clock.
        process: Random name of the process.
        number: Random number of the process, by which records of other processes refer to it.
    """

    role: str | None = None

    def __init__(
        self, folder: Path, segment_bytes: int = SEGMENT_BYTES, spool_bytes: int = SPOOL_BYTES
    ) -> None:
        self._folder = folder
        self._off_path = os.path.join(folder, OFF_FILE)  # noqa: PTH118 - asked as a plain string
        self._segment_bytes = segment_bytes
        self._spool_bytes = spool_bytes
        self._reset()
        mine = weakref.WeakMethod(self._reset)

        def reset_in_child() -> None:
            reset = mine()
            if reset is not None:
                reset()

        os.register_at_fork(after_in_child=reset_in_child)

    def _reset(self) -> None:
        # In a forked child the mapping is the parent's: it must be let go before the first record.
        self._segment = Segment.closed()
        self._lock = threading.Lock()
        self._sequence = 0
        self._retry_at = 0
        self._numbers = count(1)
        self._role: str | None = None
        self._announced: dict[tuple[int, int, str], None] = {}
        self._recent_faults = 0
        self._faults_since = 0
        self._gap = (StopReason.NONE, 0)
        self.dropped = 0
        self.faults = 0
        self.stopped = False
        self.epoch = 0
        self.look_at = 0
        self.process, self.number = new_process_name()

    def record(self, kind: int, key: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        """Write a record with the current time; see :mod:`stagetrace.records` for the fields."""
        segment = self._segment
        offset = next(segment.offsets, 0)
        if offset:
            try:
                _pack(segment.memory, offset, monotonic_ns(), key, a, b, c, d, kind, MAGIC)
            except (struct.error, TypeError):
                self.fault()
        else:
            self._record_in_next(segment, monotonic_ns(), kind, key, a, b, c, d)

    def record_at(
        self, time_ns: int, kind: int, key: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
    ) -> None:
        """Write a record with a time that was taken before (monotonic clock, nanoseconds)."""
        segment = self._segment
        offset = next(segment.offsets, 0)
        if offset:
            try:
                _pack(segment.memory, offset, time_ns, key, a, b, c, d, kind, MAGIC)
            except (struct.error, TypeError):
                self.fault()
        else:
            self._record_in_next(segment, time_ns, kind, key, a, b, c, d)

    def define(self, text: str) -> int:
        """Define a string that occurs once, and return its number, also when it could not be written."""
        number = next(self._numbers)
        self._write_text(number, text)
        return number

    def _write_text(self, number: int, text: str) -> Segment | None:
        """Write the parts of a string, and return the segment that holds the last one."""
        segment = self._segment
        content = text[:TEXT_MAX_BYTES].encode("utf-8", "replace")[:TEXT_MAX_BYTES]
        for part, begin in enumerate(range(0, max(len(content), 1), TEXT_PART_BYTES)):
            piece = content[begin : begin + TEXT_PART_BYTES]
            segment = self._segment
            offset = next(segment.offsets, 0)
            if not offset:
                segment, offset = self._slot_behind(segment, _DEFINE_KIND)
            if not offset:
                self._drop()
                return None
            _pack_define(segment.memory, offset, number, part, len(piece), piece, _DEFINE_KIND, MAGIC)
        return segment

    def intern(self, text: str) -> int:
        """Return the number of a string that occurs often; defined once a segment."""
        text = text[:TEXT_MAX_BYTES]  # it is kept, and a client may have written it
        number = self._segment.interned.get(text)
        if number is None:
            number = next(self._numbers)
            segment = self._write_text(number, text)
            if segment is not None and len(segment.interned) < _INTERNED_MAX:
                segment.interned[text] = number
        return number

    def announce(self, kind: int, a: int, text: str) -> None:
        """Say something of this process as a whole; written at the head of every segment.

        It does not open a segment by itself, so that a process that never
        serves leaves no file.
        """
        if (kind, a, text) not in self._announced:
            self._announced[kind, a, text] = None
            if self._sequence:
                self._write_announcement(kind, a, text)

    def _write_announcement(self, kind: int, a: int, text: str) -> None:
        self.record(kind, 0, a, self.define(text))

    def fault(self) -> None:
        """Count an internal fault; after many within a short time recording stops for good."""
        now = monotonic_ns()
        if now - self._faults_since >= FAULT_WINDOW_NS:
            self._faults_since, self._recent_faults = now, 0
        self.faults += 1
        self._recent_faults += 1
        self._segment.count(self.dropped, self.faults)
        if self._recent_faults >= FAULT_LIMIT:
            self._blow(StopReason.FAULTS, now)

    def note_cost(self, steps: int, cost_ns: int, busy_ns: int) -> None:
        """Record what recording has cost the busy thread; above a limit recording stops for good.

        Args:
            steps: Steps since the last call.
            cost_ns: Time that recording took in them.
            busy_ns: Time in which the thread had steps to do, recording included.
        """
        self.record(_OWN_COST_KIND, 0, steps, cost_ns & _U32, cost_ns >> 32, min(busy_ns // 1000, _U32))
        if cost_ns > COST_LIMIT * busy_ns:
            self._blow(StopReason.COST, monotonic_ns())

    def look(self, now_ns: int | None = None) -> None:
        """Look whether recording is switched off, at most once a second.

        Args:
            now_ns: The monotonic clock, if the caller has read it.
        """
        now_ns = monotonic_ns() if now_ns is None else now_ns
        if now_ns < self.look_at or not self._lock.acquire(timeout=_LOCK_S):
            return
        try:
            if now_ns < self.look_at:
                return
            self.look_at = now_ns + LOOK_NS
            if not self._is_off():
                self._go_on()
            elif not self.stopped:
                self._stop(StopReason.OFF, now_ns)
        finally:
            self._lock.release()

    def _is_off(self) -> bool:
        return os.path.exists(self._off_path)  # noqa: PTH110 - half the time of a Path

    def _go_on(self) -> None:
        if self.stopped:
            self.stopped = False
            self.epoch += 1
            self._segment = Segment.closed()

    def _stop(self, reason: StopReason, now: int) -> None:
        self._segment.note_stop(reason, now)
        self._note_gap(reason, now)
        self.stopped = True
        self._segment = Segment.sink()

    def _blow(self, reason: StopReason, now: int) -> None:
        """Stop for good; if the lock is not to be had, the next fault tries again."""
        if not self._lock.acquire(timeout=_LOCK_S):
            return
        try:
            if self.look_at < _NEVER_NS:
                self._stop(reason, now)
                self.look_at = _NEVER_NS
        finally:
            self._lock.release()

    def _note_gap(self, reason: StopReason, now: int) -> None:
        if self._gap[0] is StopReason.NONE:
            self._gap = (reason, now)

    def _record_in_next(self, full: Segment, time_ns: int, kind: int, *fields: int) -> None:
        segment, offset = self._slot_behind(full, kind)
        if not offset:
            self._drop()
            return
        try:
            _pack(segment.memory, offset, time_ns, *fields, kind, MAGIC)
        except (struct.error, TypeError):
            self.fault()

    def _slot_behind(self, full: Segment, kind: int) -> tuple[Segment, int]:
        """Take a slot in the segments behind a full one; 0 when none can be opened."""
        while True:
            segment = self._next_segment(full, kind)
            offset = next(segment.offsets, 0)
            if offset or segment is full:
                return segment, offset
            full = segment

    def _drop(self) -> None:
        self.dropped += 1
        if self._gap[0] is StopReason.NONE:
            now = monotonic_ns()
            self._note_gap(StopReason.LOST, now)
            self._segment.note_stop(StopReason.LOST, now)
        self._segment.count(self.dropped, self.faults)

    def _next_segment(self, full: Segment, kind: int) -> Segment:
        """Open the next segment, unless another thread just did or opening failed just now."""
        # Never for long: a host's thread may be here, even twice, when a collected object records.
        if not self._lock.acquire(timeout=_LOCK_S):
            return self._segment
        try:
            now = monotonic_ns()
            if self._segment is not full or now < self._retry_at:
                return self._segment
            self.look_at = now + LOOK_NS
            if self._is_off():
                self._stop(StopReason.OFF, now)
                return self._segment
            try:
                segment = self._open(kind)
            except (OSError, ValueError):
                self._retry_at = now + _RETRY_NS
                return self._segment
            self._sequence += 1
            self.epoch += 1
            segment.count(self.dropped, self.faults)
            segment.note_gap(*self._gap)
            self._gap = (StopReason.NONE, 0)
            self._segment = segment
        finally:
            self._lock.release()
        for announcement in list(self._announced):
            self._write_announcement(*announcement)
        return segment

    def _open(self, kind: int) -> Segment:
        role = self.role or self._role or RecordKind(kind).role
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = make_room(self._folder, self._segment_bytes, self._spool_bytes)
        if not room.fits:
            self._segment.note_removed(room.segments, room.size)
            raise OSError(errno.EDQUOT, "every segment within the limit is open")
        header = new_header(self.process, self.number, self._sequence, role)
        segment = Segment.create(self._folder, header, self._segment_bytes)
        segment.note_removed(room.segments, room.size)
        if self._segment.path == Path():
            # What a segment that is no file had to tell is told by the first one that is.
            segment.note_removed(*self._segment.removed)
        if kind != _DEFINE_KIND:
            # A string may be the first record of a later segment, and says nothing of its process.
            self._role = role
        return segment
