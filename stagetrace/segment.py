"""Segment files: pre-allocated, memory-mapped, readable at any time.

A segment is one page of header and then records.  The file is allocated whole
before it is mapped, so that a full disk is an error at opening and not a
``SIGBUS`` in the host.  The page cache belongs to the kernel: whatever a
process wrote before ``kill -9`` is there.  A writer holds the file's lock as
long as it has the segment mapped, so that others can tell an open segment from
one that was left behind, in whatever container its writer was.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Self

from stagetrace._version import __version__
from stagetrace.clock import ClockPair, clock_domain, pid_namespace, read_pair
from stagetrace.errors import DataError
from stagetrace.records import DEFINE, MAGIC, RECORD, RECORD_BYTES, RecordKind, StopReason

FORMAT: Final = b"STGTRC02"
SUFFIX: Final = ".stagetrace"
NEW_SUFFIX: Final = SUFFIX + ".new"
"""Of a segment that is being made: it may hold nothing yet, and no reader looks at it."""

HEADER_BYTES: Final = 4096
SEGMENT_BYTES: Final = 4 * 1024 * 1024
"""131,000 records: about ten minutes of a busy engine."""

_LATEST_NS: Final = 1 << 61
_FIXED: Final = struct.Struct("<8sIII")
_COUNTERS: Final = struct.Struct("<II")
_REMOVED: Final = struct.Struct("<IQ")
_STOP: Final = struct.Struct("<IQ")
_COUNTERS_OFFSET: Final = _FIXED.size
_REMOVED_OFFSET: Final = _COUNTERS_OFFSET + _COUNTERS.size
_GAP_OFFSET: Final = _REMOVED_OFFSET + _REMOVED.size
_STOP_OFFSET: Final = _GAP_OFFSET + _STOP.size
_JSON_OFFSET: Final = _STOP_OFFSET + _STOP.size
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})

Record = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Who wrote a segment, and when.

    Attributes:
        process: Random name of the writing process, the same in all its segments.
        number: 32-bit number of the process, by which other processes' records refer to it.
        sequence: 0 for the first segment of the process.
        pid: Process id, in its namespace.
        pid_namespace: Name of that namespace.
        role: ``api``, ``engine``, ``worker`` or ``process``, from the first record.
        host: Host name.
        clock: Name of the monotonic clock (:func:`stagetrace.clock.clock_domain`).
        pair: Both clocks when the segment was opened.
        version: Version of stagetrace that wrote it.
        dropped: Records lost so far in this process.
        faults: Internal faults so far in this process.
        removed_segments: Segments, of any process, that were removed to make room for this one,
            and what those had to tell of others.
        removed_bytes: Their bytes.
        gap: Why nothing was recorded right before the segment was opened.
        gap_begin: Since when, on the monotonic clock.
        stop: Why recording stopped in it.
        stopped_at: When, on the monotonic clock.
    """

    process: str
    number: int
    sequence: int
    pid: int
    pid_namespace: str
    role: str
    host: str
    clock: str
    pair: ClockPair
    version: str
    dropped: int = 0
    faults: int = 0
    removed_segments: int = 0
    removed_bytes: int = 0
    gap: StopReason = StopReason.NONE
    gap_begin: int = 0
    stop: StopReason = StopReason.NONE
    stopped_at: int = 0


class Segment:
    """A segment that is being written.

    ``offsets`` yields the place of the next record and ends when the segment
    is full; taking the next one is a single step of the interpreter, so
    threads share a segment without a lock.
    """

    __slots__ = ("interned", "memory", "offsets", "path")

    def __init__(self, path: Path, memory: mmap.mmap | bytearray, size: int) -> None:
        self.path = path
        self.memory = memory
        self.offsets: Iterator[int] = iter(range(HEADER_BYTES, size - RECORD_BYTES + 1, RECORD_BYTES))
        self.interned: dict[str, int] = {}

    @classmethod
    def closed(cls) -> Self:
        """Return a segment with no room, from which a writer starts."""
        return cls(Path(), bytearray(HEADER_BYTES), 0)

    @classmethod
    def sink(cls) -> Self:
        """Return a segment that takes every record and keeps none."""
        sink = cls(Path(), bytearray(HEADER_BYTES + RECORD_BYTES), 0)
        sink.offsets = repeat(HEADER_BYTES)
        return sink

    @classmethod
    def create(cls, folder: Path, header: SegmentHeader, size: int = SEGMENT_BYTES) -> Self:
        """Allocate and map a new segment file in ``folder``.

        Raises:
            OSError: The folder or the file cannot be made, or there is no room.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{header.role}-{header.pid}-{header.process}-{header.sequence:06d}{SUFFIX}"
        # Readers must not meet a segment without its header.
        new = path.with_suffix(NEW_SUFFIX)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
            os.posix_fallocate(descriptor, 0, size)
            # Written and not mapped: touched first through a map, an allocated file stalls for
            # 12 ms on ext4, where its first large page is made.
            os.pwrite(descriptor, _packed(header), 0)
            # It holds the file open, and with it the lock, until it is let go or the process dies.
            memory = mmap.mmap(descriptor, size)
            new.rename(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls(path, memory, size)

    def count(self, dropped: int, faults: int) -> None:
        """Store the process's counters of lost records and internal faults."""
        _COUNTERS.pack_into(self.memory, _COUNTERS_OFFSET, dropped, faults)

    @property
    def removed(self) -> tuple[int, int]:
        """What is stored of removed segments: their number and their bytes."""
        segments, size = _REMOVED.unpack_from(self.memory, _REMOVED_OFFSET)
        return segments, size

    def note_removed(self, segments: int, size: int) -> None:
        """Add to what is stored of removed segments."""
        known = self.removed
        _REMOVED.pack_into(self.memory, _REMOVED_OFFSET, known[0] + segments, known[1] + size)

    def note_gap(self, reason: StopReason, begin: int) -> None:
        """Store that nothing was recorded before the segment was opened."""
        _STOP.pack_into(self.memory, _GAP_OFFSET, reason, begin)

    def note_stop(self, reason: StopReason, at: int) -> None:
        """Store that recording stopped, in case that it does not go on."""
        _STOP.pack_into(self.memory, _STOP_OFFSET, reason, at)


