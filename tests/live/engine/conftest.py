"""The real engine core and scheduler of the installed vLLM, on a clock that only moves when told.

The executor under them is scripted: a step takes as long as its tokens and media
items say.  So every wait has a known length, and its reason is the real scheduler's.
"""

from __future__ import annotations

import importlib
import warnings
from concurrent.futures import Future

import needs
import pytest
from transfers import Transfers, connector_classes

from stagetrace import Recorder, partition, read_spool
from stagetrace.records import RecordKind
from stagetrace.testing import MS, check_partition, summarize

BASE_MS = 10
ITEM_MS = 100
"""A step takes 10 ms, and 100 ms more for each media item that is encoded in it."""

DRAFTS = 2
"""Tokens drafted for every request, where drafts are used; all of them are taken."""

POLL_MS = 1
"""What the engine lets pass before it looks again at a queue from which it could take nobody."""


class Clock:
    """A monotonic clock, in nanoseconds, that moves when told."""

    def __init__(self):
        self.now = 1_000 * MS

    def __call__(self):
        """Tell the time."""
        return self.now

    def advance(self, milliseconds):
        """Let time pass."""
        self.now += round(milliseconds * MS)


class Output(Future):
    """The output of a step; asking for it waits until the device is done."""

    def __init__(self, clock, ready, output):
        super().__init__()
        self._clock, self._ready = clock, ready
        self.set_result(output)

    def result(self, timeout=None):
        """Wait for the device, then answer."""
        self._clock.now = max(self._clock.now, self._ready)
        return super().result(timeout)


def make_executor_class(clock, script):
    """An executor that runs no model."""
    import torch
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.worker.worker_base import CompilationTimes

    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    answers = {
        "get_kv_cache_spec": lambda: {} if script.encodes_only else {"layer": attention},
        "get_supported_kv_cache_layouts": lambda: ["NHD"],
        "determine_available_memory": lambda: 1 << 26,
        "compile_or_warm_up_model": lambda: CompilationTimes(0, 0),
        "_measure_on_worker": lambda: {"image": 64},  # width of an embedding
    }

    class ScriptedExecutor(Executor):
        def _init_executor(self):
            self._done, self._free_at, self._output = {}, 0, None

        def check_health(self):
            pass

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
            name = method if isinstance(method, str) else method.__name__
            return [answers[name]() if name in answers else None]

        def execute_model(self, scheduler_output, non_block=False):
            items = sum(map(len, scheduler_output.scheduled_encoder_inputs.values()))
            begin = max(clock.now, self._free_at)
            duration = round((BASE_MS + ITEM_MS * items) * MS) if scheduler_output.num_scheduled_tokens else 0
            self._free_at = begin + duration
            script.run_worker(scheduler_output, begin, self._free_at)
            self._output = Output(clock, self._free_at, self._answer(scheduler_output))
            return self._output

        def sample_tokens(self, grammar_output, non_block=False):
            return self._output if non_block else self._output.result()

        def take_draft_token_ids(self):
            output = self._output.result()
            drafted = [
                name
                for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True)
                if sampled
            ]
            return DraftTokenIds(drafted, [[7] * DRAFTS for _ in drafted])

        def _answer(self, scheduler_output):
            for new in scheduler_output.scheduled_new_reqs:
                self._done[new.req_id] = (new.num_computed_tokens, len(new.prompt_token_ids))
            cached = scheduler_output.scheduled_cached_reqs
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._done[name] = (computed, script.known_tokens(name))
            names = list(scheduler_output.num_scheduled_tokens)
            sampled = []
            for name in names:
                computed, known = self._done[name]
                drafts = scheduler_output.scheduled_spec_decode_tokens.get(name, ())
                done = computed + scheduler_output.num_scheduled_tokens[name] >= known
                sampled.append([7] * (1 + len(drafts)) if done and not script.encodes_only else [])
            places = {name: place for place, name in enumerate(names)}
            ended, failed = script.transfers.loaded(self._free_at)
            return ModelRunnerOutput(
                req_ids=names,
                req_id_to_index=places,
                sampled_token_ids=sampled,
                kv_connector_output=KVConnectorOutput(finished_recving=ended, failed_recving=failed),
            )

    return ScriptedExecutor


