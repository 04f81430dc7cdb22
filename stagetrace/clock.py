"""Clocks: one monotonic clock for everything on a host, and a wall clock beside it.

All processes of a host share ``CLOCK_MONOTONIC``, so their records are joined
on its raw value when the boot id and the time namespace agree.  The wall clock
serves for display and across hosts only.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

monotonic_ns = time.monotonic_ns

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class ClockPair:
    """The wall clock and the monotonic clock, read at the same instant.

    Attributes:
        unix_ns: Nanoseconds since the epoch.
        monotonic_ns: Nanoseconds of ``CLOCK_MONOTONIC``.
    """

    unix_ns: int
    monotonic_ns: int

    def unix(self, monotonic: int) -> int:
        """Return the wall clock at a value of the monotonic clock, both in nanoseconds."""
        return self.unix_ns + monotonic - self.monotonic_ns


def read_pair() -> ClockPair:
    """Read both clocks; the narrowest of five readings is taken."""
    readings = []
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        readings.append((after - before, wall, (before + after) // 2))
    _, wall, middle = min(readings)
    return ClockPair(unix_ns=wall, monotonic_ns=middle)


def pid_namespace() -> str:
    """Name the namespace of this process's id; the id means nothing outside it."""
    try:
        return _PID_NAMESPACE.readlink().name
    except OSError:
        return "pid:none"


def clock_domain() -> str:
    """Name the monotonic clock: processes with equal names share it.

    Returns:
        The kernel's boot id and the time namespace, or the process id where
        the kernel tells neither, so that unknown clocks are never joined.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"pid:{os.getpid()}"
    try:
        namespace = _TIME_NAMESPACE.readlink().name
    except OSError:
        namespace = "time:none"
    return f"{boot}/{namespace}"
