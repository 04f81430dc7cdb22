"""Analyzing a large dataset: the class x stage report, the whole analysis, and how exact its quantiles are.

python tests/benchmarks/analyzing.py [--requests N] [--cache DIR]

The dataset is drawn from the recorded demo (docs/simulation.md) and kept in the
cache folder.  What is measured runs in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stagetrace.errors import DataError
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.simulation.scaled import REQUESTS_DEFAULT, write_scaled

RECORDED = importlib.resources.files("stagetrace_analyzer.demo") / "recorded" / "dataset"
HORIZONS = ("ttft", "completion")

CLASSED = """
    WITH classed AS (SELECT request, {traffic_class} AS traffic_class FROM facts WHERE outcome = 'ok')
"""
"""Class of every request that ended well."""

REPORT = """
    , names AS (
        SELECT traffic_class, row_number() OVER () AS number
        FROM (SELECT DISTINCT traffic_class FROM classed)
    ),
    numbered AS (SELECT request, number::UTINYINT AS number FROM classed JOIN names USING (traffic_class)),
    sums AS (
        SELECT number, stage, horizon, count(*) AS intervals, sum(duration_ns) AS spent_ns
        FROM stages JOIN numbered USING (request)
        GROUP BY ALL
    )
    SELECT traffic_class, stage, horizon, intervals, spent_ns FROM sums JOIN names USING (number)
"""
"""Intervals and their time in ns by class, stage and horizon; numbers are grouped by faster than names."""

EXACT = """
    , sizes AS (SELECT traffic_class, count(*) AS n FROM classed GROUP BY traffic_class),
    spent AS (
        SELECT request, stage, sum(duration_ns)::BIGINT AS spent_ns
        FROM stages WHERE horizon IN ('both', $horizon) GROUP BY request, stage
    ),
    ordered AS (
        SELECT traffic_class, stage, list_sort(list(spent_ns)) AS times
        FROM spent JOIN classed USING (request) GROUP BY traffic_class, stage
    )
    SELECT
        traffic_class, stage,
        coalesce(times[nullif(greatest((n * 50 + 99) // 100 - n + len(times), 0), 0)], 0),
        coalesce(times[nullif(greatest((n * 95 + 99) // 100 - n + len(times), 0), 0)], 0)
    FROM ordered JOIN sizes USING (traffic_class)
"""
"""Times of rank ceil(q * n) in ns; a request that was never in the stage counts as 0."""


def dataset(requests, cache):
    """The folder of the dataset, made if it is not there or is of another schema."""
    folder = cache / f"scaled-{requests}"
    try:
        open_dataset([folder]).close()
    except DataError:
        begin = time.perf_counter()
        write_scaled(Path(str(RECORDED)), folder, requests=requests, force=True)
        print(f"made {folder} in {time.perf_counter() - begin:.0f} s")
    with open_dataset([folder]) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("requests", "stages")
        ]
    print("dataset              {:,} requests, {:,} stage rows".format(*counts))
    return folder


def measured(what, budget, *arguments):
    """Run a process; print its wall time, CPU time and peak memory."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - begin
    if process.returncode:
        sys.exit(f"{what} failed with exit code {process.returncode}")
    cpu_s, peak_mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    print(
        f"{what:20} {wall_s:6.2f} s wall, {cpu_s:6.2f} s CPU, {peak_mib:5.0f} MiB peak   (budget: {budget})"
    )


def report(folder):
    """The class x stage report alone, in this process."""
    begin = time.perf_counter()
    case, parameters = load_rules().case_expression()
    with open_dataset([folder]) as connection:
        rows = connection.execute(CLASSED.format(traffic_class=case) + REPORT, parameters).fetchall()
    print(f"  {len(rows)} rows, {time.perf_counter() - begin:.2f} s without imports")


def exact_quantiles(folder):
    """Exact p50 and p95 in ns, by class, stage and horizon."""
    case, parameters = load_rules().case_expression()
    found = {}
    with open_dataset([folder]) as connection:
        for horizon in HORIZONS:
            query = CLASSED.format(traffic_class=case) + EXACT
            rows = connection.execute(query, {**parameters, "horizon": horizon}).fetchall()
            found |= {(name, stage, horizon): times for name, stage, *times in rows}
    return found


def compare(folder, analyzed):
    """Print the largest relative difference between the report's quantiles and the exact ones."""
    exact = exact_quantiles(folder)
    differences = []
    for report in analyzed["classes"]:
        for row in report["stages"]:
            key = report["class"], row["stage"], row["horizon"]
            for q, exact_ns in zip(("p50", "p95"), exact[key], strict=True):
                if row[f"{q}_ms"] is None:
                    continue
                found_ns = row[f"{q}_ms"] * 1e6
                differences.append((abs(found_ns - exact_ns) / max(exact_ns, 1), *key, q))
    worst, *where = max(differences)
    print(
        f"quantiles of stages  {100 * worst:6.3f} % off at most, of {len(differences)}: {', '.join(where)}   (budget: 0.5 %)"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=REQUESTS_DEFAULT, help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stagetrace-benchmarks")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        report(options.report)
        return
    folder = dataset(options.requests, options.cache)
    measured("class x stage report", "0.5 s", __file__, "--report", str(folder))
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "analyze.json"
        whole = ("-m", "stagetrace", "analyze", str(folder), "--json", "-o", str(answer))
        measured("analyze --json", "5 s, 1 GB, 2 cores", *whole)
        compare(folder, json.loads(answer.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
