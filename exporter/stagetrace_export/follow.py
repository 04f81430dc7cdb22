"""Following a spool: what is closed is exported, until told to stop or until nobody writes any more."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from stagetrace.errors import DataError, UsageError
from stagetrace.process_records import has_died
from stagetrace_export.closed import Closed, ClosedRequests

LOCK_FILE: Final = "export.lock"
"""Name, in the spool folder, of the file that an exporter of it holds locked."""

INTERVAL_S: Final = 5.0
DEADLINE_S: Final = 10.0
"""So long a last export may be tried when the exporter is told to stop."""

ABANDON_S: Final = 300.0
"""So long a receiver that takes nothing is tried once the server has ended that started the exporter."""

SHARE: Final = 0.05
"""Reading takes no more than this share of a core: the interval becomes longer when it would."""

_DELAYS_S: Final = (1.0, 60.0)
_COUNTED: Final = {
    "partial": "before all of them was recorded",
    "set_aside": "set aside, because something of them is gone",
    "removed": "removed from the spool before they were exported",
    "given_up": "given up, in flight for too long",
    "open": "without an end",
}


class Followed(NamedTuple):
    """How following ended.

    Attributes:
        counts: What became of requests, see :meth:`stagetrace_export.closed.ClosedRequests.commit`.
        is_complete: All that was closed has been exported.
    """

    counts: Counter[str]
    is_complete: bool


@contextmanager
def sole_exporter(spool: Path) -> Iterator[None]:
    """Hold the lock of a spool's exporter; the folder is made if need be.

    Raises:
        UsageError: Another process exports the spool.
        DataError: The lock cannot be made.
    """
    path = spool / LOCK_FILE
    try:
        spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", hint="an exporter marks the spool as its own") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except BlockingIOError:
            hint = "one exporter for each spool; stop that one first"
            raise UsageError(f"{spool}: process {_pid(descriptor)} exports it already", hint=hint) from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}", hint="the folder must be on a local disk") from error
        yield
    finally:
        os.close(descriptor)


def exporter_of(spool: Path) -> str | None:
    """Return the id of the process that exports a spool, as it is written there; None when none does."""
    try:
        descriptor = os.open(spool / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _pid(lock: int) -> str:
    return os.read(lock, 20).decode("ascii", "replace").strip() or "?"


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Have SIGTERM and SIGINT set an event instead of ending the process."""
    stop = threading.Event()
    known = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)


def follow(
    source: ClosedRequests,
    export: Callable[[Closed], bool],
    *,
    stop: threading.Event,
    interval_s: float = INTERVAL_S,
    until_ended: bool = False,
    starter: int | None = None,
    deadline_s: float = DEADLINE_S,
    abandon_s: float = ABANDON_S,
    delays_s: tuple[float, float] = _DELAYS_S,
) -> Followed:
    """Export what is closed, again and again.

    While an export fails, it is tried again and nothing else is read: the spool keeps the rest.

    Args:
        source: The spool.
        export: Exports requests, and whatever else has been read; False when the receiver did not take it.
        stop: When it is set, what is closed by then is exported, and that is all.
        interval_s: Seconds between polls, at least.
        until_ended: End by itself when every process that wrote has ended and all is exported.
        starter: Id of a process that may still begin to write as long as it lives; without one,
            ``until_ended`` waits for a first process.
        deadline_s: For how long exporting is tried when it is to stop.
        abandon_s: For how long it is tried, with ``until_ended``, once the starter has died.
        delays_s: Seconds until a failed export is tried again: the first time, and at most.
    """
    courier = _Courier(export, stop, deadline_s, delays_s)
    if until_ended and starter is not None:
        courier.abandon(starter, abandon_s)
    told: set[str] = set()
    while True:
        stopping = stop.is_set()
        begun = time.process_time()
        # Whoever has died by now has written nothing that is not read.
        may_begin = starter is not None and not has_died(starter)
        closed = source.poll()
        more = closed.more
        over = until_ended and not (more or may_begin) and _is_over(source, starter)
        read = time.process_time() - begun
        if not courier.deliver(closed):
            return _end(source, is_complete=False)
        _commit(source, told)
        if (over or stopping) and (not more or courier.is_late()):
            return _end(source, is_complete=not more)
        if not more:
            stop.wait(max(interval_s, read / SHARE))


def _is_over(source: ClosedRequests, starter: int | None) -> bool:
    return not source.is_written() and (starter is not None or not source.is_empty())


class _Courier:
    """Exports, and tries again until it is to stop, or nobody is left who would set the receiver right."""

    def __init__(
        self,
        export: Callable[[Closed], bool],
        stop: threading.Event,
        deadline_s: float,
        delays_s: tuple[float, float],
    ) -> None:
        self._export = export
        self._stop = stop
        self._deadline_s = deadline_s
        self._delays_s = delays_s
        self._stopped_at: float | None = None
        self._starter: tuple[int, float] | None = None
        self._orphaned_at: float | None = None

    def abandon(self, starter: int, abandon_s: float) -> None:
        """Try no longer than so many seconds without success once a process has died."""
        self._starter = starter, abandon_s

    def is_late(self) -> bool:
        """Whether it was to stop, and the deadline is over."""
        if self._stop.is_set() and self._stopped_at is None:
            self._stopped_at = time.monotonic()
        return self._stopped_at is not None and time.monotonic() - self._stopped_at > self._deadline_s

    def _is_abandoned(self) -> bool:
        if self._starter is None or not has_died(self._starter[0]):
            return False
        if self._orphaned_at is None:
            self._orphaned_at = time.monotonic()
        return time.monotonic() - self._orphaned_at > self._starter[1]

    def deliver(self, closed: Closed) -> bool:
        """Export what was read; False when it was not possible until the deadline."""
        begun, delay = time.monotonic(), self._delays_s[0]
        self._orphaned_at = None
        for attempts in range(1, sys.maxsize):
            if self._export(closed):
                if attempts > 1:
                    took = time.monotonic() - begun
                    say(f"the receiver answers again, after {attempts} attempts in {took:.0f} s")
                return True
            if attempts == 1:
                what = f"{len(closed.requests)} requests" if closed.requests else "the steps"
                say(f"the receiver did not take {what}; trying again until it does")
            if self._is_abandoned():
                say("the server has ended, and the receiver still takes nothing: giving up")
                break
            if self.is_late():
                break
            # With jitter: several exporters must not come back at the same moment.
            pause = delay * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            delay = min(2 * delay, self._delays_s[1])
            if self._stop.is_set():
                time.sleep(min(pause, self._delays_s[0]))
            else:
                self._stop.wait(pause)
        return False


def _commit(source: ClosedRequests, told: set[str]) -> None:
    removed = source.counts["removed"]
    try:
        source.commit()
    except OSError as error:
        what = f"the position cannot be stored ({error.strerror}): a restart would export requests again"
        if what not in told:
            say(what)
        told.add(what)
    removed = source.counts["removed"] - removed
    if removed:
        say(f"{removed} requests were removed from the spool before they were exported")


def _end(source: ClosedRequests, *, is_complete: bool) -> Followed:
    counts = source.counts
    told = [f"{counts[name]} {what}" for name, what in _COUNTED.items() if counts[name]]
    left = "" if is_complete else "; what is not exported stays in the spool"
    say(", ".join([f"{counts['exported']} requests exported", *told]) + left)
    return Followed(Counter(counts), is_complete)


def say(what: str) -> None:
    """Tell a user something, in one line."""
    sys.stderr.write(f"stagetrace: {what}\n")
    sys.stderr.flush()
