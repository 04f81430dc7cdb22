"""The worker: when it takes up a step, and the encoder's part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stagetrace.recorder import Recorder
from stagetrace.records import RecordKind
from stagetrace_vllm.engine import STEP_MARK, StepMark
from stagetrace_vllm.reading import attribute

_STEP_BEGIN = int(RecordKind.STEP_BEGIN)
_ENCODE_BEGIN = int(RecordKind.ENCODE_BEGIN)
_ENCODE_END = int(RecordKind.ENCODE_END)


class _Current:
    """The step that this worker runs; None in warm-up and profiling runs."""

    step: StepMark | None = None


def wrap_execute_model(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when a worker takes up a step.

    The mark is read here, above the model runner, because a runner may
    replace the scheduler's output by a copy without it.
    """

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        mark = attribute(scheduler_output, STEP_MARK)
        if mark is None:
            return original(self, scheduler_output, *args, **kwargs)
        engine, step, *_ = mark
        recorder.record(_STEP_BEGIN, step, engine)
        _Current.step = mark
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            _Current.step = None

    return execute_model


def wrap_execute_mm_encoder(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record the encoder's part of a step, by the host's clock."""

    def execute_mm_encoder(self: Any, *args: Any, **kwargs: Any) -> Any:
        mark = _Current.step
        if mark is None or not mark[2]:
            return original(self, *args, **kwargs)
        engine, step, *_ = mark
        recorder.record(_ENCODE_BEGIN, step, engine)
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.record(_ENCODE_END, step, engine)

    return execute_mm_encoder