def _lock(descriptor: int) -> None:
    """Lock a new file against removal.

    Raises:
        OSError: Another process has taken it for one that was left behind.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError(errno.ENOENT, "removed as soon as it was made")


def new_header(process: str, number: int, sequence: int, role: str) -> SegmentHeader:
    """Describe the calling process, now."""
    return SegmentHeader(
        process=process,
        number=number,
        sequence=sequence,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        role=role,
        host=socket.gethostname(),
        clock=clock_domain(),
        pair=read_pair(),
        version=__version__,
    )


def new_process_name() -> tuple[str, int]:
    """Return a random name and a random 32-bit number for a process."""
    return secrets.token_hex(6), secrets.randbelow(0xFFFFFFFE) + 1


def _packed(header: SegmentHeader) -> bytes:
    described = json.dumps(
        {
            "process": header.process,
            "number": header.number,
            "sequence": header.sequence,
            "pid": header.pid,
            "pid_namespace": header.pid_namespace,
            "role": header.role,
            "host": header.host[:255],
            "clock": header.clock,
            "unix_ns": header.pair.unix_ns,
            "monotonic_ns": header.pair.monotonic_ns,
            "version": header.version,
        }
    ).encode()
    packed = bytearray(HEADER_BYTES)
    packed[_JSON_OFFSET : _JSON_OFFSET + len(described)] = described
    _FIXED.pack_into(packed, 0, FORMAT, HEADER_BYTES, RECORD_BYTES, len(described))
    return bytes(packed)


@dataclass(frozen=True, slots=True)
class SegmentData:
    """A segment as read.

    Attributes:
        header: Who wrote it.
        body: The records, whole and in the order of writing.
        torn: Slots before the last record that hold no whole record.
    """

    header: SegmentHeader
    body: bytes = field(repr=False)
    torn: int

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records as tuples, see :mod:`stagetrace.records`."""
        return RECORD.iter_unpack(self.body)

    def texts(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Iterate over the parts of defined strings: number, part, length, bytes."""
        for record in DEFINE.iter_unpack(self.body):
            if record[4] == RecordKind.DEFINE:
                yield record[:4]


def read_segment(path: Path) -> SegmentData:
    """Read a segment up to its last whole record; it may still be written to.

    Raises:
        DataError: The file is no segment, or of another format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    header = parse_header(path, content)
    body = content[HEADER_BYTES:].rstrip(b"\0")
    body += b"\0" * (-len(body) % RECORD_BYTES)
    kept, torn = _whole_records(body)
    return SegmentData(header=header, body=kept, torn=torn)


def _whole_records(body: bytes) -> tuple[bytes, int]:
    magics = memoryview(body).cast("H")[15::16].tolist() if body else []
    torn = len(magics) - magics.count(MAGIC)
    if not torn:
        return body, 0
    whole = (
        body[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        for index, magic in enumerate(magics)
        if magic == MAGIC
    )
    return b"".join(whole), torn


def parse_header(path: Path, content: bytes) -> SegmentHeader:
    """Read the header at the begin of a segment's content.

    Raises:
        DataError: It is no segment's, or of another format.
    """
    if len(content) < HEADER_BYTES or content[:6] != FORMAT[:6]:
        raise DataError(f"{path}: no segment of stagetrace")
    magic, header_bytes, record_bytes, length = _FIXED.unpack_from(content)
    if (magic, header_bytes, record_bytes) != (FORMAT, HEADER_BYTES, RECORD_BYTES):
        raise DataError(f"{path}: segment of another format", hint="read it with the version that wrote it")
    try:
        facts: dict[str, Any] = json.loads(content[_JSON_OFFSET : _JSON_OFFSET + length])
        pair = ClockPair(unix_ns=int(facts["unix_ns"]), monotonic_ns=int(facts["monotonic_ns"]))
        dropped, faults = _COUNTERS.unpack_from(content, _COUNTERS_OFFSET)
        removed_segments, removed_bytes = _REMOVED.unpack_from(content, _REMOVED_OFFSET)
        gap, gap_begin = _STOP.unpack_from(content, _GAP_OFFSET)
        stop, stopped_at = _STOP.unpack_from(content, _STOP_OFFSET)
        times = (pair.unix_ns, pair.monotonic_ns, gap_begin, stopped_at)
        if not all(0 <= time < _LATEST_NS for time in times):
            raise ValueError(times)  # noqa: TRY301 - told like all the other damage
        return SegmentHeader(
            process=str(facts["process"]),
            number=int(facts["number"]),
            sequence=int(facts["sequence"]),
            pid=int(facts["pid"]),
            pid_namespace=str(facts["pid_namespace"]),
            role=str(facts["role"]),
            host=str(facts["host"]),
            clock=str(facts["clock"]),
            pair=pair,
            version=str(facts["version"]),
            dropped=dropped,
            faults=faults,
            removed_segments=removed_segments,
            removed_bytes=removed_bytes,
            gap=StopReason(gap),
            gap_begin=gap_begin,
            stop=StopReason(stop),
            stopped_at=stopped_at,
        )
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path}: broken segment header") from error
