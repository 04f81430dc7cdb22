"""How long a piece of work takes: by the host's clock, or by the device's.

On a device the host only launches the work, and the device may get to it much
later.  Two CUDA events around it, on the stream that it runs on, tell how long the
device took.  Nothing here waits for the device: events are asked whether they are
complete at later steps.  Only the difference of a close pair is used, because
``elapsed_time`` is a 32-bit number of milliseconds, and against an old event it
would be off by more than a microsecond after 17 seconds.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

PENDING_MAX: Final = 64
"""Pairs of events that wait for the device; further work is not timed until one is complete."""

Timing = tuple[int, int, int]
"""The two numbers that the work was given, and nanoseconds that the device took for it."""


class Event(Protocol):
    """A CUDA event that takes the time."""

    def record(self) -> None:
        """Let the device note the time when it gets here, on the current stream."""

    def query(self) -> bool:
        """Tell whether the device has got there."""

    def elapsed_time(self, end_event: Event, /) -> float:
        """Return milliseconds until another event."""


class Timer(Protocol):
    """Takes the time of pieces of work.

    Attributes:
        deferred: The host only launches the work, so that its own clock says nothing.
    """

    deferred: bool

    def begin(self) -> Event | None:
        """Note the begin; what is returned goes to :meth:`end`."""

    def end(self, began: Event | None, owner: int, number: int) -> None:
        """Note the end; the two numbers tell what was timed, as an engine and its step do."""

    def finished(self) -> Iterable[Timing]:
        """Return what has become known since the last call, without waiting for the device."""


class HostTimer:
    """The work is done in the host's own time: the records around it say all."""

    deferred = False

    def begin(self) -> None:
        """Nothing has to be noted."""

    def end(self, began: Event | None, owner: int, number: int) -> None:
        """Nothing has to be noted."""

    def finished(self) -> Iterable[Timing]:
        """Nothing comes later."""
        return ()


class Untimed(HostTimer):
    """A device without a clock that is known here: how long the work took stays unknown."""

    deferred = True


class CudaTimer:
    """Two events around the work; they are read when the device has passed both.

    Args:
        cuda: The module ``torch.cuda``.
    """

    deferred = True

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._pending: deque[tuple[int, int, Event, Event]] = deque()
        self._spare: list[Event] = []

    def begin(self) -> Event | None:
        """Record an event, unless too many wait for the device or a graph is captured."""
        return self._record() if len(self._pending) < PENDING_MAX else None

    def end(self, began: Event | None, owner: int, number: int) -> None:
        """Record the second event of a pair."""
        ended = None if began is None else self._record()
        if began is not None and ended is not None:
            self._pending.append((owner, number, began, ended))

    def finished(self) -> Iterable[Timing]:
        """Return the pairs that the device has passed; none while a graph is captured."""
        # Asking an event in the middle of a capture would break the capture.
        if not self._pending or self._cuda.is_current_stream_capturing():
            return ()
        return self._read()

    def _record(self) -> Event | None:
        if self._cuda.is_current_stream_capturing():
            return None
        event: Event = self._spare.pop() if self._spare else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> Iterator[Timing]:
        while self._pending:
            # Taken out first: a pair that cannot be read is not tried again.
            owner, number, began, ended = pair = self._pending.popleft()
            if not ended.query():
                self._pending.appendleft(pair)
                return
            took = round(began.elapsed_time(ended) * 1e6)
            self._spare += (began, ended)
            yield owner, number, took


def timer_of(host: Any) -> Timer:
    """Choose the timer by the device that a model runner, or a tensor, is on."""
    torch = sys.modules.get("torch")
    device = getattr(getattr(host, "device", None), "type", None)
    if device is None:
        # Asked only of a torch that is loaded and in use: asking must not start the device.
        on_cuda = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
        device = "cuda" if on_cuda else "cpu"
    if device == "cuda" and torch is not None:
        return CudaTimer(torch.cuda)
    return HostTimer() if device == "cpu" else Untimed()
