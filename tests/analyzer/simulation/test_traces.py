"""Public traces become datasets that tell what is published of them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from stagetrace.errors import DataError
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.simulation.datasets import write_runs
from stagetrace_analyzer.simulation.traces import TokenCost, read_azure, serve
from stagetrace_analyzer.simulation.traffic import alike

DATA = Path(__file__).parents[4] / "shared" / "data" / "azure"
MS = 1_000_000

GAPS = """
    WITH gaps AS (
        SELECT received_unix_ns - lag(received_unix_ns) OVER (ORDER BY received_unix_ns) AS gap_ns FROM requests
    )
    SELECT 1e9 / avg(gap_ns), stddev_samp(gap_ns) / avg(gap_ns) FROM gaps
"""
"""Requests a second, and coefficient of variation of the times between arrivals."""


def trace_file(name):
    """A trace of the Azure public dataset."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the public trace {name} is not beside the project (../shared/data/azure)")
    return path


def test_published_facts_come_out_of_the_dataset(tmp_path):
    """The conversation trace has 5.53 requests a second, and times between them that vary by 1.09."""
    run = serve(read_azure(trace_file("conv23.csv")), TokenCost())
    write_runs(tmp_path, [run], "the Azure conversation trace of 2023")
    with open_dataset([tmp_path]) as connection:
        per_s, variation = connection.execute(GAPS).fetchone()
    assert (round(per_s, 2), round(variation, 2)) == (5.53, 1.09)


@pytest.mark.parametrize("name", ["conv23.csv", "code23.csv"])
def test_every_request_of_a_trace_is_in_the_dataset(name, tmp_path):
    """The dataset has the requests and tokens of the file, read by another reader."""
    path = trace_file(name)
    with path.open(newline="") as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    write_runs(tmp_path, [serve(read_azure(path), TokenCost())], f"the trace {name}")
    with open_dataset([tmp_path]) as connection:
        found = connection.execute(
            "SELECT prompt_tokens, output_tokens FROM requests ORDER BY received_unix_ns, request"
        ).fetchall()
    assert found == rows


def write_trace(folder, *rows):
    """A trace of a few requests."""
    path = folder / "small.csv"
    path.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\r\n")
    return path


def test_times_are_read_to_the_last_digit(tmp_path):
    """Arrivals count from the first one, in the order of time; a time has seven decimals."""
    path = write_trace(
        tmp_path,
        "2023-11-16 18:15:47.0000001,5,6",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-17 18:15:46.6805900,1,1",
    )
    traffic = read_azure(path)
    assert traffic.arrival_ns.tolist() == [0, 319_410_100, 86_400 * 10**9]
    assert traffic.prompt_tokens.tolist() == [374, 5, 1]
    assert traffic.output_tokens.tolist() == [44, 6, 1]
    assert [one.label for one in traffic.classes] == ["small"]


def test_the_service_model(tmp_path):
    """A prompt takes a step and its tokens, and queues; each further token of the answer takes another step."""
    path = write_trace(tmp_path, "2023-11-16 00:00:00.0000000,100,3", "2023-11-16 00:00:00.0050000,200,1")
    run = serve(read_azure(path), TokenCost(step_ns=10 * MS, token_ns=MS, respond_ns=2 * MS))
    write_runs(tmp_path / "dataset", [run], "two requests")
    with open_dataset([tmp_path / "dataset"]) as connection:
        found = connection.execute(
            "SELECT request, horizon, stage, reason, duration_ns // 1000000 FROM stages ORDER BY request, horizon, begin_ns"
        ).fetchall()
    assert found == [
        (0, "both", "prefill", None, 110),
        (0, "completion", "decode", None, 22),
        (0, "completion", "respond", None, 2),
        (0, "ttft", "respond", None, 2),
        (1, "both", "prefill.wait", "step", 105),
        (1, "both", "prefill", None, 210),
        (1, "completion", "respond", None, 2),
        (1, "ttft", "respond", None, 2),
    ]


@pytest.mark.parametrize(
    "content",
    [None, "", "a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"],
    ids=["missing", "empty", "other columns", "not a time"],
)
def test_what_is_no_trace_is_one_line(content, tmp_path):
    """A file that is missing or no such trace is a DataError that names it and the columns."""
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=r"cannot read .*trace\.csv") as caught:
        read_azure(path)
    assert "\n" not in caught.value.message
    assert "TIMESTAMP" in caught.value.hint


def test_unknown_tokens_cannot_be_served():
    """Traffic without tokens is a ValueError."""
    with pytest.raises(ValueError, match="tokens"):
        serve(alike(np.array([0])), TokenCost())
