"""The dataset: typed Parquet tables of requests, media, stages, steps and clocks.

Every other part of the analyzer reads these tables and nothing else.  Times
named ``*_unix_ns`` are nanoseconds since the epoch; every other ``*_ns`` is a
duration or an offset in nanoseconds.  A null is an unknown fact, never zero.
"""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from stagetrace.errors import DataError, UsageError
from stagetrace_analyzer.required import check_required
from stagetrace_analyzer.statements import sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SCHEMA_VERSION: Final = "1.0"
"""Within a major version only nullable columns are added."""

SCHEMA_VERSION_KEY: Final = b"stagetrace.schema_version"


def _table(*columns: tuple[str, pa.DataType, bool]) -> pa.Schema:
    fields = [pa.field(name, kind, nullable=nullable) for name, kind, nullable in columns]
    return pa.schema(fields, metadata={SCHEMA_VERSION_KEY: SCHEMA_VERSION.encode()})


_TEXT = pa.string()
_NAME = pa.dictionary(pa.int16(), pa.string())
_NS = pa.int64()
_COUNT = pa.int64()
_FLAG = pa.bool_()

REQUESTS: Final = _table(
    ("request", _COUNT, False),
    ("request_id", _TEXT, False),
    ("external_id", _TEXT, True),
    ("trace_id", _TEXT, True),
    ("parent_span_id", _TEXT, True),
    ("instance", _TEXT, False),
    ("path", _NAME, True),
    ("model", _NAME, True),
    ("phase", _NAME, True),
    ("label", _NAME, True),
    ("arm", _NAME, True),
    ("received_unix_ns", _NS, False),
    ("intended_unix_ns", _NS, True),
    ("upload_ns", _NS, True),
    ("ttft_ns", _NS, True),
    ("completion_ns", _NS, True),
    ("ended_ns", _NS, True),
    ("outcome", _NAME, False),
    ("error_code", _NAME, True),
    ("status", _COUNT, True),
    ("ended_stage", _NAME, True),
    ("finish_reason", _NAME, True),
    ("stream", _FLAG, True),
    ("media_items", _COUNT, True),
    ("media_bytes", _COUNT, True),
    ("pixels", _COUNT, True),
    ("prompt_tokens", _COUNT, True),
    ("cached_tokens", _COUNT, True),
    ("output_tokens", _COUNT, True),
    ("max_tokens", _COUNT, True),
    ("joined", _TEXT, False),
)
"""A row a request.

``request`` is its number in the dataset, by which the other tables name it.
``ttft_ns`` is null when no useful byte was sent; ``completion_ns`` is null
unless the last byte was sent.  ``ended_ns`` is when the request ended, however
it ended.  ``joined`` names the processes whose records were found:
``api``, ``api+engine`` or ``api+engine+worker``.
"""

MEDIA: Final = _table(
    ("request", _COUNT, False),
    ("item", _COUNT, False),
    ("scheme", _NAME, True),
    ("host", _TEXT, True),
    ("format", _NAME, True),
    ("bytes", _COUNT, True),
    ("width", _COUNT, True),
    ("height", _COUNT, True),
    ("tokens", _COUNT, True),
    ("hash", _TEXT, True),
    ("fetch_attempts", _COUNT, True),
    ("media_cache", _NAME, True),
    ("processor_cache", _NAME, True),
    ("encoder_cache", _NAME, True),
    ("begin_ns", _NS, True),
    ("ready_ns", _NS, True),
    ("slack_ns", _NS, True),
)
"""A row a media item; ``begin_ns`` and ``ready_ns`` are offsets from receipt.

``slack_ns`` is how much later the item could have been ready without delaying
the request; 0 for the item that was ready last, and for those that were loaded
one after the other.
"""

STAGES: Final = _table(
    ("request", _COUNT, False),
    ("horizon", _NAME, False),
    ("stage", _NAME, False),
    ("kind", _NAME, False),
    ("reason", _NAME, True),
    ("holder", _TEXT, True),
    ("occurrence", _COUNT, False),
    ("begin_ns", _NS, False),
    ("duration_ns", _NS, False),
    ("item", _COUNT, True),
    ("first_step", _COUNT, True),
    ("last_step", _COUNT, True),
    ("recompute", _FLAG, False),
    ("role", _NAME, False),
)
"""A row an interval; ``begin_ns`` is its offset from receipt.

``horizon`` is ``ttft``, ``completion`` or ``both``: the horizons share
everything up to the first token, and a shared interval is one row.  The
durations of the rows of one request and one horizon (that horizon's and
``both``) add up to ``ttft_ns`` or ``completion_ns`` exactly.
"""

