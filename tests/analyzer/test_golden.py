"""Whole reports against documents that are kept; ``golden/README.md`` says how to renew them."""

from __future__ import annotations

import importlib.resources
import io
import os
import re
from pathlib import Path

import pytest
from analyses import everything

from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.reports.html import render_html
from stagetrace_analyzer.reports.json_report import render_json
from stagetrace_analyzer.reports.markdown import render_markdown
from stagetrace_analyzer.reports.text import write_text

GOLDEN = Path(__file__).parent / "golden"


def text_of(analysis) -> str:
    file = io.StringIO()
    write_text(analysis, file)
    return file.getvalue()


def html_without_scripts(analysis) -> str:
    """The page without what is plotly's, or derived from it."""
    page = re.sub(r"<script.*?</script>\n?", "", render_html(analysis), flags=re.DOTALL)
    return re.sub(r"'sha256-[^']+'", "'sha256-'", page)


RENDERERS = {"txt": text_of, "json": render_json, "md": render_markdown, "html": html_without_scripts}


def compare(name: str, found: str) -> None:
    """Compare with the kept document, or keep this one."""
    path = GOLDEN / name
    if os.environ.get("RENEW_GOLDEN"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", RENDERERS)
def test_everything_that_a_report_can_say(suffix: str) -> None:
    """Every format says everything as the kept document does."""
    compare(f"everything.{suffix}", RENDERERS[suffix](everything()))


@pytest.mark.parametrize("suffix", ["txt", "md"])
def test_what_is_found_in_a_dataset(suffix: str, two_classes, tmp_path: Path) -> None:
    """The whole way, from rows on disk to words."""
    analysis = analyze([two_classes.write(tmp_path / "data")], load_rules())
    compare(f"two_classes.{suffix}", RENDERERS[suffix](analysis))


def test_the_page_shows_the_report_of_the_recorded_run() -> None:
    """The excerpt in the documentation is the top of what the run that ships with the package gives."""
    recorded = importlib.resources.files("stagetrace_analyzer") / "demo" / "recorded" / "dataset"
    with importlib.resources.as_file(recorded) as folder:
        text = text_of(analyze([folder], load_rules()))
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    (excerpt,) = re.findall(r"^```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert text.startswith(excerpt)
