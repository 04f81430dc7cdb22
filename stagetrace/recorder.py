"""The recorder: one per process, nothing to start, nothing to flush.

A record is packed straight into the mapped segment: no thread, no buffer, and no
lock but while a new segment is opened.  The first one is opened on the first
record, and again after a fork, so that a process which never serves leaves no
file.
"""

from __future__ import annotations

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
    NONE,
    RECORD,
    TEXT_MAX_BYTES,
    TEXT_PART_BYTES,
    RecordKind,
)
from stagetrace.segment import SEGMENT_BYTES, Segment, new_header, new_process_name

FAULT_LIMIT: Final = 1000
"""After so many internal faults a process stops recording."""

_LOCK_S: Final = 0.05
_RETRY_NS: Final = 1_000_000_000
_INTERNED_MAX: Final = 4096

_pack = RECORD.pack_into
_pack_define = DEFINE.pack_into
_DEFINE_KIND = int(RecordKind.DEFINE)


class Recorder:
    """Writes records of one process into a spool folder.

    No method raises: what cannot be written is counted.  Records may come from
    any thread (the interpreter's lock makes taking a slot atomic).

    Args:
        folder: Spool folder; made with mode 0700 on the first record.
        segment_bytes: Size of a segment file.

    Attributes:
        role: What the process does; None leaves it to the kind of the first record.
        dropped: Records lost.
        faults: Internal faults.
        process: Random name of the process.
        number: Random number of the process, by which records of other processes refer to it.
    """

    role: str | None = None

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
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
        self._announced: dict[tuple[int, int, str], None] = {}
        self.dropped = 0
        self.faults = 0
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
        """Define a string and return its number; for strings that occur once."""
        number = next(self._numbers)
        content = text.encode("utf-8", "replace")[:TEXT_MAX_BYTES]
        for part, begin in enumerate(range(0, max(len(content), 1), TEXT_PART_BYTES)):
            piece = content[begin : begin + TEXT_PART_BYTES]
            segment = self._segment
            offset = next(segment.offsets, 0)
            if not offset:
                segment, offset = self._slot_behind(segment, _DEFINE_KIND)
            if not offset:
                self._drop()
                return NONE
            _pack_define(segment.memory, offset, number, part, len(piece), piece, _DEFINE_KIND, MAGIC)
        return number

    def intern(self, text: str) -> int:
        """Return the number of a string that occurs often; defined once a segment."""
        number = self._segment.interned.get(text)
        if number is None:
            number = self.define(text)
            if number != NONE and len(self._segment.interned) < _INTERNED_MAX:
                self._segment.interned[text] = number
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
        """Count an internal fault; after many of them recording stops."""
        self.faults += 1
        self._segment.count(self.dropped, self.faults)
        if self.faults >= FAULT_LIMIT:
            self._segment = Segment.closed()

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
        self._segment.count(self.dropped, self.faults)

    def _next_segment(self, full: Segment, kind: int) -> Segment:
        """Open the next segment, unless another thread just did or opening failed just now."""
        # Never for long: a host's thread may be here, even twice, when a collected object records.
        if not self._lock.acquire(timeout=_LOCK_S):
            return self._segment
        try:
            now = monotonic_ns()
            if self._segment is not full or now < self._retry_at or self.faults >= FAULT_LIMIT:
                return self._segment
            try:
                role = self.role or RecordKind(kind).role
                header = new_header(self.process, self.number, self._sequence, role)
                segment = Segment.create(self._folder, header, self._segment_bytes)
            except (OSError, ValueError):
                self._retry_at = now + _RETRY_NS
                return self._segment
            self._sequence += 1
            segment.count(self.dropped, self.faults)
            self._segment = segment
        finally:
            self._lock.release()
        for announcement in list(self._announced):
            self._write_announcement(*announcement)
        return segment
