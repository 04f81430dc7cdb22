"""The documentation says what is so: its commands run, its tables are the code's, its figures the data's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from stagetrace.cli import main
from stagetrace.stages import Outcome, Reason, Stage
from stagetrace_analyzer.dataset import TABLES
from stagetrace_vllm.http import PATHS
from stagetrace_vllm.proof import UNPROVED

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def read(name):
    """A page's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, language):
    """The code blocks of a language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)


def rows(text, header):
    """The cells of the table that begins with a header row."""
    table = text[text.index(header) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder in which the recorded demo has been shown, as the README's reader has it."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "my-classes.toml").write_text(blocks(read("docs/classes.md"), "toml")[0])
    shown = subprocess.run(
        [sys.executable, "-m", "stagetrace", "demo", "--recorded"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return folder, shown.stdout


def test_excerpt_of_the_report_is_of_the_report(demo):
    """Every line of the README's excerpt stands in the recorded demo's report."""
    _, report = demo
    (excerpt,) = blocks(read("README.md"), "text")
    assert [line for line in excerpt.splitlines() if line not in report.splitlines()] == []


COMMANDS = [
    line.removeprefix("$ ")
    for block in blocks(read("README.md"), "console")
    for line in block.splitlines()
    if line.strip().startswith("$ stagetrace analyze stagetrace-demo")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_readme_run(demo, command, monkeypatch, capsys):
    """Each analyze command of the README runs on the demo's folder."""
    monkeypatch.chdir(demo[0])
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().err == ""


def test_there_are_commands_to_run():
    """The README shows how to analyze."""
    assert len(COMMANDS) == 5


def test_make_targets_of_the_readme_exist():
    """Every ``make`` target named in the documentation is in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), flags=re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`make ([a-z]+)`|^\$ make ([a-z]+)", read(page))
        for name in name
        if name
    }
    assert named <= targets
    assert {"demo", "test", "check", "bench"} <= targets


def test_links_lead_somewhere():
    """Every relative link of every page leads to a file."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", read(page)):
            if "://" not in target:
                assert (page.parent / target).exists(), (page.name, target)


def test_table_of_stages_is_the_stage_model():
    """The page names every stage, in order, with its kind."""
    table = rows(read("docs/stages.md"), "| stage | kind |")
    assert [(row[0], row[1]) for row in table] == [(stage.value, stage.kind.value) for stage in Stage]


def test_traced_paths():
    """The page names every path whose requests are traced, and no other."""
    table = rows(read("docs/stages.md"), "| requests | paths |")
    assert sorted(re.findall(r"/[\w/]+", " ".join(row[1] for row in table))) == sorted(PATHS)


def test_table_of_reasons_is_the_stage_model():
    """The page names every reason, in order."""
    table = rows(read("docs/stages.md"), "| reason | meaning |")
    assert [row[0] for row in table] == [reason.value for reason in Reason]


def test_table_of_outcomes_is_the_stage_model():
    """The page names every outcome, in order, and the tables of ends use no other outcome and no other stage."""
    page = read("docs/ends.md")
    assert [row[0] for row in rows(page, "| outcome | meaning |")] == [outcome.value for outcome in Outcome]
    ends = rows(page, "| what was done |")
    assert {row[1] for row in ends} == {outcome.value for outcome in Outcome}
    assert set(re.findall(r"[\w.]+", " ".join(row[3] for row in ends))) <= {stage.value for stage in Stage}


@pytest.mark.parametrize("table", TABLES)
def test_columns_of_the_dataset_are_documented(table):
    """The page names every column of every table, in order, and no other."""
    section = re.search(
        rf"^## {table}: [^\n]*\n(.*?)\n", read("docs/dataset.md"), flags=re.MULTILINE | re.DOTALL
    )
    outside_parentheses = re.sub(r"\([^)]*\)", "", section[1])
    assert re.findall(r"`(\w+)`", outside_parentheses) == TABLES[table].names


def test_one_request_is_the_recorded_one(demo, monkeypatch):
    """The table of the worked example is what its query gives on the recorded run."""
    monkeypatch.chdir(demo[0])
    page = read("docs/one-request.md")
    (query,) = blocks(page, "sql")
    found = [
        [horizon, stage, reason or "", f"{begin:.3f}", f"{took:.3f}"]
        for horizon, stage, reason, begin, took in duckdb.sql(query).fetchall()
    ]
    assert rows(page, "| horizon | stage |") == found
    sums = {
        horizon: sum(float(row[4]) for row in found if row[0] in {"both", horizon})
        for horizon in ("ttft", "completion")
    }
    claimed = [float(claim) for claim in re.findall(r"to (\d+\.\d{3}) ms", page)]
    assert claimed == pytest.approx([sums["ttft"], sums["completion"]], abs=0.02)


def test_query_of_the_dataset_page_runs(demo, monkeypatch):
    """The example query runs on the demo's dataset and finds waits."""
    monkeypatch.chdir(demo[0])
    (query,) = blocks(read("docs/dataset.md"), "sql")
    assert duckdb.sql(query).fetchall()[0][0] == "prefill.wait"


def test_python_examples_run(tmp_path):
    """What the README's first Python example records is read by its second one."""
    recording, reading = blocks(read("README.md"), "python")
    spool = tmp_path / "stagetrace-demo" / "spool"
    for example in (recording, reading):
        done = subprocess.run(
            [sys.executable, "-c", example],
            cwd=tmp_path,
            env=os.environ | {"STAGETRACE_SPOOL": str(spool)},
            capture_output=True,
            text=True,
            check=True,
        )
    assert re.fullmatch(r"\w+-1 ok \d+\.\d+ ms waited\n", done.stdout)


def test_settings_in_the_documentation_exist():
    """Every environment variable of ours that a page names is one that the code reads."""
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("stagetrace", "instrumentation", "analyzer", "exporter", "dashboards")
        for path in (ROOT / folder).rglob("*.py")
    )
    named = {name for page in PAGES for name in re.findall(r"STAGETRACE_[A-Z_]+", read(page))}
    assert named
    assert {name for name in named if f'"{name}"' not in sources} == set()


def test_what_is_not_proved_is_said():
    """The page of proofs names every stage and reason that no live test has reached, as the doctor does."""
    assert rows(read("docs/injection.md"), "| what | why |") == [[str(w), why] for w, why in UNPROVED.items()]
