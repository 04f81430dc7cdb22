"""The recording API within a server that the plug-in traces."""

from __future__ import annotations

import asyncio

import stagetrace
from stagetrace import Stage, partition, read_spool
from stagetrace.recording import close_recorder, current, process_recorder
from stagetrace.testing import check_partition
from stagetrace_vllm import activate, deactivate
from stagetrace_vllm.http import TracedApplication


def test_stages_of_a_middleware_belong_to_the_traced_request(tmp_path, monkeypatch):
    """A stage that a user adds around vLLM's application is the traced request's; there is one recorder."""
    monkeypatch.setenv("STAGETRACE_SPOOL", str(tmp_path))
    close_recorder()
    activate()

    async def app(_scope, _receive, send):
        with stagetrace.stage(Stage.PREPROCESS):
            stagetrace.item(0, width=3)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def nobody():
        return {"type": "http.disconnect"}

    async def send(_message):
        return

    async def serve():
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await TracedApplication(app, process_recorder())(scope, nobody, send)
        assert current.get() is None
        with stagetrace.request(facts={"label": "beside"}):
            pass

    try:
        stagetrace.start()
        asyncio.run(serve())
    finally:
        deactivate()
    data = read_spool(tmp_path)
    assert (len(data.processes), data.faults, data.set_aside) == (1, 0, {})
    traced, beside = data.requests
    assert traced.request_id != beside.request_id
    check_partition(traced, partition(traced))
    assert [part.stage for part in traced.parts] == [Stage.PREPROCESS]
    assert [i.stage for i in partition(traced).ttft] == [Stage.RECEIVE, Stage.PREPROCESS, Stage.RESPOND]
    assert traced.items[0].facts == {"width": 3}
