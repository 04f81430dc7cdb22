"""Datasets that others wrote: whether what every row must have is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq

from stagetrace.errors import DataError
from stagetrace_analyzer.statements import rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import duckdb
    import pyarrow as pa

DERIVED: Final = frozenset({"dataset", "fault", "modality", "traffic_class"})
"""Names that the queries give to what they work out; a column of a file must not come in between."""


def check_required(
    connection: duckdb.DuckDBPyConnection, folders: Sequence[Path], tables: Mapping[str, pa.Schema]
) -> None:
    """Check that every row has what it must have, and that a number names one request.

    Args:
        connection: The opened datasets.
        folders: Their folders, by number.
        tables: What their tables must have.

    Raises:
        DataError: A column that must not have unknown values has some, a column has a name of
            `DERIVED`, or two requests of a dataset have one number.
    """
    for folder in folders:
        for name, schema in tables.items():
            for path in sorted((folder / name).glob("*.parquet")):
                _check_part(path, schema)
    for row in rows(connection, "numbers"):
        raise DataError(
            f"{folders[row.dataset]}: {row.again:,} of its requests have a number that another one has",
            hint="a dataset numbers its requests; keep each in a folder of its own, and name all folders",
        )


def _check_part(path: Path, schema: pa.Schema) -> None:
    with pq.ParquetFile(path) as file:
        if taken := sorted(name for name in file.schema.names if name.lower() in DERIVED):
            raise DataError(
                f"{path} has a column {taken[0]}, which is not read but worked out",
                hint="rename it: columns of your own may have any other name",
            )
        for name in (field.name for field in schema if not field.nullable):
            if nulls := _nulls(file, name):
                raise DataError(
                    f"{path} has no {name} in {nulls:,} of {file.metadata.num_rows:,} rows",
                    hint="docs/dataset.md says what every row must have; make the dataset again",
                )


def _nulls(file: pq.ParquetFile, name: str) -> int:
    """How many rows lack a value: by the file's statistics, or by reading the column where it has none."""
    place = file.schema.names.index(name)
    if not file.schema.column(place).max_definition_level:
        return 0
    counts: list[int] = []
    for group in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(group).column(place).statistics
        if statistics is None or statistics.null_count is None:
            return sum(batch.column(0).null_count for batch in file.iter_batches(columns=[name]))
        counts.append(statistics.null_count)
    return sum(counts)
