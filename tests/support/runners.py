"""vLLM's own model runners around a small vision model, on the CPU and without a language model.

How a runner comes to its encoder is vLLM's; what only a GPU or Triton can do is left out.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.v1.worker.gpu.ec_connector import ECConnector
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner
from vllm.v1.worker.worker_base import WorkerBase

WIDTH, TOKENS = 8, 200


class Model(torch.nn.Module):
    """A vision encoder that takes 100 ms for an image, and the embedding of text."""

    def __init__(self, clock):
        super().__init__()
        self.vision, self.text = torch.nn.Linear(4, WIDTH), torch.nn.Embedding(1024, WIDTH)
        self._clock = clock

    def embed_multimodal(self, pixels):
        """Encode images."""
        self._clock.advance(100 * len(pixels))
        return list(self.vision(pixels))

    def embed_input_ids(self, input_ids, multimodal_embeddings=(), *, is_multimodal):
        """Embed tokens, and put the images in their places."""
        embeds = self.text(input_ids)
        if len(multimodal_embeddings):
            embeds[is_multimodal] = torch.cat(list(multimodal_embeddings))
        return embeds


class V1Runner(GPUModelRunner):
    """The runner of vLLM's first generation, without the language model."""

    def __init__(self, model):
        self.model, self.device = model, torch.device("cpu")
        self.requests, self.encoder_cache = {}, {}
        self.observability_config = self.lora_config = self.encoder_cudagraph_manager = None
        self.is_multimodal_pruning_enabled = self.requires_sequential_video_encoding = False

    def execute_model(self, scheduler_output):
        """Encode the scheduled items."""
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = new
        self._execute_mm_encoder(scheduler_output)

    @property
    def encoded(self):
        """Embeddings by the item's identifier."""
        return self.encoder_cache


def make_state(model, cache):
    """The state of a model in a runner of the second generation, with its real encoder runner."""
    state = DefaultModelState.__new__(DefaultModelState)
    state.encoder_cache, state.supports_mm_inputs = cache, True
    state.mm_pruner = state.prompt_embeds_state = state.rope_state = None
    state.encoder_runner = EncoderRunner(model, 2048, WIDTH, cache, torch.float32, torch.device("cpu"))
    return state


class V2Runner:
    """The part of the second generation's runner that makes the inputs of the language model."""

    def __init__(self, model):
        self._cache = EncoderCache()
        self.state = make_state(model, self._cache)
        self._lengths, self._computed = {}, {}

    def execute_model(self, scheduler_output):
        """Encode the scheduled items and put them between the text."""
        for new in scheduler_output.scheduled_new_reqs:
            self._cache.add_request(new.req_id, new.mm_features)
            self._lengths[new.req_id], self._computed[new.req_id] = len(new.prompt_token_ids), 0
        tokens = scheduler_output.num_scheduled_tokens
        if not tokens:
            return
        counts = torch.tensor(list(tokens.values()))
        ends = counts.cumsum(0)
        batch = SimpleNamespace(
            req_ids=list(tokens),
            num_tokens=int(counts.sum()),
            num_tokens_after_padding=int(counts.sum()),
            input_ids=torch.zeros(int(counts.sum()), dtype=torch.long),
            num_scheduled_tokens=counts.numpy(),
            query_start_loc_np=(ends - counts).numpy(),
            prefill_len_np=torch.tensor([self._lengths[name] for name in tokens]).numpy(),
            num_computed_tokens_np=torch.tensor([self._computed[name] for name in tokens]).numpy(),
        )
        inputs = self.state.prepare_inputs_embeds(scheduler_output.scheduled_encoder_inputs, batch, None)
        assert inputs.shape == (batch.num_tokens, WIDTH)
        for name, count in tokens.items():
            self._computed[name] += count

    @property
    def encoded(self):
        """Embeddings by the item's identifier."""
        return self._cache.encoder_outputs


class EncoderOnlyRunner(MMEncoderModelRunner):
    """The runner of servers that only encode; what only Triton can do is left out."""

    def __init__(self, model):
        self.encoder_cache = EncoderCache()
        self.model_state = make_state(model, self.encoder_cache)
        self.ec_connector, self.lora_config = ECConnector(), None
        self.kv_connector = SimpleNamespace(no_forward=lambda _: None)
        self.block_tables = SimpleNamespace(apply_staged_writes=lambda: None)

    def input_tensor_semaphore(self):
        """No device reads the inputs."""
        return contextlib.nullcontext()

    def add_requests(self, scheduler_output):
        """Remember what the encoder needs."""
        for new in scheduler_output.scheduled_new_reqs:
            self.encoder_cache.add_request(new.req_id, new.mm_features)

    def gather_batch_req_state(self, scheduler_output, *_):
        """Tell how many tokens there are."""
        return SimpleNamespace(num_tokens=scheduler_output.total_num_scheduled_tokens), None

    def update_pp_decode_requests(self): ...

    def finish_requests(self, scheduler_output): ...

    def free_states(self, scheduler_output): ...

    def update_requests(self, scheduler_output): ...

    def prepare_inputs(self, *args, **kwargs): ...

    def _no_forward(self, scheduler_output): ...

    @property
    def encoded(self):
        """Embeddings by the item's identifier."""
        return self.encoder_cache.encoder_outputs


class Worker(WorkerBase):
    """A worker around a model runner."""

    def __init__(self, runner):
        self.model_runner = runner

    def execute_model(self, scheduler_output):
        """Run a step."""
        return self.model_runner.execute_model(scheduler_output)


def pixels():
    """An image as a processor hands it over."""
    field = MultiModalFieldElem(data=torch.ones(TOKENS, 4), field=MultiModalBatchedField())
    return MultiModalKwargsItem({"pixels": field})


RUNNERS = {"v1": V1Runner, "v2": V2Runner, "encoder-only": EncoderOnlyRunner}
