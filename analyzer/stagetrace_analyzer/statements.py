"""The queries of the folder ``sql/``."""

from __future__ import annotations

import importlib.resources
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb


def sql(name: str) -> str:
    """Return the query of a file below ``sql/``."""
    return (importlib.resources.files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def rows(connection: duckdb.DuckDBPyConnection, name: str) -> list[Any]:
    """Run a query; the rows have its columns as attributes."""
    cursor = connection.execute(sql(name))
    columns = [column[0] for column in cursor.description or ()]
    return [SimpleNamespace(**dict(zip(columns, values, strict=True))) for values in cursor.fetchall()]
