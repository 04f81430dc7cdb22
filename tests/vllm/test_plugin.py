"""Activation: inert unless configured, early, harmless, reversible."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from stagetrace import Recorder
from stagetrace.records import RecordKind
from stagetrace.spool import segment_paths
from stagetrace_vllm.imports import ImportWatcher
from stagetrace_vllm.wrapping import Hook, Installation


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A module like vLLM's, that nobody has imported yet."""
    (tmp_path / "host_module.py").write_text(
        "class Scheduler:\n"
        "    def schedule(self, throttle=False):\n"
        "        return 'original'\n"
        "class Pool:\n"
        "    def submit(self, fn):\n"
        "        return fn()\n"
        "pool = Pool()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "host_module"
    sys.modules.pop("host_module", None)


def wrap(original, _recorder):
    """A wrapper that can be seen."""

    def wrapped(*args, **kwargs):
        return f"wrapped {original(*args, **kwargs)}"

    return wrapped


def installed(hooks, folder):
    """Install hooks as the plug-in does; returns the installation and its watcher."""
    installation = Installation(Recorder(folder), hooks)
    watcher = ImportWatcher(installation.modules(), installation.install)
    watcher.start()
    return installation, watcher


@pytest.mark.parametrize("imported_before", [False, True])
def test_hook_is_set_when_its_module_appears(target, tmp_path, imported_before):
    """A hook holds whether its module is imported before or after, and can be taken out again."""
    if imported_before:
        importlib.import_module(target)
    hooks = (
        Hook(target, "Scheduler.schedule", ("self", "throttle"), wrap, "steps"),
        Hook(target, "pool.submit", ("fn",), wrap, "jobs"),
    )
    installation, watcher = installed(hooks, tmp_path / "spool")
    module = importlib.import_module(target)
    assert module.Scheduler().schedule() == "wrapped original"
    assert module.Scheduler.schedule.__name__ == "schedule"
    assert module.pool.submit(lambda: 1) == "wrapped 1"
    assert module.__spec__.loader is module.__loader__
    installation.uninstall()
    watcher.stop()
    assert module.Scheduler().schedule() == "original"
    assert module.pool.submit(lambda: 1) == 1
    assert "submit" not in vars(module.pool)


@pytest.mark.parametrize("name", ["Scheduler.schedule", "Scheduler.gone", "Nowhere.schedule"])
def test_unknown_signature_stays_off_and_is_listed(target, tmp_path, caplog, name):
    """A target that is not as known is left alone, logged, and listed in the spool."""
    _, watcher = installed((Hook(target, name, ("self", "other"), wrap, "steps"),), tmp_path / "spool")
    module = importlib.import_module(target)
    watcher.stop()
    assert module.Scheduler().schedule() == "original"
    assert "hook off: host_module" in caplog.text


def test_listed_hook_reaches_the_reader(target, tmp_path):
    """What was off is in the spool of a process that records."""
    from stagetrace import read_spool

    recorder = Recorder(tmp_path / "spool")
    installation = Installation(recorder, (Hook(target, "Scheduler.gone", (), wrap, "steps"),))
    installation.install(importlib.import_module(target))
    recorder.record(RecordKind.RECEIVED, 1)
    (process,) = read_spool(tmp_path / "spool").processes.values()
    assert process.hooks_off == ("host_module:Scheduler.gone",)


def run_activation(environment, code):
    """Run code in a fresh interpreter with an environment of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_inert_without_a_spool():
    """Without STAGETRACE_SPOOL nothing is watched and nothing is set."""
    code = (
        "import sys; before = list(sys.meta_path); import stagetrace_vllm; stagetrace_vllm.activate()\n"
        "print(sys.meta_path == before)"
    )
    assert run_activation({}, code) == "True"


def test_activation_never_raises_and_writes_nothing(tmp_path):
    """Activation with an impossible folder is harmless, and a process that does not serve leaves no file."""
    code = "import stagetrace_vllm as s; s.activate(); s.activate(); s.deactivate(); print('fine')"
    assert run_activation({"STAGETRACE_SPOOL": "/proc/nowhere"}, code) == "fine"
    assert run_activation({"STAGETRACE_SPOOL": str(tmp_path / "spool")}, code) == "fine"
    assert segment_paths(tmp_path / "spool") == []
