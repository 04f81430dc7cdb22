"""Cost of the worker's hooks in a step that encodes: the same step with and without them, in turn.

``run.sh`` runs it after the tests; on a machine without a GPU it measures the CPU.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from stagetrace import Recorder
from stagetrace_vllm.engine import STEP_MARK

sys.path.append(str(Path(__file__).parents[1] / "support"))

import vision

PAIRS = 300
BATCHES = (1, 16)
RESAMPLES = 2000


def interval(differences):
    """Median, and its 95 % bootstrap interval."""
    rng = random.Random(7)
    medians = sorted(
        statistics.median(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES)
    )
    return statistics.median(differences), medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]


def finish(device):
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(runner, batch, folder):
    """Microseconds of a plain step, and what the hooks add until it is launched and until it is done."""
    recorder = Recorder(folder)
    plain, hooked = vision.Worker(runner), vision.Worker(runner, recorder)
    output = vision.SchedulerOutput(runner.pictures(batch))
    setattr(output, STEP_MARK, (recorder.number, 1, True, 0))
    for worker in (plain, hooked) * 10:
        worker.execute(output)
    rng, plain_us, launched, done = random.Random(7), [], [], []
    for _ in range(PAIRS):
        times = {}
        for worker in rng.sample((plain, hooked), 2):
            finish(runner.device)
            begin = time.perf_counter_ns()
            worker.execute(output)
            launch = time.perf_counter_ns()
            finish(runner.device)
            times[worker] = launch - begin, time.perf_counter_ns() - begin
        plain_us.append(times[plain][1] / 1000)
        launched.append((times[hooked][0] - times[plain][0]) / 1000)
        done.append((times[hooked][1] - times[plain][1]) / 1000)
    return statistics.median(plain_us), interval(launched), interval(done)


def main() -> None:
    """Measure and print."""
    if torch.cuda.is_available():
        runner = vision.Runner("cuda", width=768, depth=12, dtype=torch.bfloat16)
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    else:
        runner = vision.Runner("cpu")
        print("no GPU: this is the CPU's part only; torch", torch.__version__)
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            plain, launched, done = measure(runner, batch, Path(folder))
        added = [f"{median:.1f} us ({low:.1f} to {high:.1f})" for median, low, high in (launched, done)]
        print(
            f"batch {batch:>2}: step {plain:.0f} us; hooks add {added[0]} to its launch, {added[1]} to the whole"
        )


if __name__ == "__main__":
    main()
