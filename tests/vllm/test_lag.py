"""The lag of the event loop: recorded while requests are in flight, and nothing in between."""

from __future__ import annotations

import asyncio
import time

from stagetrace import Recorder, read_spool
from stagetrace.recorder import OFF_FILE
from stagetrace.records import RecordKind
from stagetrace.spool import is_spool
from stagetrace_vllm import lag
from stagetrace_vllm.http import TracedApplication
from stagetrace_vllm.lag import LagSampler


class Broken:
    """A recorder of whom only the count of faults is left."""

    faults = 0

    def fault(self):
        """Count a fault."""
        self.faults += 1


def lags(spool):
    """Durations of the lags in a spool, in milliseconds."""
    return [found.duration / 1e6 for found in read_spool(spool).lags] if is_spool(spool) else []


def timers():
    """Timers of the running loop that are due later."""
    return [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()]


def test_blocked_loop_is_a_lag_as_long_as_the_block(tmp_path):
    """A blocked loop is late by the time it was blocked, less what was left until the next look."""

    async def blocked():
        sampler = LagSampler(Recorder(tmp_path))
        sampler.enter()
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # noqa: ASYNC251 - blocking the loop is the point
        await asyncio.sleep(0.1)

    before = time.monotonic_ns()
    asyncio.run(blocked())
    longest = max(read_spool(tmp_path).lags, key=lambda found: found.duration)
    assert longest.duration >= 440e6
    assert before < longest.at < longest.at + longest.duration < time.monotonic_ns()


def test_lag_of_more_than_32_bits_of_nanoseconds(tmp_path):
    """A loop that hung for ten seconds is told as such."""
    sampler = LagSampler(Recorder(tmp_path))
    sampler._due = time.monotonic_ns() - 10_000_000_000
    sampler._look()
    assert 10_000 <= lags(tmp_path)[0] < 60_000


def test_a_loop_in_time_writes_nothing(tmp_path):
    """What is within the threshold is not recorded."""
    sampler = LagSampler(Recorder(tmp_path))
    sampler._due = time.monotonic_ns()
    sampler._look()
    assert lags(tmp_path) == []


def test_an_idle_server_has_no_timer(tmp_path, monkeypatch):
    """The sampler starts with the first request and stops by itself after the last one."""
    monkeypatch.setattr(lag, "IDLE_NS", 50_000_000)

    async def idle():
        sampler = LagSampler(Recorder(tmp_path))
        assert timers() == []
        for _ in range(2):
            sampler.enter()
            sampler.enter()
            await asyncio.sleep(0.15)
            assert len(timers()) == 1
            sampler.leave()
            sampler.leave()
            await asyncio.sleep(0.15)
            assert timers() == []

    asyncio.run(idle())


def test_fault_of_ours_is_counted_and_the_next_request_tries_again():
    """Without a running loop nothing is sampled, and nothing is raised."""
    broken = Broken()
    sampler = LagSampler(broken)
    sampler.enter()
    sampler.enter()
    assert broken.faults == 2


def test_traced_application_samples_while_it_answers(tmp_path):
    """A host that blocks its own loop in the middle of a request is found out."""

    async def application(_scope, _receive, _send):
        await asyncio.sleep(0.03)
        time.sleep(0.5)  # noqa: ASYNC251 - blocking the loop is the point
        await asyncio.sleep(0.03)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    traced = TracedApplication(application, Recorder(tmp_path))
    asyncio.run(traced(scope, None, None))
    assert max(lags(tmp_path)) >= 170


def test_untraced_request_starts_no_sampler(tmp_path):
    """Health checks do not wake the sampler."""

    async def application(_scope, _receive, _send):
        assert timers() == []

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    asyncio.run(TracedApplication(application, Recorder(tmp_path))(scope, None, None))


def test_sampler_looks_for_the_switch(tmp_path, monkeypatch):
    """While requests are in flight, and when one comes after none, a server notices that it is switched off."""
    monkeypatch.setattr("stagetrace.recorder.LOOK_NS", 50_000_000)
    recorder = Recorder(tmp_path)

    async def switched():
        sampler = LagSampler(recorder)
        sampler.enter()
        recorder.record(RecordKind.RECEIVED, 1)
        (tmp_path / OFF_FILE).touch()
        await asyncio.sleep(0.3)
        assert recorder.stopped
        sampler.leave()
        sampler._runs = False
        (tmp_path / OFF_FILE).unlink()
        await asyncio.sleep(0.1)
        sampler.enter()
        assert not recorder.stopped

    asyncio.run(switched())


def test_kind_belongs_to_the_api_server():
    """A lag alone names the role of its process."""
    assert RecordKind.LOOP_LAG.role == "api"
