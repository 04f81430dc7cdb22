from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stagetrace.errors import DataError, UsageError
from stagetrace_analyzer.dataset import (
    INGEST,
    MEMORY_LIMIT,
    SCHEMA_VERSION_KEY,
    TABLES,
    is_dataset,
    open_dataset,
    write_tables,
)

PAGE = Path(__file__).parents[2] / "docs/dataset.md"
ONE_ROW = pa.table({"name": ["records"], "reason": [""], "count": [7]})


def test_tables_have_exactly_the_columns_of_their_schema(rows, tmp_path: Path) -> None:
    """Types, nullability, column order and schema version survive writing; the files are zstd."""
    rows.request(("both", "receive", 1.0), label="a")
    folder = rows.write(tmp_path / "data")
    for name, schema in TABLES.items():
        part = folder / name / "part-0.parquet"
        assert pq.read_schema(part).equals(schema, check_metadata=True)
    assert pq.read_metadata(folder / "requests/part-0.parquet").row_group(0).column(0).compression == "ZSTD"


@pytest.mark.parametrize("table", TABLES)
def test_what_every_row_must_have_is_documented(table) -> None:
    """A dataset without it is refused, and the hint names the page."""
    (row,) = re.findall(rf"^\| `{table}` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [field.name for field in TABLES[table] if not field.nullable]


def test_batches_are_written_like_a_table(tmp_path: Path) -> None:
    """An iterable of batches, with columns in another order and type, gives the same rows."""
    batches = [
        pa.record_batch({"count": pa.array([n], pa.int32()), "name": ["records"], "reason": ["é"]})
        for n in range(3)
    ]
    write_tables(tmp_path, {"ingest": iter(batches)})
    table = pq.read_table(tmp_path / "ingest/part-0.parquet")
    assert table.schema.equals(INGEST)
    assert table.to_pylist() == [{"name": "records", "reason": "é", "count": n} for n in range(3)]


@pytest.mark.parametrize(
    "tables",
    [
        {"ingest": pa.table({"name": [None], "reason": [""], "count": [7]})},
        {"ingest": pa.table({"name": ["records"], "reason": [""], "count": ["many"]})},
        {"nonsense": ONE_ROW},
    ],
    ids=["null in a column without nulls", "text for a number", "unknown table"],
)
def test_rows_that_are_not_of_the_schema_are_refused(tables: dict[str, pa.Table], tmp_path: Path) -> None:
    """A wrong row or table is a ValueError, and no half-written file stays."""
    with pytest.raises(ValueError, match=r"null|many|unknown tables: nonsense"):
        write_tables(tmp_path, tables)
    assert not list((tmp_path / "ingest").glob(".*"))


def test_a_dataset_is_overwritten_only_by_force(tmp_path: Path) -> None:
    """Without force the old rows stay; with it they are all gone, also those of other parts."""
    write_tables(tmp_path, {"ingest": ONE_ROW})
    shutil.copy(tmp_path / "ingest/part-0.parquet", tmp_path / "ingest/part-1.parquet")
    with pytest.raises(UsageError, match="already holds a dataset") as caught:
        write_tables(tmp_path, {})
    assert "--force" in (caught.value.hint or "")
    assert pq.read_table(tmp_path / "ingest").num_rows == 2
    write_tables(tmp_path, {}, force=True)
    assert pq.read_table(tmp_path / "ingest").num_rows == 0


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    """A file where the folder should be is a DataError that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file"):
        write_tables(tmp_path / "file", {})


def test_a_dataset_is_known_by_its_tables(tmp_path: Path) -> None:
    """Empty and missing folders and files are no datasets; one table is enough to be one."""
    assert not is_dataset(tmp_path)
    assert not is_dataset(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    assert not is_dataset(tmp_path / "file")
    write_tables(tmp_path, {})
    shutil.rmtree(tmp_path / "requests")
    assert is_dataset(tmp_path)


def test_datasets_are_read_as_one(rows, tmp_path: Path) -> None:
    """Rows of all folders are there, the same request id twice; a folder named twice counts once."""
    rows.request(request_id="same")
    first, second = rows.write(tmp_path / "a"), rows.write(tmp_path / "b")
    with open_dataset([first, second, first / "../b"]) as connection:
        found = connection.execute("SELECT dataset, request_id FROM requests ORDER BY ALL").fetchall()
        tables = {name for (name,) in connection.execute("SELECT view_name FROM duckdb_views()").fetchall()}
    assert found == [(0, "same"), (1, "same")]
    assert tables >= set(TABLES)


def test_a_folder_has_any_name_and_several_parts(rows, tmp_path: Path) -> None:
    """A name that reads as a pattern, a partition or SQL is only a name; all parts are read."""
    rows.request()
    folder = rows.write(tmp_path / "run=1/'*")
    rows.write(tmp_path / "run=1/'other")
    table = pq.read_table(folder / "requests/part-0.parquet")
    other = table.set_column(0, table.schema.field("request"), [[1]])
    pq.write_table(other, folder / "requests/part-1.parquet")
    with open_dataset([folder]) as connection:
        found = connection.execute("FROM requests")
        assert [column[0] for column in found.description] == [*TABLES["requests"].names, "dataset"]
        assert len(found.fetchall()) == 2


def test_a_newer_minor_version_is_read_with_an_older_one(tmp_path: Path) -> None:
    """A column that only one dataset has is null in the rows of the other."""
    old, new = tmp_path / "old", tmp_path / "new"
    write_tables(old, {"ingest": ONE_ROW})
    write_tables(new, {"ingest": ONE_ROW})
    schema = INGEST.append(pa.field("added", pa.int64())).with_metadata({SCHEMA_VERSION_KEY: b"1.9"})
    row = {"name": ["records"], "reason": [""], "count": [8], "added": [5]}
    pq.write_table(pa.table(row, schema=schema), new / "ingest/part-0.parquet")
    with open_dataset([old, new]) as connection:
        found = connection.execute("SELECT count, added FROM ingest ORDER BY ALL").fetchall()
    assert found == [(7, None), (8, 5)]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("duration_ns", pa.int32()),
        ("stage", pa.string()),
        ("stage", pa.large_string()),
        ("holder", pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_another_width_or_encoding_is_read(column: str, kind: pa.DataType, rows, tmp_path: Path) -> None:
    """What other writers of Parquet make of the same values is the same."""
    rows.request(("both", "prefill", 3.0))
    part = rows.write(tmp_path) / "stages/part-0.parquet"
    table = pq.read_table(part)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, column, table.column(column).cast(kind)), part)
    with open_dataset([tmp_path]) as connection:
        found = connection.execute("SELECT stage, duration_ns, holder FROM stages").fetchall()
    assert found == [("prefill", 3_000_000, None)]


def test_memory_is_limited_and_nothing_is_fetched(rows, tmp_path: Path) -> None:
    """A connection has the stated memory limit, spills outside the current folder, loads no extension."""
    with open_dataset([rows.write(tmp_path)]) as connection:
        settings = dict(connection.execute("SELECT name, value FROM duckdb_settings()").fetchall())
    assert MEMORY_LIMIT == "1GB"
    assert settings["memory_limit"] == "953.6 MiB"
    assert settings["temp_directory"].startswith("/")
    assert settings["autoinstall_known_extensions"] == "false"


def _drop_table(folder: Path) -> None:
    shutil.rmtree(folder / "stages")


def _truncate(folder: Path) -> None:
    part = folder / "stages/part-0.parquet"
    part.write_bytes(part.read_bytes()[:-20])


def _other_major(folder: Path) -> None:
    schema = TABLES["stages"].with_metadata({SCHEMA_VERSION_KEY: b"2.0"})
    pq.write_table(schema.empty_table(), folder / "stages/part-0.parquet")


def _no_version(folder: Path) -> None:
    pq.write_table(TABLES["stages"].with_metadata(None).empty_table(), folder / "stages/part-0.parquet")


def _drop_column(folder: Path) -> None:
    schema = TABLES["stages"]
    table = schema.empty_table().drop_columns(["kind", "role"])
    pq.write_table(table, folder / "stages/part-0.parquet")


def _texts_for_numbers(folder: Path) -> None:
    _retype(folder, "duration_ns", pa.string())


def _times_for_numbers(folder: Path) -> None:
    _retype(folder, "begin_ns", pa.timestamp("ns"))


def _numbers_for_texts(folder: Path) -> None:
    _retype(folder, "stage", pa.int64())


def _retype(folder: Path, column: str, kind: pa.DataType) -> None:
    schema = TABLES["stages"]
    schema = schema.set(schema.get_field_index(column), pa.field(column, kind))
    pq.write_table(schema.empty_table(), folder / "stages/part-0.parquet")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_texts_for_numbers, "has string in duration_ns"),
        (_times_for_numbers, r"has timestamp\[ns\] in begin_ns"),
        (_numbers_for_texts, "has int64 in stage"),
        (_drop_table, "has no table 'stages'"),
        (_truncate, "cannot read .*part-0.parquet"),
        (_other_major, "has schema version 2.0, this stagetrace reads 1.0"),
        (_no_version, "has schema version unknown"),
        (_drop_column, "lacks kind, role"),
    ],
)
def test_a_damaged_dataset_is_one_line_with_a_hint(damage, message: str, tmp_path: Path) -> None:
    """A missing, broken or foreign table is a DataError of one line that says what to do."""
    write_tables(tmp_path, {})
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        open_dataset([tmp_path])
    assert "\n" not in caught.value.message
    assert "spool" in (caught.value.hint or "")


def test_no_folder_is_a_usage_error() -> None:
    """Opening nothing says so."""
    with pytest.raises(UsageError, match="no dataset"):
        open_dataset([])
