"""An analysis as Markdown, for a pull request or a wiki: answers first, then tables.

It is plain CommonMark with GitHub's tables.  Names from the data neither format
nor link nor mention anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from stagetrace_analyzer.reports.document import Advice, ClassSection, Document, Table, document_of
from stagetrace_analyzer.reports.words import printable
from stagetrace_analyzer.results import Analysis

_MARKUP: Final = re.compile(r"[\\`*_{}<>|~$&]|!(?=\[)|\](?=[(\[:])")
_SUMMONS: Final = re.compile(r"@|#(?=\d)|:(?=//)|www(?=\.)", re.IGNORECASE)
_NOTHING: Final = "&#8203;"


def render_markdown(analysis: Analysis) -> str:
    """Return the analysis as Markdown that ends with a newline."""
    return "\n\n".join(_blocks(document_of(analysis))) + "\n"


def _blocks(document: Document) -> Iterator[str]:
    yield "# Where requests wait"
    yield from (f"> {_plain(remark)}" for remark in document.about)
    yield f"{_plain(document.headline)}."
    if document.selection:
        yield f"{_plain(document.selection)}."
    yield from (f"> **{_plain(alarm)}**" for alarm in document.alarms)
    yield "\n".join(f"- **{_plain(title)}**: {_plain(answer)}" for title, answer in document.answers)
    if document.advice:
        yield "## Cheaper things to try first"
        yield "\n".join(map(_advice, document.advice))
    for section in document.classes:
        yield from _section(section)
    yield "## Load"
    yield from _table(document.load)
    yield "## Data quality"
    yield "\n".join(f"- {_plain(label)}: {_plain(text)}" for label, text in document.quality)


def _advice(advice: Advice) -> str:
    remedy = advice.remedy
    option = "" if remedy.option is None else f" Option: `{remedy.option}`."
    return (
        f"- {_escaped(remedy.advice)}{option} Worked if: {_escaped(remedy.check)} "
        f"For: {_plain(', '.join(advice.classes))}. Source: {_escaped(remedy.source)}"
    )


def _section(section: ClassSection) -> Iterator[str]:
    yield f"## {_plain(section.name)}"
    yield f"{_plain(section.counts)}."
    if section.remarks:
        yield _list(section.remarks)
    for table in section.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    title = f"{table.title} (*: wait)" if table.has_waits else table.title
    lines = [
        _row(_plain(title), *map(_plain, table.columns)),
        _row("---", *("---" if name in table.worded else "--:" for name in table.columns)),
        *(
            _row(_plain(f"{row.name} *" if row.wait else row.name), *map(_plain, row.cells))
            for row in table.rows
        ),
    ]
    yield "\n".join(lines)
    if table.remarks:
        yield _list(table.remarks)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _list(remarks: tuple[str, ...]) -> str:
    return "\n".join(f"- {_plain(remark)}" for remark in remarks)


def _plain(text: str) -> str:
    """Return a text that may hold names from the data: nothing in it formats, links or summons."""
    return _SUMMONS.sub(lambda found: found[0] + _NOTHING, _escaped(text))


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: "\\" + found[0], printable(text))
