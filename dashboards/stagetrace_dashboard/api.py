"""The JSON twin of every page, and its tables as files."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from flask import Flask, Response, request

from stagetrace._version import __version__
from stagetrace.errors import StagetraceError, UsageError
from stagetrace_dashboard.pages import PAGES
from stagetrace_dashboard.view import PARAMETERS, View, parse_view

if TYPE_CHECKING:
    from stagetrace_dashboard.page import Table
    from stagetrace_dashboard.source import Source

_BAD: Final = 400
_UNAVAILABLE: Final = 503
_NOT_FOUND: Final = 404
_ROWS_AT_ONCE: Final = 1000
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""What makes a spreadsheet take a text for a formula."""


def register(server: Flask, source: Source) -> None:
    """Add ``/api/...`` to a server."""

    @server.get("/api/status")
    def status() -> Response:
        return _answer(lambda: _status(source))

    @server.get("/api/<page>")
    def twin(page: str) -> Response:
        return _answer(lambda: _twin(page, source))

    @server.get("/api/<page>/<table>.csv")
    def table(page: str, table: str) -> Response:
        return _answer(lambda: _table(page, table, source))

    @server.route("/api/", defaults={"rest": ""})
    @server.route("/api/<path:rest>")
    def unknown(rest: str) -> Response:
        return _error(_NOT_FOUND, f"there is nothing at /api/{rest[:40]}", f"try {', '.join(_addresses())}")


def _addresses() -> Iterator[str]:
    yield "/api/status"
    for page in PAGES.values():
        yield f"/api/{page.name}"
        yield from (f"/api/{page.name}/{table}.csv" for table in page.tables)


def _answer(make: Callable[[], Any]) -> Response:
    try:
        made = make()
    except UsageError as error:
        return _error(_BAD, error.message, error.hint)
    except StagetraceError as error:
        return _error(_UNAVAILABLE, error.message, error.hint)
    if isinstance(made, Response):
        return made
    return Response(json.dumps(plain(made), allow_nan=False) + "\n", mimetype="application/json")


def _error(status: int, message: str, hint: str | None) -> Response:
    text = json.dumps({"error": message, "hint": hint}) + "\n"
    return Response(text, status=status, mimetype="application/json")


def _status(source: Source) -> dict[str, Any]:
    data = source.data
    newest = data.span.newest_unix_ns
    return {
        "version": __version__,
        "state": data.number,
        "read_unix_ns": data.read_unix_ns,
        "span": data.span,
        "age_ns": None if newest is None else time.time_ns() - newest,
        "problem": source.problem,
        "selection": data.scope.selection.described(),
        "addresses": list(_addresses()),
        "parameters": list(PARAMETERS),
    }


def _view(page: str) -> View:
    if page not in PAGES:
        raise UsageError(f"there is no page {page[:40]!r}", hint=f"pages are {', '.join(PAGES)}")
    return parse_view(page, request.query_string.decode("ascii", "replace"))


def _twin(page: str, source: Source) -> Any:
    view = _view(page)
    return PAGES[page].twin(view, source.data)


def _table(page: str, name: str, source: Source) -> Response:
    view = _view(page)
    make = PAGES[page].tables.get(name)
    if make is None:
        raise UsageError(f"there is no table {name[:40]!r}", hint=f"try {', '.join(_addresses())}")
    response = Response(_csv(make(view, source.data)), mimetype="text/csv")
    response.headers["Content-Disposition"] = f'attachment; filename="stagetrace-{page}-{name}.csv"'
    return response


def _csv(table: Table) -> Iterator[str]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.columns)
    for number, row in enumerate(table.rows, start=1):
        writer.writerow([_cell(value) for value in row])
        if number % _ROWS_AT_ONCE == 0:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet computes."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


def plain(value: Any) -> Any:
    """Return dataclasses, named tuples and mappings as JSON has them; a number that is none is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, Enum | np.generic):
        return plain(value.value if isinstance(value, Enum) else value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if isinstance(value, str | int | None) else [plain(item) for item in value]


def _key(key: object) -> str:
    return "/".join(map(str, key)) if isinstance(key, tuple) else str(key)