STEPS: Final = _table(
    ("engine", _TEXT, False),
    ("step", _COUNT, False),
    ("scheduled_unix_ns", _NS, False),
    ("begin_unix_ns", _NS, True),
    ("end_unix_ns", _NS, True),
    ("encoder_begin_unix_ns", _NS, True),
    ("encoder_end_unix_ns", _NS, True),
    ("encoder_device_ns", _NS, True),
    ("requests", _COUNT, False),
    ("tokens", _COUNT, False),
    ("decodes", _COUNT, False),
    ("encoder_items", _COUNT, False),
    ("running", _COUNT, False),
    ("waiting", _COUNT, False),
    ("reason", _NAME, True),
    ("holder", _TEXT, True),
)
"""A row a step of an engine; ``reason`` is why ``waiting`` requests stayed out.

``encoder_device_ns`` is the time that a device took for the encoder by its own
clock, null where the host's clock counts.
"""

LOOP_LAG: Final = _table(
    ("instance", _TEXT, False),
    ("at_unix_ns", _NS, False),
    ("duration_ns", _NS, False),
)
"""A row a time that an API server's event loop was late; ``at_unix_ns`` is when it was due."""

CLOCKS: Final = _table(
    ("process", _TEXT, False),
    ("role", _NAME, False),
    ("pid", _COUNT, True),
    ("host", _TEXT, False),
    ("clock", _TEXT, False),
    ("service", _NAME, True),
    ("model", _NAME, True),
    ("version", _NAME, True),
    ("stagetrace_version", _NAME, False),
    ("records", _COUNT, False),
    ("at_unix_ns", _NS, False),
    ("monotonic_ns", _NS, False),
)
"""A row a reading of both clocks by a process that wrote: one for each of its segments.

``at_unix_ns`` is what the wall clock said when the host's monotonic one, which
counts from when the host began, said ``monotonic_ns``.  Processes with equal
``clock`` share that one.  Everything else is of the process, the same in all
its rows: ``role`` has a plus between several, ``version`` is of the software
that it served with, and ``records`` is how many it wrote.
"""

OCCUPANCY: Final = _table(
    ("request", _COUNT, False),
    ("engine", _TEXT, False),
    ("first_step", _COUNT, False),
    ("last_step", _COUNT, False),
    ("tokens", _COUNT, False),
)
"""A row a stretch of steps in each of which a request had the same number of tokens."""

CHECKS: Final = _table(
    ("name", _TEXT, False),
    ("expected", pa.float64(), False),
    ("found", pa.float64(), False),
    ("tolerance", pa.float64(), False),
    ("holds", _FLAG, False),
)
"""Counts of one thing by two witnesses; ``tolerance`` is relative."""

INGEST: Final = _table(
    ("name", _TEXT, False),
    ("reason", _TEXT, False),
    ("count", _COUNT, False),
)
"""What was read and what was set aside, by reason (``name``: ``records``,
``requests``, ``set_aside``, ``dropped``, ``faults``, ``hook_off``: the hook)."""

TABLES: Final = {
    "requests": REQUESTS,
    "media": MEDIA,
    "stages": STAGES,
    "steps": STEPS,
    "loop_lag": LOOP_LAG,
    "clocks": CLOCKS,
    "occupancy": OCCUPANCY,
    "checks": CHECKS,
    "ingest": INGEST,
}

MEMORY_LIMIT: Final = "1GB"
"""What a connection may use before it spills to disk."""

THREADS: Final = 2
"""Threads of a connection."""

_PART: Final = "part-0.parquet"
_COMPRESSION: Final = "zstd"
_AGAIN: Final = "make the dataset again from the spool"


def is_dataset(path: Path) -> bool:
    """Whether ``path`` is a folder that holds a table of a dataset, perhaps not all of them."""
    return any(_part_files(path, name) for name in TABLES)


def write_tables(
    folder: Path, tables: Mapping[str, pa.Table | Iterable[pa.RecordBatch]], *, force: bool = False
) -> None:
    """Write a dataset: ``<folder>/<table>/part-0.parquet`` for every table of `TABLES`.

    Args:
        folder: Where to; made if it is not there.
        tables: Rows by table name, cast to the table's schema; batches are written
            as they come.  A table that is not named is written without rows.
        force: Replace a dataset that is already there.

    Raises:
        UsageError: The folder holds a dataset and ``force`` is not set.
        DataError: The folder cannot be written.
        ValueError: A table or a column is unknown, missing or of another type.
    """
    if unknown := sorted(set(tables) - set(TABLES)):
        raise ValueError(f"unknown tables: {', '.join(unknown)}")
    if not force and is_dataset(folder):
        raise UsageError(f"{folder} already holds a dataset", hint="name another folder, or use --force")
    try:
        for name, schema in TABLES.items():
            _write_table(folder / name, schema, tables.get(name, ()))
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror or error}") from error


