"""What the client writes down."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stagetrace_analyzer.demo.observations import Observation, write_observations

COMPLETE = Observation(
    request_id="r1",
    phase="text only",
    label="text",
    intended_unix_ns=1_000_000_000_000_000_100,
    intended_ns=100,
    sent_ns=101,
    first_useful_ns=150,
    last_ns=200,
    status=200,
    error=None,
    output_chunks=16,
)


def test_latencies_count_from_the_intended_time():
    """A client that lags must not make the server look faster."""
    assert (COMPLETE.ttft_ns, COMPLETE.completion_ns) == (50, 100)


@pytest.mark.parametrize("error", ["TimeoutError", "http", "truncated"])
def test_a_failed_request_has_no_completion(error):
    """It ended, but it was not completed."""
    failed = dataclasses.replace(COMPLETE, error=error, first_useful_ns=None)
    assert (failed.ttft_ns, failed.completion_ns) == (None, None)


def test_observations_are_json_lines(tmp_path):
    """Every field of every observation comes back, to the nanosecond."""
    failed = dataclasses.replace(COMPLETE, status=None, error="TimeoutError", first_useful_ns=None)
    write_observations(tmp_path / "client.jsonl", [COMPLETE, failed])
    lines = (tmp_path / "client.jsonl").read_text().splitlines()
    assert [Observation(**json.loads(line)) for line in lines] == [COMPLETE, failed]
