"""The page of the recording API says what is so: its examples run, its tables are the code's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import get_args

import pytest

import stagetrace
from stagetrace import Outcome, Stage, partition, read_spool
from stagetrace.api import Facts, ItemFacts, WaitedStage, WorkStage
from stagetrace.records import Misuse
from stagetrace.stages import Kind
from stagetrace.testing import check_partition

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
SERVED = """
import asyncio

async def receive():
    return {"type": "http.request", "body": b"cat on a mat", "more_body": False}

async def send(message):
    pass

asyncio.run(app({"type": "http", "method": "POST", "path": "/caption", "headers": []}, receive, send))
"""


def run(code, folder):
    """Run an example as a program of its own that records into a folder; returns what it said."""
    program = folder / "example.py"
    program.write_text(code)
    done = subprocess.run(
        [sys.executable, program],
        env=os.environ | {"STAGETRACE_SPOOL": str(folder / "spool")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def requests_of(folder):
    """The requests that an example has recorded, all of them sound."""
    data = read_spool(folder / "spool")
    assert (data.faults, data.dropped, data.set_aside) == (0, 0, {})
    for request in data.requests:
        check_partition(request, partition(request))
        assert request.outcome is Outcome.OK
    return data.requests


@pytest.mark.parametrize(
    ("number", "stages"),
    [
        (0, ["receive", "preprocess", "unattributed", "prefill", "respond"]),
        (2, ["receive", "prefill.wait", "prefill", "respond"]),
        (
            3,
            [
                "receive",
                "retrieval",
                "media_decode.wait",
                "media_decode",
                "unattributed",
                "encode",
                "respond",
            ],
        ),
        (4, ["receive", "encode", "respond"]),
        (5, ["receive", "preprocess", "respond"]),
    ],
)
def test_examples_run(tmp_path, number, stages):
    """Each example runs by itself and records the stages that it shows."""
    run(EXAMPLES[number] + SERVED * (number == 5), tmp_path)
    (request,) = requests_of(tmp_path)
    assert [stage for stage, _ in groupby(interval.stage for interval in partition(request).ttft)] == stages


def test_what_was_recorded_is_read_as_shown(tmp_path):
    """The example that reads prints the stages of the first example."""
    run(EXAMPLES[0], tmp_path)
    lines = run(EXAMPLES[1], tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == [
        "receive",
        "preprocess",
        "unattributed",
        "prefill",
        "respond",
    ]
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("number", [0, 2, 3, 4, 5])
def test_examples_do_nothing_without_a_folder(tmp_path, number, monkeypatch):
    """Without a folder each example runs all the same, and leaves nothing."""
    program = tmp_path / "example.py"
    program.write_text(EXAMPLES[number])
    environment = {name: value for name, value in os.environ.items() if name != "STAGETRACE_SPOOL"}
    subprocess.run([sys.executable, program], env=environment, check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [program]


def test_every_call_is_on_the_page():
    """The table names the calls of the package, and no other."""
    table = PAGE[PAGE.index("| call |") :].split("\n\n", 1)[0]
    named = re.findall(r"^\| `([\w.]+)\(", table, flags=re.MULTILINE)
    calls = {
        name for name in stagetrace.__all__ if name.islower() and not name.startswith(("_", "is_", "read_"))
    }
    assert {name for name in named if not name.startswith("ticket.")} == calls - {"partition"}
    assert {name.removeprefix("ticket.") for name in named if name.startswith("ticket.")} == {
        "work",
        "cancel",
    }


def test_every_fact_is_on_the_page():
    """The page names every fact of requests and items, and where what is counted is told."""
    assert [
        fact for fact in (*Facts.__annotations__, *ItemFacts.__annotations__) if f"`{fact}`" not in PAGE
    ] == []
    assert [misuse for misuse in Misuse if f"`{misuse.name.lower()}`" not in PAGE] == []


def test_counted_reasons_are_those_of_the_code():
    """Every reason on the page is one that the code counts."""
    table = PAGE[PAGE.index("| in the report |") :].split("\n\n", 1)[0]
    named = set(re.findall(r"`(\w+)`", table)) - {misuse.name.lower() for misuse in Misuse}
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "stagetrace").glob("*.py"))
    assert {name for name in named if f'"{name}"' not in sources} == set()


def test_stages_that_can_be_recorded_are_work_and_transfers():
    """Every stage that is no wait can be recorded, and waited for when it has a wait."""
    assert set(get_args(WorkStage)) == {stage for stage in Stage if stage.kind in {Kind.WORK, Kind.TRANSFER}}
    waits = {Stage(stage.value.removesuffix(".wait")) for stage in Stage if stage.kind is Kind.WAIT}
    assert set(get_args(WaitedStage)) == waits
