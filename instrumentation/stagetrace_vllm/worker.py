"""The worker: when it takes up a step, and the encoder's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from stagetrace.recorder import LOOK_NS, Recorder
from stagetrace.records import RecordKind
from stagetrace_torch.device import Event, Timer, Untimed, timer_of
from stagetrace_vllm.engine import STEP_MARK, StepMark
from stagetrace_vllm.reading import attribute

_STEP_BEGIN = int(RecordKind.STEP_BEGIN)
_ENCODE_BEGIN = int(RecordKind.ENCODE_BEGIN)
_ENCODE_END = int(RecordKind.ENCODE_END)
_ENCODE_DEVICE = int(RecordKind.ENCODE_DEVICE)
_U32 = 0xFFFFFFFF


class _Worker:
    """What both hooks of a worker know."""

    __slots__ = ("look_at", "step", "timer")

    def __init__(self) -> None:
        # The step that it runs; None in warm-up and profiling runs.
        self.step: StepMark | None = None
        # Chosen when it first encodes: only then is it certain which device it is on.
        self.timer: Timer | None = None
        # When to look for the switch again, by the engine's clock: it comes with the step.
        self.look_at = 0


_WORKERS: WeakKeyDictionary[Recorder, _Worker] = WeakKeyDictionary()


def _worker_of(recorder: Recorder) -> _Worker:
    return _WORKERS.setdefault(recorder, _Worker())


def wrap_execute_model(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when a worker takes up a step, and what its device has done since.

    The mark is read here, above the model runner, because a runner may
    replace the scheduler's output by a copy without it.
    """
    worker = _worker_of(recorder)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        mark = attribute(scheduler_output, STEP_MARK)
        if mark is not None:
            if mark[3] >= worker.look_at:
                worker.look_at = mark[3] + LOOK_NS
                recorder.look()
            recorder.record(_STEP_BEGIN, mark[1], mark[0])
        if worker.timer is not None:
            # In every call, also in one that is no step: it may be the last one for long.
            _record_finished(worker.timer, recorder)
        if mark is None:
            return original(self, scheduler_output, *args, **kwargs)
        worker.step = mark
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            worker.step = None

    return execute_model


def _record_finished(timer: Timer, recorder: Recorder) -> None:
    try:
        for engine, step, took in timer.finished():
            recorder.record(_ENCODE_DEVICE, step, engine, took & _U32, took >> 32)
    except Exception:
        recorder.fault()


def wrap_execute_mm_encoder(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record the encoder's part of a step: by the host's clock, and by the device's where there is one."""
    worker = _worker_of(recorder)

    def execute_mm_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = worker.step
        if mark is None or not mark[2]:
            return original(self, *args, **kwargs)
        engine, step, *_ = mark
        timer = worker.timer
        if timer is None:
            timer = worker.timer = _choose_timer(self, recorder)
        # Before the device's: it does not get there before this time.
        recorder.record(_ENCODE_BEGIN, step, engine, timer.deferred)
        began = _begin(timer, recorder)
        try:
            return original(self, *args, **kwargs)
        finally:
            _end(timer, began, engine, step, recorder)
            recorder.record(_ENCODE_END, step, engine)

    return execute_mm_encoder


def _choose_timer(runner: Any, recorder: Recorder) -> Timer:
    try:
        return timer_of(runner)
    except Exception:
        recorder.fault()
        return Untimed()


def _begin(timer: Timer, recorder: Recorder) -> Event | None:
    try:
        return timer.begin()
    except Exception:
        recorder.fault()
        return None


def _end(timer: Timer, began: Event | None, engine: int, step: int, recorder: Recorder) -> None:
    try:
        timer.end(began, engine, step)
    except Exception:
        recorder.fault()
