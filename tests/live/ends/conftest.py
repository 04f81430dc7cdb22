"""Servers for requests that end in every way there is, and the table of how each end was told."""

from __future__ import annotations

import json
from typing import NamedTuple

import duckdb
import needs
import pytest
from scenes import SECRET

from stagetrace import Stage, partition
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace.testing import check_partition
from stagetrace_analyzer.ingest import ingest_spool

STEP_MS = 5
"""The least that a step takes, so that an answer lasts while its client leaves or its server is stopped."""

ROWS = pytest.StashKey[list]()


class Row(NamedTuple):
    """What was done to a request, and what the dataset tells of its end."""

    what: str
    outcome: str
    code: str | None
    ended_in: str | None
    finish: str | None


def told_of(server, request, folder):
    """What the dataset says of the end of a request."""
    ingest_spool(server.spool, folder, force=True)
    columns = "outcome, error_code, ended_stage, finish_reason"
    query = f"SELECT {columns} FROM '{folder}/requests/*.parquet' WHERE request_id = ?"
    (told,) = duckdb.execute(query, [request.request_id]).fetchall()
    return told


def recorded_text(spool):
    """All that a spool holds: its bytes, and its strings in one piece."""
    segments = [read_segment(path) for path in segment_paths(spool)]
    strings = b"".join(content[:size] for data in segments for *_, size, content in data.texts())
    return strings + b"".join(path.read_bytes() for path in segment_paths(spool))


def assert_nothing_is_told_of(spool, *answers):
    """No prompt, no path and no text of an error is in a spool."""
    recorded = recorded_text(spool)
    # A time-out has no message.
    messages = filter(None, (json.loads(answer)["error"]["message"] for answer in answers))
    for text in (SECRET, *(message[:20] for message in messages)):
        assert text.encode() not in recorded, text


@pytest.fixture
def ended(request, tmp_path):
    """Demands that the end of a request is told as it was."""

    def ended(what, server, found, outcome, stage=None, *, code=None, finish=None, answer=None):
        row = Row(what, *told_of(server, found, tmp_path / "dataset"))
        request.config.stash.setdefault(ROWS, []).append(row)
        parts = partition(found)
        check_partition(found, parts)
        stages = [(str(i.stage), str(i.reason or ""), round(i.duration / 1e6, 2)) for i in parts.completion]
        assert row == Row(what, outcome, code, stage, finish), stages
        known = parts.completion[:-1] if stage is Stage.UNATTRIBUTED else parts.completion
        unattributed = sum(i.duration for i in known if i.stage is Stage.UNATTRIBUTED)
        assert unattributed <= 0.02 * sum(i.duration for i in known), stages
        data = server.read()
        assert [check for check in data.checks if not check.holds] == []
        assert data.dropped == data.faults == 0
        assert_nothing_is_told_of(server.spool, *([] if answer is None else [answer]))

    return ended


def pytest_terminal_summary(terminalreporter, config):
    """Say what was done to requests and what was told of their ends."""
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("ends of requests")
        lines = ([cell or "-" for cell in row] for row in rows)
        for cells in sorted(lines, key=lambda cells: cells[1:]):
            terminalreporter.write_line("{:<62}{:<11}{:<22}{:<19}{}".format(*cells))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model that costs next to nothing."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import TINY, make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny", TINY)


@pytest.fixture(scope="session")
def media_folder(tmp_path_factory):
    """The folder from which the server may load files."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def start_narrow(tiny_model, media_folder, start_server):
    """Starts a server with little of everything: two seats, one thread for media, a small KV cache, short patience."""
    arguments = (
        "--max-num-seqs=2",
        "--max-model-len=1024",
        "--block-size=32",
        # Enough for one request of full length, and not for two.
        "--num-gpu-blocks-override=40",
        f"--allowed-local-media-path={media_folder}",
    )
    environment = {
        "VLLM_MEDIA_LOADING_THREAD_COUNT": "1",
        "VLLM_IMAGE_FETCH_TIMEOUT": "2",
        "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": "1",
        "VLLM_MAX_IMAGE_PIXELS": "60000000",
    }

    def start(*more):
        return start_server(tiny_model, *arguments, *more, environment=environment)

    return start


@pytest.fixture(scope="session")
def narrow_server(start_narrow):
    """The server that all requests share which end while it lives."""
    with start_narrow() as server, server.paced(STEP_MS):
        yield server


@pytest.fixture
def mortal_server(start_narrow):
    """A server that ends in the test, and answers long enough for that."""
    longer = ("--max-model-len=4096", "--num-gpu-blocks-override=300")
    with start_narrow(*longer) as server, server.paced(STEP_MS):
        server.may_end = True
        yield server
