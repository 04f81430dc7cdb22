"""Sampling in the API server: a request is recorded whole, or counted and joined to the engine's ids."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from stagetrace import Recorder, read_spool
from stagetrace.records import RecordKind
from stagetrace.sampling import Sampler
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths
from stagetrace_vllm.frontend import _engine_requests, wrap_output_processor_add_request
from stagetrace_vllm.http import TracedApplication, current_request, left_out

LOW, HIGH = b"0" * 31 + b"1", b"f" * 32


def traceparent(trace, flags=b"01"):
    """Headers of a request of a trace."""
    return [(b"traceparent", b"00-" + trace + b"-00f067aa0ba902b7-" + flags)]


class Host:
    """An application that gives every request to an engine, as vLLM's does."""

    def __init__(self, folder, sampler):
        self.recorder, self.engine = Recorder(folder), Recorder(folder)
        _engine_requests.clear()
        self.add = wrap_output_processor_add_request(lambda *_, **__: None, self.recorder)
        self.traced = TracedApplication(self.answer, self.recorder, sampler)
        self.numbers = iter(range(1000))

    async def answer(self, scope, receive, send):
        """Answer in one piece."""
        name = f"engine-{next(self.numbers)}"
        request = SimpleNamespace(
            request_id=name, external_req_id=name, sampling_params=None, pooling_params=None
        )
        self.add(None, request, None)
        key = self.engine.define(name)
        self.engine.record(RecordKind.HELD, key, 10, 10, 0)
        self.engine.record(RecordKind.ADDED, key)
        self.engine.record(RecordKind.FREED, key)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def send(self, headers, path="/v1/completions"):
        """Send a request."""

        async def nothing(*_):
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await self.traced(scope, nothing, nothing)

    def run(self, *requests):
        """Send requests one after the other in one context, as pipelined ones are."""

        async def all_of_them():
            for headers in requests:
                await self.send(headers)

        asyncio.run(all_of_them())


def kinds(folder, role):
    """Kinds of the records of a role, but for strings."""
    return [
        RecordKind(record[6])
        for path in segment_paths(folder)
        if path.name.startswith(role)
        for record in read_segment(path)
        if record[6] not in {RecordKind.DEFINE, RecordKind.LOOP_LAG}
    ]


def test_unsampled_request_leaves_two_records(tmp_path):
    """It is counted, and its engine's part is not taken for one whose front end is lost."""
    host = Host(tmp_path, Sampler(0.5))
    host.run(traceparent(HIGH), traceparent(LOW), traceparent(HIGH))
    data = read_spool(tmp_path)
    assert (len(data.requests), data.not_sampled) == (1, 2)
    assert data.requests[0].engine_requests[0].identifier == "engine-1"
    assert data.set_aside == {}
    assert [check for check in data.checks if not check.holds] == []
    found = kinds(tmp_path, "api")
    assert found[:2] == found[-2:] == [RecordKind.NOT_SAMPLED, RecordKind.ENGINE_REQUEST]
    assert data.faults == 0


def test_parent_decides(tmp_path):
    """With ``parent`` the caller's flag is honoured, and requests without a trace are recorded."""
    host = Host(tmp_path, Sampler(parent=True))
    host.run(traceparent(LOW, b"00"), traceparent(HIGH, b"01"), [], [(b"traceparent", b"junk")])
    data = read_spool(tmp_path)
    assert (len(data.requests), data.not_sampled) == (3, 1)


def test_flags_are_not_asked_without_parent(tmp_path):
    """By default everything is recorded, whatever the caller's flag says."""
    host = Host(tmp_path, None)
    host.run(traceparent(LOW, b"00"), traceparent(HIGH, b"00"))
    data = read_spool(tmp_path)
    assert (len(data.requests), data.not_sampled) == (2, 0)


def test_an_untraced_path_behind_an_unsampled_request_is_not_taken_for_it(tmp_path):
    """The mark of an unsampled request does not pass to what is sent on the same connection."""
    host = Host(tmp_path, Sampler(0.0))

    async def both():
        left_out.set(7)
        await host.send([], path="/v1/unknown")
        assert left_out.get() is None
        assert current_request.get() is None

    asyncio.run(both())
    assert kinds(tmp_path, "api") == []


def test_host_that_raises_raises(tmp_path):
    """What the application raises passes an unsampled request untouched."""
    host = Host(tmp_path, Sampler(0.0))

    async def broken(*_):
        raise ZeroDivisionError

    host.traced._application = broken
    try:
        host.run([])
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("it was swallowed")
    assert read_spool(tmp_path).not_sampled == 1
