from __future__ import annotations

import re

import analyses
import pytest
from analyses import HOSTILE, everything, report
from markdown_it import MarkdownIt

from stagetrace_analyzer.reports.markdown import render_markdown

HEADINGS = [
    "Where requests wait",
    "Cheaper things to try first",
    "[mixture] text/short",
    "[mixture] image/long (post)",
    '<a href="//evil">x</a> | `b` **c** %{y} $d$ &lt; "?[31m?# e (post)',
    "Load",
    "Data quality",
]


def tokens(text: str):
    """What GitHub's Markdown makes of it, flat."""
    for token in MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(text):
        yield token
        yield from token.children or ()


def rendered(text: str) -> str:
    return MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)


def headings(text: str) -> list[str]:
    """The texts of the headings."""
    found = list(tokens(text))
    return [
        "".join(part.content for part in found[place + 1].children)
        for place, token in enumerate(found)
        if token.type == "heading_open"
    ]


def test_answers_come_first() -> None:
    """What the data are, alarms and answers stand before advice and tables."""
    text = render_markdown(everything())
    assert headings(text) == HEADINGS
    top = text[: text.index("## ")]
    for said in ("Simulated requests", "**OVERLOADED", "- **[mixture] text/short**: 6.0 % did not end well."):
        assert said in top


def test_tables_are_tables() -> None:
    """Every table has as many cells in each row as it has columns, whatever the names."""
    text = render_markdown(everything())
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 4 + 4 + 3 + 1
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    assert rendered(text).count("<table>") == len(tables)


@pytest.mark.parametrize(
    "name",
    [
        HOSTILE,
        "<script>alert(1)</script>",
        "[x](javascript:alert(1)) ![i](//evil/i.png) [y][z]",
        "a\n\n# heading\n\n- list\n\n[z]: //evil",
        "``` fence ` **bold** _it_ ~~no~~ \\ | cell |",
        "<!-- comment",
        "[",
        "]",
        "![",
    ],
)
def test_names_neither_format_nor_link(name: str) -> None:
    """A hostile name is text: no element comes of it that a harmless one does not have."""
    harmless = [token.type for token in tokens(render_markdown(analyses.analysis(report("x", "y"))))]
    found = list(tokens(render_markdown(analyses.analysis(report(name, name)))))
    kinds = [token.type for token in found]
    # Characters that are escaped make texts of their own.
    assert [k for k in kinds if not k.startswith("text")] == [k for k in harmless if not k.startswith("text")]
    shown = "".join(character if character.isprintable() else "?" for character in name)
    texts = ["".join(part.content for part in token.children or ()) for token in found]
    # What summons somebody is broken by a space of no width.
    assert any(f"[{shown}] {shown}" in text.replace("\u200b", "") for text in texts)


def test_names_summon_nobody() -> None:
    """No mention of a person, an issue or an address is left in a name, not even when it is rendered."""
    text = render_markdown(analyses.analysis(report("@somebody #12 https://evil www.evil", None)))
    shown = rendered(text)
    for summons in ("@somebody", "#12", "https://evil", "www.evil"):
        assert summons not in text
        assert summons not in shown


def test_an_option_is_code_and_its_source_a_text() -> None:
    """A remedy has its option, how one sees that it worked, whom it is for and where it is from."""
    text = render_markdown(everything())
    assert (
        "- Lower the token budget of a step, so that a step is shorter. Option: `--max-num-batched-tokens`. "
        "Worked if: prefill.wait with the reason step falls; throughput may fall too. "
        "For: [mixture] text/short. Source: https://docs.vllm.ai/en/stable/configuration/optimization/"
    ) in text
