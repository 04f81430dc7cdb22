"""Columns of a dataset made from arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Column: TypeAlias = pa.Array[Any] | NDArray[Any]


def rows_of(schema: pa.Schema, count: int, columns: Mapping[str, Column]) -> pa.RecordBatch:
    """Return ``count`` rows of a table; a column that is not named is unknown in all of them."""
    arrays = []
    for field in schema:
        column = columns.get(field.name)
        if column is None:
            column = pa.array([None], field.type).take(pa.array(np.zeros(count, np.int64)))
        arrays.append(column if isinstance(column, pa.Array) else pa.array(column))
    return pa.RecordBatch.from_arrays(arrays, names=schema.names)


def known(values: NDArray[Any], where: NDArray[np.bool_]) -> pa.Array[Any]:
    """Return values that are unknown where ``where`` is False."""
    column: pa.Array[Any] = pa.array(values, mask=~where)
    return column


def chosen(
    names: Sequence[str | None], which: NDArray[np.int64], where: NDArray[np.bool_] | None = None
) -> pa.Array[Any]:
    """Return the name with the number ``which`` in each row; unknown where ``where`` is False."""
    values = pa.array(names, pa.string()).dictionary_encode()
    return values.take(pa.array(which, pa.int64(), mask=None if where is None else ~where))


def same(name: str | None, count: int) -> pa.Array[Any]:
    """Return the same name in every row."""
    return chosen([name], np.zeros(count, np.int64))


def numbered(prefix: str, numbers: NDArray[np.int64]) -> pa.Array[Any]:
    """Return names that end in a number each."""
    return pa.array(np.char.add(prefix, numbers.astype(np.str_)))
