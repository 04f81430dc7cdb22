"""Where the scheduler of one version of vLLM does otherwise than another's, and how the others are tested.

``STAGETRACE_TEST_VLLM_SOURCE`` names a folder with the sources of another version, as
``python tools/vllm_versions.py --extract 0.33.0 FOLDER`` leaves it.  The tests of the engine, and those of
a server, then run once more, with those sources and the compiled parts of the installed version.  What
that version requires and this one does not must be on the path: 0.33 needs orjson for its server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from engines import one_image_a_step, whole_images

from stagetrace import read_spool

SOURCE = "STAGETRACE_TEST_VLLM_SOURCE"
ROOT = Path(__file__).parents[3]
FOLDER = "tests/live/engine"
ENGINE = [f"{FOLDER}/test_{name}.py" for name in ("reasons", "transfers", "async", "versions")]
SERVER = ["tests/live/test_stages.py"]
PASSES_REFUSED_OVER = (0, 33)
"""Since this version a request that the encoder refuses does not hold up those behind it."""

HELD_UP = f"{FOLDER}/test_reasons.py::test_encoder_budget"
"""Says what is so up to then; what is so since is said here."""


def version(folder):
    """The version of the package in a folder, by its file."""
    text = (folder / "vllm" / "_version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = version = '(\d+)\.(\d+)", text, flags=re.MULTILINE)
    return int(found[1]), int(found[2])


@pytest.fixture
def passes_over():
    """Whether the version that is tested passes over a request that the encoder refuses."""
    installed = PathFinder.find_spec("vllm").submodule_search_locations[0]
    return version(Path(installed).parent) >= PASSES_REFUSED_OVER


def test_text_behind_a_refused_image(drive, passes_over):
    """An image without budget waits for the encoder in every version; text behind it waits in some, for it."""
    engine = drive(after=one_image_a_step)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 205, images=[(0, 200, "y")])
    engine.request("text", 30)
    engine.drain()
    assert engine.partition("two") == [("encode.wait(encoder_budget)", 110), ("encode", 100), ("prefill", 10)]
    waits = [("prefill.wait(encoder_budget)", "two")]
    assert held_by(engine, "text") == ([] if passes_over else waits)


def test_seats_behind_a_refused_image(drive, passes_over):
    """An image that was tried waits for the encoder, and for a seat once those behind it have taken them all."""
    engine = drive(after=one_image_a_step, max_num_seqs=2)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 205, images=[(0, 200, "y")])
    for name in ("text", "more"):
        engine.request(name, 30, outputs=3)
    engine.drain()
    assert held_by(engine, "two")[0][0] == "encode.wait(encoder_budget)"
    if passes_over:
        assert engine.partition("text") == [("prefill", 110), ("decode", 120)]
        assert held_by(engine, "more") == [("prefill.wait(seats)", "two"), ("prefill.wait(seats)", None)]
    else:
        assert held_by(engine, "text") == [("prefill.wait(encoder_budget)", "two")]


def test_refused_after_it_was_passed_over(drive, monkeypatch, passes_over):
    """An image that waited for its grammar, and is then refused by the encoder, waits for the encoder."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager

    gate, compile_grammar = threading.Event(), StructuredOutputManager._create_grammar

    def compile_slowly(self, request):
        gate.wait(30)
        return compile_grammar(self, request)

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", compile_slowly)
    engine = drive(after=one_image_a_step)
    engine.request("running", 605, images=[(0, 200, "x"), (200, 200, "y"), (400, 200, "z")])
    wanted = StructuredOutputsParams(regex="[a-z]*")
    wanted._backend = "xgrammar"
    guided = engine.request("guided", 205, images=[(0, 200, "w")], structured_outputs=wanted)
    engine.step()
    gate.set()
    while guided.structured_output_request.grammar is None:
        time.sleep(0.01)
    engine.request("text", 30)
    engine.drain()
    waits = [stage for stage, _ in engine.partition("guided")][:2]
    assert waits == ["prefill.wait(grammar)", "encode.wait(encoder_budget)"]
    held = [("prefill.wait(encoder_budget)", "guided")]
    assert held_by(engine, "text") == ([] if passes_over else held)


