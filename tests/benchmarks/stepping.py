"""Cost of the hooks of an engine step: vLLM's real engine core, an executor that does nothing.

python tests/benchmarks/stepping.py
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future
from pathlib import Path

warnings.simplefilter("ignore")
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from stagetrace import Recorder
from stagetrace_analyzer.demo.model import TINY, make_model
from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.wrapping import Installation

RUNNING = (1, 16, 256, 1024)
STEPS = 1000
METHODS = ("schedule", "update_from_output")
MODULES = ("vllm.v1.core.sched.scheduler", "vllm.v1.engine.core")
ANSWERS = {
    "get_kv_cache_spec": lambda: {
        "layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    },
    "get_supported_kv_cache_layouts": lambda: ["NHD"],
    "determine_available_memory": lambda: 1 << 30,
    "compile_or_warm_up_model": lambda: CompilationTimes(0, 0),
}


class IdleExecutor(Executor):
    """Answers every step at once, with a token for every request."""

    def _init_executor(self):
        pass

    def check_health(self):
        """Nothing can be ill."""

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        """Answer for one worker."""
        return [ANSWERS[method]() if method in ANSWERS else None]

    def execute_model(self, scheduler_output, non_block=False):
        """Sample the same token everywhere."""
        names = list(scheduler_output.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        done = Future()
        done.set_result(ModelRunnerOutput(names, places, sampled_token_ids=[[7]] * len(names)))
        return done


def engine_with(model, running):
    """An engine core in which so many requests decode."""
    config = EngineArgs(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=running,
        max_num_batched_tokens=65536,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 0},
        enable_prefix_caching=False,
    ).create_engine_config()
    core = EngineCore(config, IdleExecutor, log_stats=False)
    for number in range(running):
        request = EngineCoreRequest(
            request_id=f"request-{number}",
            external_req_id=f"request-{number}",
            prompt_token_ids=list(range(20)),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1900, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
    return core


class Stopwatch:
    """Times calls of a method, in nanoseconds, summed."""

    def __init__(self):
        self.spent_ns = 0

    def around(self, function):
        """Return the function with its time taken."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            begin = time.perf_counter_ns()
            result = function(*args, **kwargs)
            self.spent_ns += time.perf_counter_ns() - begin
            return result

        return timed


def measure(model, running):
    """Median of a step's whole time; median, p99 and most of its hooks' time; in microseconds.

    The hooks lie between two stopwatches: what the outer one takes and the inner one
    does not is theirs, step by step, so that the noise of the step itself stays out.
    """
    inner, outer = Stopwatch(), Stopwatch()
    originals = {name: getattr(Scheduler, name) for name in METHODS}
    installation = Installation(Recorder(Path(tempfile.mkdtemp(dir=model.parent))), HOOKS)
    for name, original in originals.items():
        setattr(Scheduler, name, inner.around(original))
    for module in MODULES:
        installation.install(importlib.import_module(module))
    for name in originals:
        setattr(Scheduler, name, outer.around(getattr(Scheduler, name)))
    core = engine_with(model, running)
    steps, hooks = [], []
    for _ in range(STEPS):
        before, begin = outer.spent_ns - inner.spent_ns, time.perf_counter_ns()
        core.step_fn()
        steps.append((time.perf_counter_ns() - begin) / 1000)
        hooks.append((outer.spent_ns - inner.spent_ns - before) / 1000)
    installation.uninstall()
    for name, original in originals.items():
        setattr(Scheduler, name, original)
    hooks.sort()
    return statistics.median(steps), statistics.median(hooks), hooks[-STEPS // 100], hooks[-1]


def main() -> None:
    """Run the benchmark and print its lines."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", TINY)
        for running in RUNNING:
            step, hooks, p99, most = measure(model, running)
            print(
                f"step, {running:>4} running {step:8.0f} us, of which hooks {hooks:.1f} us"
                f" (p99 {p99:.0f}, most {most:.0f})   (budget: 20 us at 256)"
            )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # torch's libraries list their leaks on an ordinary exit
