"""The page about simulation says what is so: its examples run, and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from stagetrace_analyzer import simulation
from stagetrace_analyzer.dataset import is_dataset

PAGE = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("number", "dataset"), [(0, "simulated"), (1, "scaled"), (2, "served")])
def test_examples_run(number, dataset, tmp_path):
    """Each example runs by itself and leaves its dataset; what it prints stands on the page."""
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[number]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not done.stdout or f"`{done.stdout.strip()}`" in PAGE
    assert is_dataset(tmp_path / dataset)
    assert len(EXAMPLES) == 3


def test_every_module_is_on_the_page():
    """The table names the modules, and no other."""
    table = PAGE[PAGE.index("| module |") :].split("\n\n", 1)[0]
    named = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    modules = {path.stem for path in Path(simulation.__file__).parent.glob("*.py")}
    assert set(named) == modules - {"__init__", "columns"}
