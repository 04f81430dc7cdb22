"""Spool to dataset: spans a second and peak memory, on a generated spool.

python tests/benchmarks/ingesting.py [REQUESTS]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stagetrace import Recorder
from stagetrace.records import NONE, JobKind, ReasonCode, RecordKind

MS = 1_000_000
DECODE_STEPS = 15


def write_spool(folder: Path, requests: int) -> None:
    """Write the records of ``requests`` image requests, four at a time, as a server would."""
    api, engine, worker = Recorder(folder), Recorder(folder), Recorder(folder)
    engine.role = "engine"
    clock = step = 0
    for first in range(0, requests, 4):
        batch = range(first, min(first + 4, requests))
        keys = [_front_end(api, engine, number, clock) for number in batch]
        for place in range(DECODE_STEPS + 1):
            step += 1
            begin = clock + (70 + 10 * place) * MS
            engine.record_at(
                begin, RecordKind.STEP, step, 4, len(keys) | ReasonCode.SEATS << 16, len(keys), 3
            )
            if place < 2:
                for key in keys:
                    engine.record_at(begin, RecordKind.MEMBER, key, step, 1 if place else 200, 0)
            worker.record_at(begin, RecordKind.STEP_BEGIN, step, engine.number)
            if not place:
                _encode(engine, worker, step, keys, begin)
            engine.record_at(begin + 9 * MS, RecordKind.STEP_DONE, step, 9 * MS)
        for number, key in zip(batch, keys, strict=True):
            _back_end(api, engine, number, key, step - DECODE_STEPS, clock + 80 * MS, begin + 9 * MS)
        clock = begin


def _front_end(api: Recorder, engine: Recorder, number: int, clock: int) -> int:
    api.record_at(clock, RecordKind.RECEIVED, number)
    scheme = api.intern("http")
    api.record_at(clock + MS, RecordKind.ITEM_BEGIN, number, 0, scheme, NONE)
    api.record_at(clock + 2 * MS, RecordKind.FETCH_BEGIN, number, 0)
    api.record_at(clock + 20 * MS, RecordKind.FETCH_END, number, 0, 1)
    kinds = (JobKind.DECODE, JobKind.TEMPLATE, JobKind.TOKENIZE, JobKind.PROCESS)
    for job, kind in enumerate(kinds):
        at = clock + (21 + 10 * job) * MS
        item = 0 if kind is JobKind.DECODE else NONE
        api.record_at(at, RecordKind.JOB_SUBMITTED, number, job, kind, item)
        api.record_at(at + MS, RecordKind.JOB_STARTED, number, job)
        api.record_at(at + 5 * MS, RecordKind.JOB_ENDED, number, job)
    api.record_at(clock + 27 * MS, RecordKind.ITEM_END, number, 0)
    identifier = f"chatcmpl-{number:032x}-abcdefgh"
    api.record_at(clock + 60 * MS, RecordKind.ENGINE_REQUEST, number, api.define(identifier))
    key = engine.define(identifier)
    engine.record_at(clock + 61 * MS, RecordKind.HELD, key, 200, 16, 1)
    engine.record_at(clock + 61 * MS, RecordKind.ADDED, key)
    return key


def _encode(engine: Recorder, worker: Recorder, step: int, keys: list[int], begin: int) -> None:
    for key in keys:
        engine.record_at(begin, RecordKind.STEP_ITEM, step, key, 0)
    worker.record_at(begin + MS, RecordKind.ENCODE_BEGIN, step, engine.number)
    worker.record_at(begin + 5 * MS, RecordKind.ENCODE_END, step, engine.number)


def _back_end(
    api: Recorder, engine: Recorder, number: int, key: int, step: int, first: int, last: int
) -> None:
    engine.record_at(first, RecordKind.FIRST_TOKEN, key, step)
    engine.record_at(last, RecordKind.FREED, key, engine.intern("length_capped"), DECODE_STEPS + 1)
    api.record_at(last, RecordKind.RESPONSE_STARTED, number, 200, 1)
    api.record_at(first + MS, RecordKind.FIRST_USEFUL, number)
    for kind in (RecordKind.LAST_BYTE, RecordKind.ENDED):
        api.record_at(last + MS, kind, number)


def measure(spool: Path, dataset: Path) -> None:
    """Read, partition and write; print the rate and this process's peak memory."""
    from stagetrace_analyzer.ingest import ingest_spool

    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begin = time.perf_counter()
    ingest_spool(spool, dataset)
    elapsed = time.perf_counter() - begin
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    import pyarrow.parquet as pq

    spans = sum(pq.read_metadata(path).num_rows for path in (dataset / "stages").glob("*.parquet"))
    size = sum(path.stat().st_size for path in dataset.rglob("*.parquet"))
    print(
        f"spool to dataset  {spans / elapsed:9.0f} spans/s ({spans} spans in {elapsed:.1f} s; budget: 100,000)"
    )
    print(f"peak memory       {peak_mib:9.0f} MiB ({before_mib:.0f} MiB before)")
    print(f"dataset           {size / spans:9.1f} bytes a span")


def main() -> None:
    if len(sys.argv) > 2:
        measure(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    with tempfile.TemporaryDirectory() as folder:
        spool, dataset = Path(folder) / "spool", Path(folder) / "dataset"
        write_spool(spool, requests)
        subprocess.run([sys.executable, __file__, str(spool), str(dataset)], check=True)


if __name__ == "__main__":
    main()
