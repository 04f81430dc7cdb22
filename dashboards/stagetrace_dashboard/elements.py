"""Components that Dash has not, for what no callback reaches; ``elements.js`` draws them.

Dash puts something around every component so that callbacks can reach it, and
looks at all of it whenever anything changes.  For the hundreds of cells of a page
this takes longer than all else, so a page is one `Static` with the rest inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from dash.development.base_component import Component

Content: TypeAlias = Component | str | Sequence[Any]


class _Element(Component):
    _namespace = "stagetrace_dashboard"

    def __init__(self, **properties: Any) -> None:
        self._type = type(self).__name__
        self._prop_names = list(properties)
        self._base_nodes = list(properties)
        self._valid_wildcard_attributes = []
        super().__init__(**properties)  # type: ignore[no-untyped-call]


class Static(_Element):
    """Components that no callback reaches, neither by an id nor from inside."""

    def __init__(self, content: Content) -> None:
        super().__init__(content=content)


class Link(_Element):
    """A link to another view, which opens without loading the page anew.

    Args:
        text: What is clicked on.
        href: The address.
        stays: Whether it changes only what is beside it, so that nobody is taken to the top.
    """

    def __init__(self, text: Content, href: str, *, stays: bool = False) -> None:
        super().__init__(text=text, href=href, stays=stays)


class Table(_Element):
    """A table.

    Args:
        columns: Titles, and whether a column has figures, which stand at its right.
        rows: Cells in the order of the columns.
        facts: Whether it has no titles, and the first column names what is in the others.
    """

    def __init__(
        self, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[Content]], *, facts: bool = False
    ) -> None:
        super().__init__(columns=columns, rows=rows, facts=facts)


class Graph(_Element):
    """A figure that is drawn when it comes into the window, or before if there is nothing else to do.

    Args:
        name: Its name, once on a page.
        figure: As plotly has it.
        config: As plotly has it.
        tells: What is told of it when somebody points: a ``time`` that was dragged over, or a
            ``bar`` that was clicked on; see `stagetrace_dashboard.shell`.
    """

    def __init__(
        self, name: str, figure: Any, config: Any, *, tells: Literal["time", "bar"] | None = None
    ) -> None:
        super().__init__(name=name, figure=figure, config=config, tells=tells)


class Pictures(_Element):
    """Buttons that save a figure as a picture, by its name."""

    def __init__(self, graph: str) -> None:
        super().__init__(graph=graph)
