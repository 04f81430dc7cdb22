"""Stretches of time that a process did not record, or of which the records are gone."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final, NamedTuple

from stagetrace.records import StopReason
from stagetrace.segment import SegmentHeader

NEVER: Final = 1 << 62
"""End of a gap after which nothing is recorded."""


class Cut(StrEnum):
    """Why a request is set aside: not all of it is there, or it cannot have been so."""

    REMOVED = "begun_before_the_oldest_segment"
    MISSING = "in_flight_over_a_missing_segment"
    LOST = "in_flight_while_records_were_lost"
    OFF = "in_flight_while_recording_was_off"
    STOPPED = "in_flight_when_recording_stopped_itself"
    IMPOSSIBLE = "with_times_before_its_receipt"


_CUTS: Final = {
    StopReason.LOST: Cut.LOST,
    StopReason.OFF: Cut.OFF,
    StopReason.FAULTS: Cut.STOPPED,
    StopReason.COST: Cut.STOPPED,
}


class Gap(NamedTuple):
    """A stretch of time without records; nanoseconds of the monotonic clock.

    Attributes:
        begin: Since when; 0 before the oldest segment.
        end: When the next segment was opened.
        cut: What becomes of requests that were in flight.
        reason: Why the process did not record; NONE when it did, and its segments are gone.
    """

    begin: int
    end: int
    cut: Cut
    reason: StopReason = StopReason.NONE


def gap_before(header: SegmentHeader, previous: SegmentHeader | None, last: int) -> Gap | None:
    """Return the gap before a segment, None when it goes on where the previous one ended.

    Args:
        header: The segment's.
        previous: That of the process's segment before it among those that are there.
        last: Time of the last record in that one.
    """
    opened = header.pair.monotonic_ns
    if previous is None and header.sequence:
        return Gap(0, opened, Cut.REMOVED)
    if previous is not None and header.sequence != previous.sequence + 1:
        return Gap(last, opened, Cut.MISSING)
    if header.gap:
        return Gap(header.gap_begin, opened, _CUTS[header.gap], header.gap)
    return None


def gap_behind(header: SegmentHeader) -> Gap | None:
    """Return the gap behind the last segment of a process, None when it did not stop recording."""
    return Gap(header.stopped_at, NEVER, _CUTS[header.stop], header.stop) if header.stop else None


def cut_between(gaps: Iterable[Gap], begin: int, end: int) -> Cut | None:
    """Return what becomes of a request by the first gap that touches its time, None when none does."""
    return next((gap.cut for gap in gaps if begin <= gap.end and end >= gap.begin), None)
