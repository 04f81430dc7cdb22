"""A real server whose spool may not grow, of whose requests half are recorded, and which is switched off and on."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import needs
import pytest

from stagetrace import partition, read_spool
from stagetrace.attributes import SAMPLE_VARIABLE, SPOOL_BYTES_VARIABLE
from stagetrace.recorder import OFF_FILE
from stagetrace.records import StopReason
from stagetrace.spool import segment_paths
from stagetrace.testing import check_partition
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.ingest import ingest_spool

SECONDS = 55
OFF_AT, ON_AT = 38, 45
LIMIT = 1 << 20


async def keep_busy(server, sent):
    """Eight clients, one request after the other, for a time."""
    request = server.visible | {
        "messages": [{"role": "user", "content": "the lamp on the table"}],
        "stream": True,
        "max_tokens": 3,
    }
    until = time.monotonic() + SECONDS

    async def client(session):
        while time.monotonic() < until:
            async with session.post(f"{server.url}/v1/chat/completions", json=request) as response:
                assert response.status == 200
                await response.read()
            sent.append(time.monotonic_ns())
            await asyncio.sleep(0.2)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(8)))


@pytest.fixture(scope="module")
def switched(tiny_model, start_server):
    """What was sent, sizes of the spool as time went, when it was switched, and the spool."""
    environment = {SPOOL_BYTES_VARIABLE: "1M", SAMPLE_VARIABLE: "0.5"}
    sent, sizes, switches = [], [], []
    with start_server(tiny_model, environment=environment) as server, ThreadPoolExecutor(1) as pool:
        off = server.spool / OFF_FILE
        load = pool.submit(lambda: asyncio.run(keep_busy(server, sent)))
        begin = time.monotonic()
        while not load.done():
            time.sleep(0.25)
            sizes.append(sum(path.stat().st_size for path in segment_paths(server.spool) if path.exists()))
            passed = time.monotonic() - begin
            if passed > OFF_AT and not switches:
                off.touch()
                switches.append(time.monotonic_ns())
            elif passed > ON_AT and len(switches) == 1:
                off.unlink()
                switches.append(time.monotonic_ns())
        load.result()
        time.sleep(1)
        yield sent, sizes, switches, server.spool


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A model that answers quickly."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import TINY, make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny", TINY)


def test_spool_keeps_within_its_size(switched):
    """The folder never grows beyond its size by more than a segment of each other process."""
    _, sizes, _, spool = switched
    segment = segment_paths(spool)[0].stat().st_size
    assert LIMIT - 4 * segment < max(sizes) <= LIMIT + 2 * segment


def test_what_is_left_is_right(switched):
    """Every request is explained whole, all counts agree, and whatever is set aside is set aside by reason."""
    sent, _, _, spool = switched
    data = read_spool(spool)
    assert (data.dropped, data.faults) == (0, 0)
    assert [check for check in data.checks if not check.holds] == []
    assert 20 < len(data.requests) < len(sent)
    assert data.not_sampled > 20
    assert data.removed[0] > 0
    whole = unattributed = 0
    for request in data.requests:
        parts = partition(request)
        check_partition(request, parts)
        whole += request.last_byte - request.received
        unattributed += sum(i.duration for i in parts.completion if i.stage == "unattributed")
    assert unattributed < 0.01 * whole
    unexplained = {
        reason
        for reason in data.set_aside
        if not reason.endswith(("begun_before_the_oldest_segment", "while_recording_was_off"))
    }
    assert unexplained <= {"step_without_beginning", "worker_step_without_engine"}


def test_all_processes_stop_and_go_on_within_two_seconds(switched):
    """The switch is obeyed by the API server and the engine, soon after it was set."""
    *_, (off, on), spool = switched
    data = read_spool(spool)
    gaps = {
        process.header.role: gap
        for process in data.processes.values()
        for gap in process.gaps
        if gap.reason is StopReason.OFF
    }
    assert {"api", "engine"} <= gaps.keys()
    for gap in gaps.values():
        assert 0 <= gap.begin - off < 2e9
        assert 0 <= gap.end - on < 2e9
    assert [r for r in data.requests if off + 2e9 < r.received < on] == []


def test_report_says_all_of_it(switched, tmp_path):
    """Removed segments, requests left out, when recording was off, and what it cost are in the report."""
    ingest_spool(switched[3], tmp_path / "dataset")
    ingest = analyze([tmp_path / "dataset"], load_rules()).ingest
    assert ingest.not_sampled > 20
    assert ingest.removed["segments"] > 0
    assert any("engine" in told and "switched off from" in told for told in ingest.stopped)
    (cost,) = ingest.own_cost
    assert cost.process.startswith("engine ")
    assert 0 < cost.share < 0.05
