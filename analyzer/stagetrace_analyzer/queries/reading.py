"""Running the SQL files of this package: parameters in, typed rows out."""

from __future__ import annotations

import functools
import importlib.resources
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import duckdb

Row = TypeVar("Row", bound=NamedTuple)


@functools.cache
def sql_of(name: str) -> str:
    """Return the text of a SQL file of this package."""
    return (importlib.resources.files(__package__) / f"{name}.sql").read_text(encoding="utf-8")


def fetch(
    connection: duckdb.DuckDBPyConnection, name: str, row: type[Row], parameters: dict[str, Any] | None = None
) -> list[Row]:
    """Run a SQL file and return its rows.

    Args:
        connection: From `open_dataset`, or a cursor of it.
        name: Name of the file, without its ending.
        row: Type whose fields are the columns of the result, in order.
        parameters: Values by name.

    Raises:
        ValueError: The columns are not the fields.
    """
    cursor = connection.execute(sql_of(name), parameters or {})
    columns = tuple(column[0] for column in cursor.description or ())
    if columns != row._fields:
        raise ValueError(f"{name}.sql has the columns {columns}, not {row._fields}")
    return [row(*values) for values in cursor.fetchall()]
