"""What recording costs the thread that runs the steps, as the process itself measures it."""

from __future__ import annotations

from typing import Final

from stagetrace.recorder import Recorder

WINDOW_NS: Final = 10_000_000_000
"""So much time with steps makes one figure."""

IDLE_NS: Final = 1_000_000_000
"""No more than this of the time between two steps counts: in the rest there was nothing to do."""


class CostMeter:
    """Adds up what recording costs, and records the sum for each window of time with steps.

    It is an estimate from below: the time within the hook that records a step,
    not the time of calling it, nor that of the hooks that record requests.

    Args:
        recorder: Whose cost it is.
    """

    __slots__ = ("_busy", "_cost", "_last", "_recorder", "_step")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._cost = self._busy = self._last = self._step = 0

    def step(self, begin_ns: int, cost_ns: int, number: int) -> None:
        """Add what the hook of a step took.

        Args:
            begin_ns: Begin of the step, on the monotonic clock.
            cost_ns: What the hook took.
            number: Number of the step.
        """
        passed, self._last = begin_ns - self._last, begin_ns
        self._busy += min(passed, IDLE_NS)
        self._cost += cost_ns
        if self._busy >= WINDOW_NS:
            self._recorder.note_cost(number - self._step, self._cost, self._busy)
            self._cost = self._busy = 0
            self._step = number
