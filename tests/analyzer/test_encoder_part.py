"""The encoder's part of a step in the dataset, where a device ran it."""

from __future__ import annotations

import duckdb
import pytest

from stagetrace import Recorder
from stagetrace.records import RecordKind
from stagetrace_analyzer.ingest import ingest_spool

MS = 1_000_000


@pytest.mark.parametrize(
    ("took_ms", "part"),
    [(30, (50, 80)), (70, (50, 100)), (None, (None, None))],
    ids=["fits", "cut", "unknown"],
)
def test_columns_tell_the_devices_time(tmp_path, took_ms, part):
    """The part begins when the step before is done and lasts as the device took; a launch is never shown."""
    recorder = Recorder(tmp_path / "spool")
    for number, scheduled, done in ((1, 0, 50), (2, 10, 100)):
        recorder.record_at(scheduled * MS, RecordKind.STEP, number, 1)
        recorder.record_at(done * MS, RecordKind.STEP_DONE, number, (done - scheduled) * MS)
    recorder.record_at(12 * MS, RecordKind.ENCODE_BEGIN, 2, recorder.number, 1)
    recorder.record_at(14 * MS, RecordKind.ENCODE_END, 2, recorder.number)
    if took_ms is not None:
        recorder.record_at(150 * MS, RecordKind.ENCODE_DEVICE, 2, recorder.number, took_ms * MS)
    ingest_spool(tmp_path / "spool", tmp_path / "dataset")
    columns = "scheduled_unix_ns, encoder_begin_unix_ns, encoder_end_unix_ns"
    files = f"{tmp_path}/dataset/steps/*.parquet"
    (zero, *none), (_, *times) = duckdb.sql(f"SELECT {columns} FROM '{files}' ORDER BY step").fetchall()
    assert none == [None, None]
    assert tuple(time and (time - zero) / MS for time in times) == part
