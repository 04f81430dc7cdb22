"""How late the API server's event loop is: direct evidence that the loop itself is the queue."""

from __future__ import annotations

import asyncio
from typing import Final

from stagetrace.clock import monotonic_ns
from stagetrace.recorder import Recorder
from stagetrace.records import RecordKind

INTERVAL_NS: Final = 50_000_000
"""Between two looks at the clock; each wakes the loop, which takes 50 us on a small virtual machine."""

THRESHOLD_NS: Final = 1_000_000
"""Smaller lags are not recorded: event loops count time in milliseconds."""

IDLE_NS: Final = 1_000_000_000
"""So long after the last request the sampler stops: an idle server has no timer."""

_LOOP_LAG = int(RecordKind.LOOP_LAG)
_U32: Final = 0xFFFFFFFF


class LagSampler:
    """Samples the lag of the running event loop while requests are in flight.

    Every method is called on the loop's thread, and none of them raises.

    Args:
        recorder: Where lags are recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._in_flight = 0
        self._last_left = 0
        self._runs = False
        self._due = 0

    def enter(self) -> None:
        """A request has come."""
        self._in_flight += 1
        if not self._runs:
            self._wait()

    def leave(self) -> None:
        """A request has ended."""
        self._in_flight -= 1
        self._last_left = monotonic_ns()

    def _wait(self) -> None:
        try:
            self._recorder.look()
            asyncio.get_running_loop().call_later(INTERVAL_NS / 1e9, self._look)
            self._due = monotonic_ns() + INTERVAL_NS
            self._runs = True
        except Exception:
            self._runs = False
            self._recorder.fault()

    def _look(self) -> None:
        now = monotonic_ns()
        lag = now - self._due
        if lag > THRESHOLD_NS:
            self._recorder.record_at(self._due, _LOOP_LAG, 0, lag & _U32, lag >> 32)
        if self._in_flight or now - self._last_left < IDLE_NS:
            self._wait()
        else:
            self._runs = False
