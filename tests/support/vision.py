"""A worker with a real vision transformer (random weights), under the hooks of the plug-in or without them."""

from __future__ import annotations

import torch
from torch import nn

from stagetrace import read_spool
from stagetrace.clock import monotonic_ns
from stagetrace.records import RecordKind
from stagetrace_vllm.engine import STEP_MARK
from stagetrace_vllm.worker import wrap_execute_mm_encoder, wrap_execute_model

SIDE = 224
PATCH = 16


class Block(nn.Module):
    """Attention over all patches, then a perceptron, as vision encoders have them."""

    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, patches, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv.unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(batch, patches, width))
        return x + self.perceptron(self.norms[1](x))


class VisionTransformer(nn.Module):
    """Patches, positions and transformer blocks: embeddings of a batch of pictures."""

    def __init__(self, width, depth):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))

    def forward(self, pixels):
        return self.blocks(self.patches(pixels).flatten(2).transpose(1, 2) + self.positions)


class Runner:
    """Stands where a model runner stands: it has a device, an encoder, and a rest of the step."""

    def __init__(self, device, *, width=128, depth=2, dtype=torch.float32):
        torch.manual_seed(7)
        self.device, self.dtype = torch.device(device), dtype
        self.encoder = VisionTransformer(width, depth).to(self.device, dtype).eval()
        self.head = nn.Linear(width, 64).to(self.device, dtype)

    def pictures(self, batch):
        """A batch of random pictures on the device."""
        return torch.rand(batch, 3, SIDE, SIDE).to(self.device, self.dtype)

    @torch.inference_mode()
    def encode(self, scheduler_output):
        """Run the encoder."""
        return self.encoder(scheduler_output.pixels)

    @torch.inference_mode()
    def rest(self, embeddings):
        """Run what comes after the encoder."""
        return self.head(embeddings)


class SchedulerOutput:
    """What the scheduler hands to a worker: here, pictures."""

    def __init__(self, pixels=None):
        self.pixels = pixels


class Worker:
    """A worker and as much of an engine as the reader needs.

    Args:
        runner: The model runner.
        recorder: Where it records; None leaves the hooks out.
        encode: What runs the encoder, if not the runner's own.
        around: Wraps the encoder again, outside of the hook.
    """

    def __init__(self, runner, recorder=None, *, encode=Runner.encode, around=None):
        self.runner, self.recorder = runner, recorder
        self.number = 0
        self._encode, self._execute = encode, Worker._run
        if recorder is not None:
            self._encode = wrap_execute_mm_encoder(encode, recorder)
            self._execute = wrap_execute_model(Worker._run, recorder)
        if around is not None:
            self._encode = around(self._encode)

    def _run(self, scheduler_output):
        if scheduler_output.pixels is None:
            return None
        return self.runner.rest(self._encode(self.runner, scheduler_output))

    def execute(self, scheduler_output):
        """Do what the engine asks of a worker."""
        return self._execute(self, scheduler_output)

    def step(self, pixels=None, *, marked=True):
        """Run a step; one without pictures encodes nothing, one without a mark is no step of the engine."""
        output = SchedulerOutput(pixels)
        recorder, begin = self.recorder, monotonic_ns()
        if recorder is None or not marked:
            return self.execute(output)
        self.number += 1
        setattr(output, STEP_MARK, (recorder.number, self.number, pixels is not None, begin))
        recorder.record_at(begin, RecordKind.STEP, self.number, 1)
        result = self.execute(output)
        recorder.record(RecordKind.STEP_DONE, self.number, monotonic_ns() - begin)
        return result


def steps_of(folder):
    """The steps in a spool, and what was set aside."""
    data = read_spool(folder)
    return data.engines[0].steps, data.set_aside
