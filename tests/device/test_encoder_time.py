"""The encoder's time on a GPU: ours against a synchronized measurement and a second pair of events.

Needs torch and pytest only; see ``run.sh``.
"""

from __future__ import annotations

import statistics
import time

import pytest

from stagetrace import Recorder

torch = pytest.importorskip("torch")

import vision  # noqa: E402 - needs torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

REPEATS = 30
BATCHES = (1, 4, 16, 64)
SLEEP_CYCLES = 200_000_000
"""About a tenth of a second on a device of 2 GHz."""


def close_enough(ours_ns, theirs_ns):
    """Within 5 % or 50 microseconds, whichever is more."""
    return abs(ours_ns - theirs_ns) <= max(0.05 * theirs_ns, 50_000)


class Events:
    """A second pair of events around the encoder, outside of the hook."""

    def __init__(self):
        self._pairs = []

    def around(self, function):
        """Return the function with events around it."""

        def timed(*args):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            result = function(*args)
            pair[1].record()
            self._pairs.append(pair)
            return result

        return timed

    def took_ns(self):
        """What each call took, by the device's clock."""
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e6 for begin, end in self._pairs]


@pytest.fixture(scope="module")
def runner():
    """A vision transformer of 86 million parameters on the GPU, warmed up."""
    found = vision.Runner("cuda", width=768, depth=12, dtype=torch.bfloat16)
    for batch in BATCHES:
        for _ in range(5):
            found.encode(vision.SchedulerOutput(found.pictures(batch)))
    torch.cuda.synchronize()
    return found


def synchronized_ns(runner, pictures):
    """Time of the encoder alone: the device is idle before and awaited after."""
    output = vision.SchedulerOutput(pictures)
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    runner.encode(output)
    torch.cuda.synchronize()
    return time.perf_counter_ns() - begin


def known(worker, folder):
    """The device times of the steps that encoded; every one is known and nothing was set aside."""
    torch.cuda.synchronize()
    worker.step()
    steps, set_aside = vision.steps_of(folder)
    found = [step.encoder_device_ns for step in steps if step.encoder_begin is not None]
    assert None not in found
    assert not set_aside
    assert worker.recorder.faults == 0
    return found


@pytest.mark.parametrize("batch", BATCHES)
def test_agrees_with_synchronized_measurement_and_second_events(runner, tmp_path, batch):
    """Medians over steps on an idle device, the three of them measured in turn."""
    events = Events()
    worker = vision.Worker(runner, Recorder(tmp_path), around=events.around)
    pictures = runner.pictures(batch)
    synchronized = []
    for _ in range(REPEATS):
        synchronized.append(synchronized_ns(runner, pictures))
        worker.step(pictures)
        torch.cuda.synchronize()
    ours = known(worker, tmp_path)
    assert len(ours) == REPEATS
    found, second, waited = map(statistics.median, (ours, events.took_ns(), synchronized))
    print(
        f"\nbatch {batch:>2}: {found / 1e3:8.0f} us, second events {second / 1e3:8.0f}, synchronized {waited / 1e3:8.0f}"
    )
    assert close_enough(found, second)
    assert close_enough(found, waited)


def test_what_the_device_did_before_is_not_the_encoders(runner, tmp_path):
    """Steps launched while the device is busy: nobody waits for it, and the encoder's time is its own."""
    events = Events()
    worker = vision.Worker(runner, Recorder(tmp_path), around=events.around)
    pictures = runner.pictures(64)
    alone = statistics.median(synchronized_ns(runner, pictures) for _ in range(5))
    for _ in range(2):
        torch.cuda._sleep(SLEEP_CYCLES)
        worker.step(pictures)
        assert not torch.cuda.current_stream().query()
    ours = known(worker, tmp_path)
    for found, second in zip(ours, events.took_ns(), strict=True):
        assert close_enough(found, second)
        assert found <= 1.05 * alone + 50_000


def test_graph_capture_under_the_hooks(runner, tmp_path):
    """The encoder is captured and replayed under the hooks, with the output that it has without them."""
    worker = vision.Worker(runner, Recorder(tmp_path))
    pictures, others = runner.pictures(4), runner.pictures(4)
    static = pictures.clone()
    worker.step(pictures)  # waits for the device while the graph is captured
    hooked, plain = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(hooked):
        of_hooked = worker.step(static)
    with torch.cuda.graph(plain):
        of_plain = vision.Worker(runner).step(static)
    for batch in (pictures, others):
        static.copy_(batch)
        hooked.replay()
        plain.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(of_hooked, of_plain)
        torch.testing.assert_close(of_hooked, vision.Worker(runner).step(batch), rtol=0.05, atol=0.05)
    worker.step()
    steps, set_aside = vision.steps_of(tmp_path)
    assert steps[0].encoder_device_ns > 0
    assert steps[1].encoder_device_ns is None
    assert set_aside == {"encoder_part_without_device_time": 1}
    assert worker.recorder.faults == 0


def test_replayed_encoder_is_timed(runner, tmp_path):
    """An encoder that is replayed as a graph, as vLLM can do, takes the time that its replay takes."""
    events = Events()
    static = runner.pictures(16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embeddings = runner.encode(vision.SchedulerOutput(static))

    def replay(_runner, _scheduler_output):
        graph.replay()
        return embeddings

    worker = vision.Worker(runner, Recorder(tmp_path), encode=replay, around=events.around)
    for _ in range(REPEATS):
        worker.step(static)
        torch.cuda.synchronize()
    ours = known(worker, tmp_path)
    assert close_enough(statistics.median(ours), statistics.median(events.took_ns()))
