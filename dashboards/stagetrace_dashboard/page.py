"""What a page is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dash.development.base_component import Component

from stagetrace_analyzer.figures.palette import Theme
from stagetrace_dashboard.data import Data
from stagetrace_dashboard.view import View


class Table(NamedTuple):
    """A table as a file."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]


Layout: TypeAlias = Callable[[View, Data, Theme], Component]
Twin: TypeAlias = Callable[[View, Data], Any]


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        name: As in the address, ``/name``.
        title: As in the menu.
        layout: What it shows of a view.
        twin: The same as dataclasses, named tuples, lists and mappings: its JSON.
        filters: What can be chosen above it, names of fields of a view.
        tables: Its tables as files, by name.
        parts: Choices that its parts follow themselves; when one of them changes the page stays.
        bars: What a click on the bars of its figures chooses, by their place; None if nothing.
        needs_requests: Whether there is nothing on it without any request.
        is_static: Whether no callback reaches into it, see `stagetrace_dashboard.elements.Static`.
        is_live: Whether it is shown anew when there is new data; if not, its parts see to it.  Raises
            `DataError` if that cannot be told.
    """

    name: str
    title: str
    layout: Layout
    twin: Twin
    filters: tuple[str, ...] = ()
    tables: Mapping[str, Callable[[View, Data], Table]] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    bars: Callable[[View, Data], Sequence[Mapping[str, str]]] | None = None
    needs_requests: bool = True
    is_static: bool = True
    is_live: Callable[[View, Data], bool] = lambda _view, _data: True

    def csv_href(self, view: View, table: str) -> str:
        """Address of a table as a file."""
        return f"/api/{self.name}/{table}.csv{view.search}"