def test_whole_image_that_finds_too_few_tokens(drive, passes_over):
    """An image that may not be cut waits for tokens where the version refuses it at its very beginning."""
    engine = drive(after=whole_images, max_num_batched_tokens=280)
    engine.request("first", 110)
    engine.request("image", 205, images=[(0, 200, "x")])
    engine.request("text", 30)
    engine.drain()
    if passes_over:
        assert engine.partition("image") == [("prefill.wait(tokens)", 10), ("encode", 100), ("prefill", 10)]
        assert engine.partition("text") == [("prefill", 10)]
    else:
        assert engine.partition("image")[0] == ("encode", 100)


def test_chunks_that_are_deferred(drive, monkeypatch):
    """A prompt that is put off in its middle waits because it is deferred."""
    engine = drive(max_num_batched_tokens=64)
    engine.request("a", outputs=12)
    engine.step()
    engine.request("long", 160)
    engine.step()
    with monkeypatch.context() as throttled:
        throttled.setattr(engine.core, "_should_throttle_prefills", lambda: True)
        engine.step(2)
    engine.drain()
    assert engine.partition("long") == [("prefill", 10), ("prefill.wait(deferred)", 20), ("prefill", 20)]


def test_cadence_of_an_engine_alone(drive, passes_over):
    """Prefills that an engine puts off by itself are deferred."""
    if not passes_over:
        pytest.skip("since vLLM 0.33")
    engine = drive(prefill_schedule_interval=4)
    engine.request("a", outputs=8)
    engine.step(2)
    engine.request("b")
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(deferred)", 20), ("prefill", 10)]


def test_scheduler_without_what_reasons_are_read_from(drive, monkeypatch):
    """Where reasons cannot be read, waits are unknown and the rest is right; it is listed, and no fault."""
    monkeypatch.setattr("stagetrace_vllm.engine.READS", ("running", "gone"))
    engine = drive(max_num_seqs=1)
    engine.request("a", outputs=3)
    engine.request("b")
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(unknown)", 30), ("prefill", 10)]
    (process,) = read_spool(engine.folder).processes.values()
    assert process.hooks_off == ("reasons of waits: no gone",)


def held_by(engine, name):
    """The waits of a request and who was at the head of the queue."""
    intervals = engine.parts(name).completion
    return [(f"{each.stage.value}({each.reason})", each.holder) for each in intervals if each.reason]


@pytest.fixture
def other_version(tmp_path):
    """A folder with the package of another version and the compiled parts of this one."""
    folder = os.environ.get(SOURCE)
    if not folder:
        pytest.skip(f"{SOURCE} names no sources of another version of vLLM")
    package = tmp_path / "vllm"
    package.mkdir()
    installed = Path(PathFinder.find_spec("vllm").submodule_search_locations[0])
    for part in (*(Path(folder).resolve() / "vllm").iterdir(), *installed.glob("*.so")):
        (package / part.name).symlink_to(part)
    return tmp_path


@pytest.mark.parametrize("files", [ENGINE, SERVER], ids=["engine", "server"])
def test_another_version(other_version, files):
    """The other tests hold with the sources of another version as well."""
    path = os.pathsep.join(filter(None, [str(other_version), os.environ.get("PYTHONPATH")]))
    other = {"PYTHONPATH": path, "VLLM_CACHE_ROOT": str(other_version / "cache"), "VLLM_TARGET_DEVICE": "cpu"}
    left_out = [f"--deselect={HELD_UP}"] if version(other_version) >= PASSES_REFUSED_OVER else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *left_out, *files],
        env={name: value for name, value in os.environ.items() if name != SOURCE} | other,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
