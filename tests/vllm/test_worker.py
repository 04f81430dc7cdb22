"""The worker's hooks around a real torch module on the CPU; tests/device has the same on a GPU."""

from __future__ import annotations

import functools
import time

import pytest

from stagetrace import Recorder
from stagetrace.records import RecordKind
from stagetrace.spool import is_spool

torch = pytest.importorskip("torch")

import vision  # noqa: E402 - needs torch


class Watch:
    """Takes the time around a function."""

    def __init__(self):
        self.took_ns = []

    def around(self, function):
        """Return the function with its time taken."""

        @functools.wraps(function)
        def timed(*args):
            begin = time.monotonic_ns()
            try:
                return function(*args)
            finally:
                self.took_ns.append(time.monotonic_ns() - begin)

        return timed


def test_encoder_on_the_cpu_is_timed_by_the_host(tmp_path):
    """What is recorded lies between stopwatches inside and outside of the hook, in every step."""
    inner, outer = Watch(), Watch()
    encode = inner.around(vision.Runner.encode)
    worker = vision.Worker(vision.Runner("cpu"), Recorder(tmp_path), encode=encode, around=outer.around)
    for batch in (1, 2, 4):
        worker.step(worker.runner.pictures(batch))
    worker.step()
    steps, set_aside = vision.steps_of(tmp_path)
    recorded = [step.encoder_end - step.encoder_begin for step in steps[:3]]
    for inside, ours, outside in zip(inner.took_ns, recorded, outer.took_ns, strict=True):
        assert inside <= ours <= outside
    assert all(step.begin <= step.encoder_begin < step.encoder_end <= step.done for step in steps[:3])
    assert [step.encoder_device_ns for step in steps] == [None] * 4
    assert steps[3].encoder_begin is None
    assert not set_aside


def test_the_module_computes_the_same_under_the_hooks(tmp_path):
    """The hooks hand everything through."""
    runner = vision.Runner("cpu")
    pictures = runner.pictures(2)
    plain = vision.Worker(runner).step(pictures)
    hooked = vision.Worker(runner, Recorder(tmp_path)).step(pictures)
    assert torch.equal(plain, hooked)


def test_warm_up_is_no_step(tmp_path):
    """What runs without the scheduler's mark leaves no record."""
    worker = vision.Worker(vision.Runner("cpu"), Recorder(tmp_path))
    worker.step(worker.runner.pictures(1), marked=False)
    assert not is_spool(tmp_path)


def test_device_without_a_clock_of_ours_is_unknown(tmp_path):
    """On a device that is neither CPU nor CUDA the launch is not taken for the encoder, and it is counted."""
    worker = vision.Worker(vision.Runner("meta"), Recorder(tmp_path))
    worker.step(worker.runner.pictures(1))
    worker.step()
    (step, _), set_aside = vision.steps_of(tmp_path)
    assert step.encoder_begin is not None
    assert (step.encoder_end, step.encoder_device_ns) == (None, None)
    assert set_aside == {"encoder_part_without_device_time": 1}


def test_failure_of_the_encoder_ends_its_part(tmp_path):
    """An encoder that raises is recorded as begun and ended, and its exception passes."""

    def failing(_runner, _scheduler_output):
        raise MemoryError("out of memory")

    recorder = Recorder(tmp_path)
    worker = vision.Worker(vision.Runner("cpu"), recorder, encode=failing)
    with pytest.raises(MemoryError, match="out of memory"):
        worker.step(worker.runner.pictures(1))
    recorder.record(RecordKind.STEP_DONE, 1)
    (step,), _ = vision.steps_of(tmp_path)
    assert step.encoder_begin <= step.encoder_end
    assert recorder.faults == 0
