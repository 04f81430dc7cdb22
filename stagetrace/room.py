"""Room in a spool folder: the oldest segments that nobody writes any more are removed first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stagetrace.errors import DataError
from stagetrace.segment import HEADER_BYTES, NEW_SUFFIX, SEGMENT_BYTES, SUFFIX, parse_header

SPOOL_BYTES: Final = 1 << 30
"""A spool folder takes no more than this, unless it is told otherwise."""

SPOOL_BYTES_MIN: Final = 1 << 20

_SEGMENTS_MIN: Final = 16
_PAGE: Final = 4096


class Room(NamedTuple):
    """What was done to make room.

    Attributes:
        fits: Whether there is room now.
        segments: Segments that were removed, now or before for the sake of one that was removed now.
        size: Their bytes.
    """

    fits: bool
    segments: int = 0
    size: int = 0


class _File(NamedTuple):
    written_ns: int
    name: str
    size: int

    @property
    def process(self) -> tuple[str, ...]:
        return tuple(self.name.split("-")[-3:-1])

    @property
    def sequence(self) -> tuple[int, str]:
        number = self.name.rpartition("-")[2].partition(".")[0]
        return len(number), number


def segment_bytes(spool_bytes: int) -> int:
    """Return the size of a segment in a folder of limited size: it has room for several of each process."""
    return min(SEGMENT_BYTES, spool_bytes // _SEGMENTS_MIN // _PAGE * _PAGE)


def make_room(folder: Path, needed: int, limit: int) -> Room:
    """Remove the oldest segments until ``needed`` more bytes are within ``limit``.

    A segment may go if its process has opened a later one, or if nobody holds
    its lock: its process has ended or has stopped recording.

    Raises:
        OSError: The folder cannot be listed.
    """
    files = sorted(_files(folder))
    surplus = sum(file.size for file in files) + needed - limit
    latest = {file.process: file.name for file in sorted(files, key=lambda file: file.sequence)}
    segments = size = 0
    for file in files:
        if surplus <= 0:
            break
        gone = _remove(folder / file.name, file.size, unless_open=latest[file.process] == file.name)
        if gone is not None:
            surplus -= file.size
            segments += gone.segments
            size += gone.size
    return Room(surplus <= 0, segments, size)


def _files(folder: Path) -> Iterator[_File]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, NEW_SUFFIX)):
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # another process has just removed it
                if found.st_size:  # else it is just being made
                    yield _File(found.st_mtime_ns, entry.name, found.st_size)


def _remove(path: Path, size: int, *, unless_open: bool) -> Room | None:
    """Remove a segment; None when it is open or cannot be removed.

    What it had to tell of segments that were removed for it is taken over.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return Room(fits=True)  # another process has just removed it
    except OSError:
        return None
    try:
        if unless_open:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        segments, removed = _removed_for(path, descriptor)
        path.unlink()
    except FileNotFoundError:
        return Room(fits=True)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return Room(fits=True, segments=1 + segments, size=size + removed)


def _removed_for(path: Path, descriptor: int) -> tuple[int, int]:
    try:
        header = parse_header(path, os.read(descriptor, HEADER_BYTES))
    except DataError:
        return 0, 0
    return header.removed_segments, header.removed_bytes
