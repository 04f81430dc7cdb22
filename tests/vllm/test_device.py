"""What the host does with CUDA events: when it records, asks, reads and reuses them.

No device is here: events are scripted.  That they tell the encoder's time is tested in
tests/device, on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from scripted_cuda import ScriptedCuda

from stagetrace import Recorder, read_spool
from stagetrace.records import RecordKind
from stagetrace_torch.device import PENDING_MAX, CudaTimer, HostTimer, Untimed, timer_of
from stagetrace_vllm.engine import STEP_MARK
from stagetrace_vllm.worker import _worker_of, wrap_execute_mm_encoder, wrap_execute_model


@pytest.fixture
def cuda():
    """The scripted device."""
    return ScriptedCuda()


def encode(timer, step):
    """Launch the encoder of a step."""
    timer.end(timer.begin(), 9, step)


def test_read_only_when_the_device_has_passed_both(cuda):
    """A pair is known when its second event is reached, once, and in the order of launches."""
    timer = CudaTimer(cuda)
    for step in (1, 2, 3):
        encode(timer, step)
    for reached, known in ((0, []), (1, []), (2, [1]), (3, []), (6, [2, 3]), (6, [])):
        cuda.reached = reached
        assert list(timer.finished()) == [(9, step, 1_000_000) for step in known]


def test_events_are_used_again(cuda):
    """A worker that encodes a thousand times makes as many events as were ever in flight."""
    timer = CudaTimer(cuda)
    for step in range(1000):
        encode(timer, 2 * step)
        encode(timer, 2 * step + 1)
        cuda.reached = len(cuda.recorded)
        assert len(list(timer.finished())) == 2
    assert cuda.made == 4


def test_device_that_hangs_costs_a_bounded_number_of_events(cuda):
    """Beyond the limit the encoder is not timed; when the device goes on, timing does."""
    timer = CudaTimer(cuda)
    for step in range(PENDING_MAX + 10):
        encode(timer, step)
    assert cuda.made == 2 * PENDING_MAX
    cuda.reached = len(cuda.recorded)
    assert [step for _, step, _ in timer.finished()] == list(range(PENDING_MAX))
    encode(timer, 999)
    cuda.reached = len(cuda.recorded)
    assert [step for _, step, _ in timer.finished()] == [999]


def test_nothing_is_recorded_or_asked_while_a_graph_is_captured(cuda):
    """A capture sees no event of ours; what waited before it is read after it."""
    timer = CudaTimer(cuda)
    encode(timer, 1)
    cuda.reached, cuda.capturing = 2, True
    encode(timer, 2)
    assert list(timer.finished()) == []
    cuda.capturing = False
    assert [step for _, step, _ in timer.finished()] == [1]
    began = timer.begin()
    cuda.capturing = True
    timer.end(began, 9, 3)
    cuda.capturing = False
    cuda.reached = len(cuda.recorded)
    assert list(timer.finished()) == []


class Output:
    """The scheduler's output."""


def run_step(recorder, number, *, encodes=True, around=lambda: None):
    """Run a step through both hooks and return what the host's function returned."""
    runner = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    encoder = wrap_execute_mm_encoder(lambda _self, _output: "embeddings", recorder)

    def model(_self, output):
        around()
        return encoder(runner, output) if encodes else None

    output = Output()
    if number is not None:
        setattr(output, STEP_MARK, (recorder.number, number, encodes, 0))
        recorder.record(RecordKind.STEP, number, 1)
    return wrap_execute_model(model, recorder)(None, output)


def durations(folder):
    """Device times of the steps in a spool, and what was set aside."""
    data = read_spool(folder)
    return [step.encoder_device_ns for step in data.engines[0].steps], data.set_aside


def test_a_call_that_is_no_step_collects_too(cuda, tmp_path):
    """The engine's last call before it idles carries no mark, and the last encoder's time is not lost."""
    recorder = Recorder(tmp_path)
    _worker_of(recorder).timer = CudaTimer(cuda)
    assert run_step(recorder, 1) == "embeddings"
    run_step(recorder, 2, encodes=False)
    assert durations(tmp_path)[0] == [None, None]
    cuda.reached = 2
    run_step(recorder, None)
    assert durations(tmp_path)[0] == [1_000_000, None]


def test_encoder_of_more_than_32_bits_of_nanoseconds(cuda, tmp_path):
    """An encoder that ran for five seconds is told as such."""
    recorder = Recorder(tmp_path)
    _worker_of(recorder).timer = CudaTimer(cuda)
    cuda.event_ms = 5000.25
    run_step(recorder, 1)
    cuda.reached = 2
    run_step(recorder, None)
    assert durations(tmp_path)[0] == [5_000_250_000]


def test_broken_device_is_counted_and_never_reaches_the_host(cuda, tmp_path):
    """When events fail the host gets its own answer, each pair fails once, and the loss is counted."""
    recorder = Recorder(tmp_path)
    _worker_of(recorder).timer = CudaTimer(cuda)
    assert run_step(recorder, 1) == "embeddings"
    cuda.broken = True
    for _ in range(10):
        run_step(recorder, None)
    assert recorder.faults == 1
    cuda.is_current_stream_capturing = None
    assert run_step(recorder, 2) == "embeddings"
    assert recorder.faults == 2
    for number in (1, 2):
        recorder.record(RecordKind.STEP_DONE, number)
    found, set_aside = durations(tmp_path)
    assert found == [None, None]
    assert set_aside == {"encoder_part_without_device_time": 2}


@pytest.mark.parametrize(
    ("device", "timer"), [("cpu", HostTimer), ("xpu", Untimed), ("meta", Untimed), (None, HostTimer)]
)
def test_timer_by_device(device, timer):
    """The device of the runner decides; a runner that does not tell, where torch has no GPU, is on the CPU."""
    runner = SimpleNamespace(device=SimpleNamespace(type=device))
    if device is None and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        timer = CudaTimer
    assert type(timer_of(runner)) is timer


def test_choosing_loads_no_torch():
    """A host without torch is timed by its own clock, and torch is not imported for that."""
    code = (
        "import sys; from stagetrace_torch.device import timer_of;"
        "print(type(timer_of(None)).__name__, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["HostTimer", "False"]
