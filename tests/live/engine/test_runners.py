"""The encoder's part of a step, out of vLLM's own worker and model runners."""

from __future__ import annotations

import importlib

import pytest

from stagetrace import read_spool
from stagetrace.records import RecordKind
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace.testing import MS

MODULES = (
    "vllm.v1.worker.worker_base",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.mm.encoder_runner",
)


class Server:
    """The real engine core over the real worker's wrapper and a runner."""

    def __init__(self, engine, runner):
        import runners
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        for module in MODULES:
            engine.installation.install(importlib.import_module(module))
        self.engine, self.pixels = engine, runners.pixels
        self.model = runners.Model(engine.clock)
        self.runner = runners.RUNNERS[runner](self.model)
        wrapper = WorkerWrapperBase()
        wrapper.worker, wrapper.mm_receiver_cache = runners.Worker(self.runner), None
        engine._execute = lambda _, scheduler_output: wrapper.execute_model(scheduler_output)

    def request(self, name, tokens, images=(), **options):
        """Give the engine a request whose images have pixels."""
        self.engine.request(name, tokens, images=images, data=self.pixels(), **options)

    def worker_records(self):
        """What the worker wrote: kind, step, milliseconds since the first."""
        (path,) = segment_paths(self.engine.folder)
        found = [record for record in read_segment(path) if record[6] >= RecordKind.STEP_BEGIN]
        assert {record[2] for record in found} == {self.engine.recorder.number}
        return [(RecordKind(kind).name, step, (at - found[0][0]) / MS) for at, step, *_, kind, _ in found]


@pytest.fixture(params=["v1", "v2", "encoder-only"])
def server(request, drive):
    """A server with each runner."""
    return Server(drive(), request.param)


def test_encoder_part_of_steps(server):
    """Begin and end of the encoder stand under their step, also with several requests in it."""
    server.request("a", 205, images=[(0, 200, "x")])
    server.request("text", 30, outputs=3)
    server.request("b", 205, images=[(5, 200, "y")])
    server.engine.drain()
    assert set(server.runner.encoded) == {"x", "y"}
    assert server.worker_records() == [
        ("STEP_BEGIN", 1, 0),
        ("ENCODE_BEGIN", 1, 0),
        ("ENCODE_END", 1, 200),
        ("STEP_BEGIN", 2, 210),
        ("STEP_BEGIN", 3, 220),
    ]
    assert server.engine.partition("a") == [("encode", 200), ("prefill", 10)]
    assert server.engine.partition("b") == [("encode", 200), ("prefill", 10)]
    assert server.engine.partition("text") == [("prefill", 210), ("decode", 20)]
    assert read_spool(server.engine.folder).faults == 0


def test_image_in_a_later_step(server):
    """An image that a later chunk reaches is encoded under that chunk's step."""
    server.engine.scheduler.max_num_scheduled_tokens = 64
    server.request("a", 300, images=[(90, 200, "x")])
    server.engine.drain()
    encoder = [record for record in server.worker_records() if record[0].startswith("ENCODE")]
    assert encoder == [("ENCODE_BEGIN", 2, 10), ("ENCODE_END", 2, 110)]
    assert server.engine.partition("a") == [("prefill", 10), ("encode", 100), ("prefill", 40)]


def test_encoder_that_fails(server):
    """The encoder's own exception reaches vLLM, and the end of its part is recorded."""

    def fail(pixels):
        raise ValueError("out of memory")

    server.model.embed_multimodal = fail
    server.request("a", 205, images=[(0, 200, "x")])
    with pytest.raises(ValueError, match="out of memory"):
        server.engine.step()
    assert [kind for kind, *_ in server.worker_records()] == ["STEP_BEGIN", "ENCODE_BEGIN", "ENCODE_END"]


def test_warm_up_is_no_step(drive):
    """What the encoder does outside of a step, as for profiling, is not recorded."""
    server = Server(drive(), "v2")
    encoded = server.runner.state.encoder_runner.execute_mm_encoder([("image", server.pixels())])
    assert len(encoded) == 1
    server.request("text", 30)
    server.engine.drain()
    assert server.worker_records() == [("STEP_BEGIN", 1, 0)]
