"""An analysis as text for a terminal: first the answer in words, then tables, then data quality.

The text fits into 80 columns and has no colour codes unless it goes to a terminal.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from stagetrace_analyzer.reports.document import Advice, ClassSection, Document, Table, document_of
from stagetrace_analyzer.reports.words import printable

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import RenderableType

    from stagetrace_analyzer.results import Analysis, Remedy

FILE_WIDTH: Final = 80
"""Columns of a text that does not go to a terminal."""

_LABEL_WIDTH: Final = 32
_NAME_WIDTH: Final = 22
_ADVICE_TOLD: Final = 6


def write_text(analysis: Analysis, file: TextIO) -> None:
    """Write the report to ``file``, in colour and in the terminal's width if it is a terminal."""
    terminal = file.isatty()
    console = Console(
        file=file,
        width=None if terminal else FILE_WIDTH,
        color_system="auto" if terminal else None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(Group(*_report(document_of(analysis))))
    # Tables are padded to the full width.
    file.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def render_text(analysis: Analysis) -> str:
    """Return the report as a file has it."""
    text = io.StringIO()
    write_text(analysis, text)
    return text.getvalue()


def _report(document: Document) -> Iterator[RenderableType]:
    for remark in document.about:
        yield _text(remark, "bold yellow")
    yield _text(document.headline, "bold")
    if document.selection:
        yield _text(document.selection)
    for alarm in document.alarms:
        yield _text(alarm, "bold red")
    yield Text()
    yield _pairs(document.answers, "bold")
    if document.advice:
        yield Text()
        yield from _advice(document.advice)
    for section in document.classes:
        yield Text()
        yield from _section(section)
    yield Text()
    yield from _table(document.load)
    yield Text()
    yield _text("Data quality", "bold")
    yield Padding(_pairs(document.quality, ""), (0, 0, 0, 2))


def _advice(advice: Sequence[Advice]) -> Iterator[RenderableType]:
    """Tell the first remedies by the classes that they are for; other formats have all, and their sources."""
    yield _text("Cheaper things to try first", "bold")
    by_classes: dict[tuple[str, ...], list[Remedy]] = {}
    for found in advice[:_ADVICE_TOLD]:
        by_classes.setdefault(found.classes, []).append(found.remedy)
    for classes, remedies in by_classes.items():
        yield _text(f"for {', '.join(classes)}:")
        for remedy in remedies:
            option = "" if remedy.option is None else f" [{remedy.option}]"
            yield _hanging(f"- {remedy.advice}{option}")
            yield Padding(_text(f"Worked if: {remedy.check}", "dim"), (0, 0, 0, 2))
    if more := len(advice[_ADVICE_TOLD:]):
        yield _text(f"and {more} more, each with its source: --format md, json or html", "dim")


def _hanging(text: str) -> RenderableType:
    """Indent all lines of a list's item but the first."""
    grid = Grid.grid(padding=(0, 1))
    grid.add_row(_text(text[:1]), _text(text[2:]))
    return grid


def _section(section: ClassSection) -> Iterator[RenderableType]:
    yield _text(f"{section.name}: {section.counts}", "bold")
    for remark in section.remarks:
        yield Padding(_text(remark, "dim"), (0, 0, 0, 2))
    for table in section.tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[RenderableType]:
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    title = f"{table.title} (*: wait)" if table.has_waits else table.title
    grid.add_column(printable(title), min_width=_NAME_WIDTH, no_wrap=True)
    for name in table.columns:
        grid.add_column(name, justify="left" if name in table.worded else "right", overflow="fold")
    for row in table.rows:
        mark, style = ("* ", "yellow") if row.wait else ("  ", "")
        grid.add_row(_text(mark + row.name), *map(_text, row.cells), style=style)
    yield grid
    for remark in table.remarks:
        yield Padding(_text(remark, "dim"), (0, 0, 0, 2))


def _pairs(pairs: Sequence[tuple[str, str]], style: str) -> Grid:
    grid = _grid()
    for label, text in pairs:
        # The whole name of a class heads its tables.
        short = label if len(label) <= _LABEL_WIDTH else f"{label[: _LABEL_WIDTH - 3]}..."
        grid.add_row(_text(short, style), _text(text))
    return grid


def _grid() -> Grid:
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, overflow="crop", max_width=_LABEL_WIDTH)
    grid.add_column()
    return grid


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
