"""Cost of counting a closed request in the metrics of stages, and of a scrape of them.

python tests/benchmarks/metrics.py [REQUESTS]
"""

from __future__ import annotations

import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from ingesting import write_spool
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from stagetrace import Horizon, partition, read_spool
from stagetrace_export.metrics import StageMetrics
from stagetrace_export.prometheus import PrometheusPage


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    with tempfile.TemporaryDirectory() as folder:
        write_spool(Path(folder) / "spool", requests)
        data = read_spool(Path(folder) / "spool")
    begin = time.process_time()
    partitioned = [(request, partition(request), data.pair(request.instance)) for request in data.requests]
    partition_s = time.process_time() - begin
    stages = sum(len({(i.stage, i.reason) for i in p.of(h)}) for _, p, _ in partitioned for h in Horizon)
    print(f"request                {stages / requests:8.1f} stages, both horizons together")
    print(f"partition              {requests / partition_s:8.0f} requests/s and core")
    page = PrometheusPage(port=0)
    for name, readers in (
        ("page", [page.reader]),
        ("page and OTLP", [InMemoryMetricReader(), InMemoryMetricReader()]),
    ):
        metrics = StageMetrics(readers)
        begin = time.process_time()
        for counted in partitioned:
            metrics.observe(*counted)
        observe_s = time.process_time() - begin
        print(
            f"observe, {name:13} {requests / observe_s:8.0f} requests/s and core "
            f"({observe_s / requests * 1e6:.0f} us a request)"
        )
    begin = time.process_time()
    with urllib.request.urlopen(page.url, timeout=30) as answer:  # noqa: S310 - our own page
        content = answer.read()
    print(
        f"scrape                 {1e3 * (time.process_time() - begin):8.1f} ms, {len(content) / 1024:.0f} KiB"
    )
    page.stop()


if __name__ == "__main__":
    main()
