"""Requests to OTLP: spans a second for making spans and for encoding them, and where that time goes.

python tests/benchmarks/exporting.py [REQUESTS]
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
import time
from pathlib import Path

from ingesting import write_spool
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from stagetrace import partition, read_spool
from stagetrace_analyzer.classes import load_rules
from stagetrace_export.exporters import BATCH_SPANS
from stagetrace_export.spans import Origin, request_spans

ROUNDS = 5


def make(partitioned, origin):
    """All spans of requests whose time is partitioned."""
    return [span for request, parts in partitioned for span in request_spans(request, parts, origin)]


def encode(spans):
    """Bytes of all messages that the spans make."""
    batches = (spans[at : at + BATCH_SPANS] for at in range(0, len(spans), BATCH_SPANS))
    return sum(len(encode_spans(batch).SerializeToString()) for batch in batches)


def seconds(work, *arguments):
    """The least time of several rounds, and what the work gave."""
    least = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        result = work(*arguments)
        least = min(least, time.process_time() - begin)
    return least, result


def main() -> None:
    """Measure on a generated spool."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        write_spool(Path(folder) / "spool", requests)
        data = read_spool(Path(folder) / "spool")
    origin = Origin.of(data, load_rules())
    parting_s, partitioned = seconds(lambda: [(r, partition(r)) for r in data.requests])
    making_s, spans = seconds(make, partitioned, origin)
    encoding_s, size = seconds(encode, spans)
    count = len(spans)
    print(f"make spans        {count / making_s:9.0f} spans/s")
    print(f"encode            {count / encoding_s:9.0f} spans/s")
    print(f"make and encode   {count / (making_s + encoding_s):9.0f} spans/s and core (goal: 10,000)")
    print(f"with partition    {count / (parting_s + making_s + encoding_s):9.0f} spans/s and core")
    print(f"bytes             {size / count:9.1f} a span ({count} spans of {requests} requests)")
    profile = cProfile.Profile()
    profile.runcall(lambda: encode(make(partitioned, origin)))
    print("where the time goes, by function:")
    found = pstats.Stats(profile).get_stats_profile()
    rows = sorted(found.func_profiles.items(), key=lambda row: -row[1].tottime)[:8]
    for name, row in rows:
        print(f"  {100 * row.tottime / found.total_tt:4.0f} %  {name} ({row.file_name.rsplit('/', 2)[-1]})")


if __name__ == "__main__":
    main()
