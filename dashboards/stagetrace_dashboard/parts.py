"""Parts that pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import dash_mantine_components as dmc
import plotly.graph_objects as go
from dash import html
from dash.development.base_component import Component

from stagetrace_analyzer.figures.palette import GROUNDS, Theme
from stagetrace_analyzer.reports.document import Table as Figures
from stagetrace_dashboard.elements import Content, Graph, Link, Pictures, Table
from stagetrace_dashboard.theme import GRAPH_CONFIG


def spoken(label: str) -> dict[str, Any]:
    """Return the properties that give a component a name for those who hear the page read."""
    return {"aria-label": label}


def card(
    title: Content, *children: Content, actions: Sequence[Component] = (), note: str | None = None
) -> Component:
    """Return a card with a heading, and links or buttons beside it."""
    heading = dmc.Group(
        [dmc.Title(title, order=2, size="h5"), dmc.Group(list(actions), gap="xs", wrap="nowrap")],
        justify="space-between",
        align="flex-start",
        wrap="nowrap",
        mb="xs",
    )
    said = [] if note is None else [dmc.Text(note, size="sm", c="dimmed", mb="xs")]
    return html.Section(dmc.Paper([heading, *said, *children], p="md", withBorder=True))


def graph(
    name: str, figure: go.Figure, theme: Theme, tells: Literal["time", "bar"] | None = None
) -> Component:
    """Return a figure.

    Args:
        name: Its name, once on a page; pictures are named after it.
        figure: What it shows; it is given the ground that its picture needs.
        theme: Of the page.
        tells: What somebody chooses who points at it: a time by dragging, a class by its bar.
    """
    figure.update_layout(paper_bgcolor=GROUNDS[theme].surface)
    return Graph(name, figure, GRAPH_CONFIG, tells=tells)


def picture_buttons(name: str) -> list[Component]:
    """Return the buttons that save a figure as a picture."""
    return [Pictures(name)]


def download(text: str, href: str, **identity: Any) -> Component:
    """Return a link to a file, perhaps with an ``id``."""
    return html.A(
        text, href=href, download="", className="st-button", **identity, **spoken(f"download {text}")
    )


def link(text: Content, href: str, *, stays: bool = False) -> Component:
    """Return a link to another view, which opens without loading the page anew.

    Args:
        text: What is clicked on.
        href: The address.
        stays: Whether it changes only what is beside it, so that nobody is taken to the top.
    """
    return Link(text, href, stays=stays)


def facts(pairs: Iterable[tuple[str, Content]]) -> Component:
    """Return names with values, a line each."""
    return Table([("", False), ("", False)], [list(pair) for pair in pairs], facts=True)


def table(columns: Mapping[str, bool], rows: Iterable[Sequence[Content]]) -> Component:
    """Return a table.

    Args:
        columns: Whether a column has figures, which stand at its right, by its title.
        rows: Cells in the order of the columns.
    """
    return Table(list(columns.items()), [list(cells) for cells in rows])


def figure_table(found: Figures, *, with_remarks: bool = True) -> Component:
    """Return a table of a report; waits are marked with a star."""
    columns = {found.title + (" (* wait)" if found.has_waits else ""): False}
    # Two columns may have one title; a zero-width space makes them two keys.
    for place, column in enumerate(found.columns):
        columns[column + "\u200b" * place] = column not in found.worded
    rows = [[f"{row.name} *" if row.wait else row.name, *row.cells] for row in found.rows]
    remarks = found.remarks if with_remarks else ()
    return html.Div(
        [
            table(columns, rows),
            *(dmc.Text(remark, size="xs", c="dimmed", className="st-wrap") for remark in remarks),
        ]
    )


def nothing(title: str, why: str, command: str | None = None) -> Component:
    """Return what stands where there is nothing to show: why, and the command that would bring it."""
    said: list[Component] = [dmc.Text(why)]
    if command is not None:
        said.append(dmc.Code(command, block=True))
    alert = dmc.Alert(dmc.Stack(said, gap="xs"), title=title, color="gray", variant="light")
    return html.Div(alert, role="status")


def problem(message: str, hint: str | None) -> Component:
    """Return what stands where something went wrong."""
    said = [dmc.Text(message, className="st-wrap")]
    if hint is not None:
        said.append(dmc.Text(hint, size="sm", c="dimmed", className="st-wrap"))
    return html.Div(dmc.Alert(said, title="This cannot be shown", color="red", variant="light"), role="alert")


def stack(*children: Component) -> Component:
    """Return parts one below the other."""
    return dmc.Stack(list(children), gap="md")
