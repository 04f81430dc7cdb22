"""The demo, as a stranger runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs

needs.vllm()


def start_demo(folder, *arguments):
    """Start the demo in a folder, with its model cached where other tests find it."""
    return subprocess.Popen(
        [sys.executable, "-m", "stagetrace", "demo", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(folder):
    """Processes whose command line names a folder; those that have ended but are not collected do not."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if os.fsencode(folder) in command:
            found.append(int(entry.name))
    return found


def servers():
    """Processes of vLLM servers, by command line or name."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"vllm" in (entry / "cmdline").read_bytes().lower():
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def test_demo_from_model_to_report(tmp_path):
    """The demo ends by itself, explains every request, and leaves its files and no process."""
    before = servers()
    demo = start_demo(tmp_path, "--requests=12")
    out, err = demo.communicate(timeout=400)
    assert demo.returncode == 0, err
    assert "[mixture] text/short" in out
    assert servers() <= before
    report = json.loads((tmp_path / "stagetrace-demo" / "analyze.json").read_text())
    assert report["ingest"]["dropped"] == 0
    assert report["ingest"]["set_aside"] == {}
    assert set(report["joins"]) == {"api+engine+worker"}
    assert report["partition_mismatches"] == {"ttft": 0, "completion": 0}
    assert {(entry["phase"], entry["class"]) for entry in report["classes"]} == {
        ("text only", "text/short"),
        ("image only", "image/short"),
        ("mixture", "text/short"),
        ("mixture", "image/short"),
    }
    for entry in report["classes"]:
        assert entry["outcomes"]["ok"] == entry["requests"]
        assert all(entry["unattributed_share"][horizon] < 0.02 for horizon in ("ttft", "completion"))
    again = start_demo(tmp_path)
    _, refusal = again.communicate(timeout=60)
    assert again.returncode == 2
    assert refusal == (
        "stagetrace: stagetrace-demo exists (hint: name another folder with -o, or use --force)\n"
    )


def test_interrupted_demo_leaves_no_process(tmp_path):
    """SIGTERM while the server runs stops everything as Ctrl-C does, and the demo says so."""
    before = servers()
    demo = start_demo(tmp_path)
    deadline = time.monotonic() + 120
    while not (started := servers() - before - {demo.pid}) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert started
    time.sleep(5)
    demo.send_signal(signal.SIGTERM)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, err
    assert "Traceback" not in err
    assert err.endswith("stagetrace: interrupted\n")
    assert servers() <= before
    assert processes_of(tmp_path) == []