def open_dataset(folders: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    """Open datasets as one: a connection with a view for every table of `TABLES`.

    ``facts`` is a view beside them: requests with what class rules ask for.  Every
    view has the table's columns and ``dataset``, the number of the folder
    a row comes from: a request is identified by ``(dataset, request)``.  A
    folder that is named twice is read once.

    Raises:
        DataError: A table is missing, broken, of another major schema version, has a column of
            another type, or lacks what `check_required` asks for.
        UsageError: No folder is given.
    """
    distinct = list(dict.fromkeys(folder.resolve() for folder in folders))
    if not distinct:
        raise UsageError("no dataset is given", hint="name at least one folder")
    parts = {name: [_checked_parts(folder, name) for folder in distinct] for name in TABLES}
    connection = duckdb.connect(config=_configuration())
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        stack.enter_context(data_errors(distinct))
        for name, by_folder in parts.items():
            _create_view(connection, name, by_folder)
        connection.execute(sql("facts"))
        check_required(connection, distinct, TABLES)
        stack.pop_all()
    return connection


@contextlib.contextmanager
def data_errors(folders: Iterable[Path]) -> Iterator[None]:
    """Make of what the engine cannot read in datasets a `DataError` of one line."""
    try:
        yield
    except duckdb.Error as error:
        names = ", ".join(str(path) for path in folders)
        first_line = str(error).partition("\n")[0]
        raise DataError(f"cannot read {names}: {first_line}", hint=_AGAIN) from error


def _write_table(folder: Path, schema: pa.Schema, rows: pa.Table | Iterable[pa.RecordBatch]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stale = [path for path in folder.glob("*.parquet") if path.name != _PART]
    temporary = folder / f".{_PART}.{os.getpid()}"
    try:
        with pq.ParquetWriter(temporary, schema, compression=_COMPRESSION) as writer:
            for table in _as_tables(rows):
                writer.write_table(table.select(schema.names).cast(schema))
        temporary.replace(folder / _PART)
    finally:
        temporary.unlink(missing_ok=True)
    for path in stale:
        path.unlink()


def _as_tables(rows: pa.Table | Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    if isinstance(rows, pa.Table):
        yield rows
        return
    for batch in rows:
        yield pa.Table.from_batches([batch])


def _part_files(folder: Path, name: str) -> list[Path]:
    return sorted((folder / name).glob("*.parquet"))


def _checked_parts(folder: Path, name: str) -> list[Path]:
    parts = _part_files(folder, name)
    if not parts:
        raise DataError(f"{folder} has no table {name!r}", hint=_AGAIN)
    for path in parts:
        _check_part(path, name)
    return parts


def _check_part(path: Path, name: str) -> None:
    version, columns = _version_and_columns(path)
    wanted = TABLES[name]
    if version.partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
        raise DataError(
            f"{path} has schema version {version}, this stagetrace reads {SCHEMA_VERSION}",
            hint="make the dataset again from the spool, or use the stagetrace that wrote it",
        )
    if missing := sorted(set(wanted.names) - set(columns)):
        raise DataError(f"{path} lacks {', '.join(missing)}", hint=_AGAIN)
    for field in wanted:
        if not _alike(columns[field.name], field.type):
            raise DataError(f"{path} has {columns[field.name]} in {field.name}", hint=_AGAIN)


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of the found type can be read as one of the wanted type."""
    found, wanted = (kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (found, wanted))
    if pa.types.is_signed_integer(wanted):
        return pa.types.is_signed_integer(found)
    if pa.types.is_floating(wanted):
        return pa.types.is_floating(found) or pa.types.is_integer(found)
    texts = (pa.string(), pa.large_string(), pa.string_view())
    return found in texts if wanted in texts else found == wanted


def _version_and_columns(path: Path) -> tuple[str, dict[str, pa.DataType]]:
    try:
        schema = pq.read_schema(path)
        version = (schema.metadata or {}).get(SCHEMA_VERSION_KEY, b"unknown")
        return version.decode(), dict(zip(schema.names, schema.types, strict=True))
    except (OSError, ValueError, pa.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(f"cannot read {path}: {first_line}", hint=_AGAIN) from error


def _configuration() -> dict[str, str | bool | int | float | list[str]]:
    return {
        "memory_limit": MEMORY_LIMIT,
        "threads": THREADS,
        # The default is a folder below the current one; DuckDB makes and removes it when it spills.
        "temp_directory": str(Path(tempfile.gettempdir()) / f"stagetrace-{uuid.uuid4().hex}"),
        # Parquet is built in; nothing is fetched from a network behind the user's back.
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, parts: Sequence[Sequence[Path]]) -> None:
    selects = []
    for number, paths in enumerate(parts):
        # Relations take paths as values; a view's SQL would need them pasted in.
        relation = connection.read_parquet([glob.escape(str(path)) for path in paths], union_by_name=True)
        relation.create_view(f"{name}_{number}")
        selects.append(f"SELECT *, {number} AS dataset FROM {name}_{number}")  # noqa: S608
    connection.execute(f"CREATE VIEW {name} AS {' UNION ALL BY NAME '.join(selects)}")