class Driver:
    """One engine core, driven step by step."""

    def __init__(self, folder, model, clock, transfers, **options):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore

        from stagetrace_vllm.hooks import HOOKS
        from stagetrace_vllm.worker import wrap_execute_mm_encoder, wrap_execute_model
        from stagetrace_vllm.wrapping import Installation

        after = options.pop("after", lambda config: None)
        defaults = {
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": False,
        }
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            limit_mm_per_prompt={"image": 4},
            mm_processor_cache_gb=0,
            **(defaults | options),
        ).create_engine_config()
        after(config)
        self.encodes_only = config.is_mm_encoder_only
        self.folder, self.clock, self.transfers = folder, clock, transfers
        self.recorder = Recorder(folder)
        self.installation = Installation(self.recorder, HOOKS)
        for name in ("vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"):
            self.installation.install(importlib.import_module(name))
        self._encode = wrap_execute_mm_encoder(self._run_encoder, self.recorder)
        self._execute = wrap_execute_model(self._run_model, self.recorder)
        self._during, self._numbers, self._span = [], {}, (0, 0)
        self.core = EngineCore(config, make_executor_class(clock, self), log_stats=False)
        self.scheduler = self.core.scheduler

    def known_tokens(self, name):
        """Tokens that a request has until now, prompt and output."""
        request = self.scheduler.requests.get(name)
        return request.num_tokens if request is not None else 0

    def run_worker(self, scheduler_output, begin, end):
        """Record the worker's part of a step, and let happen what was to happen during it."""
        before, self._span = self.clock.now, (begin, end)
        self.clock.now = begin
        self._execute(None, scheduler_output)
        for at, what in [happening for happening in self._during if happening[0] < end]:
            self._during.remove((at, what))
            self.clock.now = max(at, begin)
            what()
        self.clock.now = before

    def _run_model(self, _worker, scheduler_output):
        if scheduler_output.scheduled_encoder_inputs:
            self._encode(None, scheduler_output)

    def _run_encoder(self, _runner, scheduler_output):
        self.clock.advance(ITEM_MS * sum(map(len, scheduler_output.scheduled_encoder_inputs.values())))

    def during(self, milliseconds, what):
        """Let something happen so many milliseconds from now, while a step runs."""
        self._during.append((self.clock.now + round(milliseconds * MS), what))

    def request(
        self, name, tokens=30, *, outputs=1, images=(), data=None, held_only=False, lora=None, **sampling
    ):
        """Give the engine a request; ``images`` are (offset, tokens, identifier), with the same data each."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        number = self._numbers[name] = len(self._numbers) + 1
        self.recorder.record_at(self.clock.now, RecordKind.RECEIVED, number)
        self.recorder.record_at(self.clock.now, RecordKind.ENGINE_REQUEST, number, self.recorder.define(name))
        features = [
            MultiModalFeatureSpec(
                data=data,
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset, length),
            )
            for offset, length, identifier in images
        ]
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=list(range(tokens)),
            mm_features=features or None,
            sampling_params=SamplingParams(max_tokens=outputs, ignore_eos=True, **sampling),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=lora,
            cache_salt=None,
            data_parallel_rank=None,
        )
        held, wave = self.core.preprocess_add_request(request)
        if held_only:
            return held, wave
        self.core.add_request(held, wave)
        return held

    def step(self, count=1):
        """Run steps of the engine; like the engine's own loop, pause for a moment when one ran no model."""
        for _ in range(count):
            _, executed = self.core.step_fn()
            self.core.post_step(executed)
            if not executed and self.scheduler.has_requests():
                self.clock.advance(POLL_MS)

    def drain(self):
        """Step until nothing is left."""
        for _ in range(200):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def partition(self, name):
        """The completion partition of a request, as (stage, milliseconds), after all has ended."""
        return summarize(self.parts(name).completion)

    def parts(self, name):
        """The partition of a request."""
        return partition(self.timeline(name))

    def timeline(self, name):
        """The joined records of a request; it is taken to have been answered when it was freed."""
        data = read_spool(self.folder)
        assert data.faults == data.dropped == 0
        (request,) = [
            request
            for request in (*data.requests, *data.open_requests)
            if request.engine_requests and request.engine_requests[0].identifier == name
        ]
        request.last_byte = request.ended = request.engine_requests[0].freed
        check_partition(request, partition(request))
        return request


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model whose configuration is all that is used of it."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import TINY, make_model

    return make_model(tmp_path_factory.mktemp("engine-model") / "tiny", TINY)


@pytest.fixture
def drive(tiny_model, tmp_path, monkeypatch):
    """Make drivers; their hooks are taken out again at the end."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_PLUGINS": ""}
    for variable, value in (quiet | {"VLLM_LOGGING_LEVEL": "ERROR"}).items():
        monkeypatch.setenv(variable, value)
    drivers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def make(**options):
            clock = Clock()
            for target in ("stagetrace.recorder.monotonic_ns", "stagetrace_vllm.engine.monotonic_ns"):
                monkeypatch.setattr(target, clock)
            transfers = Transfers(clock)
            for registry, connector in connector_classes(transfers):
                monkeypatch.setitem(registry, "Scripted", lambda connector=connector: connector)
            drivers.append(Driver(tmp_path / str(len(drivers)), tiny_model, clock, transfers, **options))
            return drivers[-1]

        yield make
        for driver in drivers:
            driver.installation.uninstall()
            driver.core.shutdown()
