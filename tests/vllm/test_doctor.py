"""The doctor says what will not be recorded, and what was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stagetrace import Recorder
from stagetrace.attributes import SAMPLE_VARIABLE, SPOOL_BYTES_VARIABLE, SPOOL_VARIABLE
from stagetrace.records import RecordKind
from stagetrace_vllm.doctor import main
from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.proof import UNPROVED


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No settings but those of the test."""
    for variable in (SPOOL_VARIABLE, SPOOL_BYTES_VARIABLE, SAMPLE_VARIABLE, "VLLM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)


@pytest.fixture
def examine(capsys):
    """Runs the doctor; returns its exit code, its problems and notes, and all it says, by section."""

    def examine(*arguments):
        code = main([*map(str, arguments), "--json"])
        remarks = json.loads(capsys.readouterr().out)
        return code, {
            level: [f"{each['section']}: {each['text']}" for each in remarks if each["level"] == level]
            for level in ("ok", "note", "problem")
        }

    return examine


def needs_vllm():
    pytest.importorskip("vllm", reason="needs vLLM: make test installs it")


def test_all_is_well(examine, tmp_path):
    """With vLLM as known and a folder that can be made there is no problem."""
    needs_vllm()
    code, said = examine(tmp_path / "new" / "spool")
    assert (code, said["problem"]) == (0, [])
    assert f"hooks: {len(HOOKS)} of {len(HOOKS)} hooks are as known" in said["ok"]
    assert f"spool: {tmp_path / 'new' / 'spool'} will be made" in said["ok"]
    assert "recorded: nothing has been recorded yet" in said["note"]
    assert not (tmp_path / "new").exists()


def test_what_is_not_proved_is_said(examine, tmp_path):
    """Every stage and reason that no test reaches is named."""
    _, said = examine(tmp_path)
    assert [note for note in said["note"] if note.startswith("proof")] == [
        f"proof: {what}: {why}" for what, why in UNPROVED.items()
    ]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (("VLLM_PLUGINS", ""), "server: VLLM_PLUGINS= keeps the plug-in out"),
        (("VLLM_PLUGINS", "other,more"), "server: VLLM_PLUGINS=other,more keeps the plug-in out"),
        (("VLLM_USE_RUST_FRONTEND", "1"), "server: VLLM_USE_RUST_FRONTEND is set"),
        (
            (SPOOL_BYTES_VARIABLE, "much"),
            f"server: {SPOOL_BYTES_VARIABLE}=much: no size; the default is taken",
        ),
        ((SAMPLE_VARIABLE, "2"), f"server: {SAMPLE_VARIABLE}=2: no sampling; the default is taken"),
    ],
)
def test_settings_that_lose_something(examine, tmp_path, monkeypatch, setting, problem):
    """A setting that keeps records away is a problem, and so is one that cannot be read."""
    needs_vllm()
    monkeypatch.setenv(*setting)
    code, said = examine(tmp_path)
    assert code == 3
    (found,) = said["problem"]
    assert found.startswith(problem)


def test_settings_that_are_fine(examine, tmp_path, monkeypatch):
    """Settings that are understood are repeated."""
    needs_vllm()
    monkeypatch.setenv("VLLM_PLUGINS", "other,stagetrace")
    monkeypatch.setenv(SPOOL_BYTES_VARIABLE, "2G")
    monkeypatch.setenv(SPOOL_VARIABLE, str(tmp_path))
    code, said = examine()
    assert code == 0
    assert f"server: {SPOOL_BYTES_VARIABLE}=2G" in said["ok"]
    assert any("at most 2.0 GiB" in text for text in said["ok"] + said["note"])


def test_no_spool(examine):
    """Without a folder nothing will be recorded."""
    code, said = examine()
    assert code == 3
    assert f"spool: {SPOOL_VARIABLE} is not set: nothing will be recorded" in said["problem"]


def test_folders_that_cannot_be_recorded_into(examine, tmp_path):
    """A file in the way, a dangling link and a folder that is switched off are problems."""
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for path in (file, file / "spool", link / "spool"):
        code, said = examine(path)
        assert code == 3
        assert any("is no folder" in problem for problem in said["problem"])
    off = tmp_path / "off"
    off.mkdir()
    (off / "OFF").touch()
    code, said = examine(off)
    assert code == 3
    assert f"spool: recording is switched off by {off / 'OFF'}" in said["problem"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_of_somebody_else(examine, tmp_path):
    """A folder without the right to write is a problem."""
    tmp_path.chmod(0o500)
    code, said = examine(tmp_path / "spool")
    assert code == 3
    assert any("may not write" in problem for problem in said["problem"])


def test_processes_that_have_not_recorded(examine, tmp_path):
    """An engine without an API server is half a server, and the doctor says what is unknown."""
    recorder = Recorder(tmp_path)
    recorder.role = "engine"
    recorder.announce(RecordKind.HOOK_OFF, 0, "vllm.somewhere:Class.method")
    recorder.record(RecordKind.ADDED, recorder.define("request"))
    code, said = examine(tmp_path)
    assert code == 3
    assert "recorded: hook off in 1 processes: vllm.somewhere:Class.method" in said["problem"]
    for role, what in (
        ("api", "what happens before and behind the engine"),
        ("worker", "the encoder's part of the steps"),
    ):
        assert f"recorded: no {role} process has recorded: {what} is unknown" in said["problem"]
    assert not any("no engine process" in problem for problem in said["problem"])


def test_another_vllm(tmp_path):
    """Of a vLLM in which things have other names, every hook that would be off is named with its loss."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    described = tmp_path / "vllm-99.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 99.0\n")
    command = [sys.executable, "-m", "stagetrace", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    remarks = json.loads(done.stdout)
    assert {"section": "server", "level": "ok", "text": "vLLM 99.0", "hint": None} in remarks
    off = [each["text"] for each in remarks if each["text"].startswith("off: ")]
    hooked = [hook for hook in HOOKS if hook.module.startswith("vllm.")]
    assert len(off) == len(hooked)
    assert all(f"off: {hook.name}: no module" in text for hook, text in zip(hooked, off, strict=True))


def test_text_fits_and_says_the_same(capsys, tmp_path):
    """As text every remark has its mark, and no line is wider than 100 columns."""
    code = main([str(tmp_path / "spool")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert (code == 3) == any(line.startswith("  !!") for line in lines)
    assert {"server", "spool", "recorded", "proof"} <= set(lines)
