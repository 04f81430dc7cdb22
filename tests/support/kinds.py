"""Requests of every kind: sent to any path of a real server, and what must hold of each."""

from __future__ import annotations

import asyncio
import json

from scenes import play

from stagetrace import Horizon, Outcome, Stage, partition
from stagetrace.testing import check_partition


async def post(client, label, path, request, *, status=200):
    """Send a request to a path of the server and return its whole answer."""
    async with client.session.post(
        client.server.url + path, json=request, headers=client.headers(label)
    ) as response:
        answer = await response.read()
    assert response.status == status, (label, answer[:500])
    return answer


def ask(server, phase, requests, *, in_turn=False):
    """Send requests, by label a path and a body each, all at once or in turn.

    Returns the answers and the timelines, by label.
    """
    answers = {}

    async def scene(client):
        async def one(label, path, request):
            answers[label] = await post(client, label, path, request)

        sent = [one(label, path, request) for label, (path, request) in requests.items()]
        if in_turn:
            for each in sent:
                await each
        else:
            await asyncio.gather(*sent)

    _, timelines = play(server, phase, scene)
    assert timelines.keys() == requests.keys()
    return answers, timelines


def spent(request, horizon=Horizon.COMPLETION):
    """Nanoseconds in each stage of a request that ended well, is partitioned whole and explained to 98 %."""
    assert (request.outcome, request.facts.get("error_code")) == (Outcome.OK, None)
    parts = partition(request)
    check_partition(request, parts)
    for each in Horizon:
        intervals = parts.of(each)
        whole = sum(i.duration for i in intervals)
        unknown = sum(i.duration for i in intervals if i.stage is Stage.UNATTRIBUTED)
        assert unknown < 0.02 * whole, (request.facts, intervals)
    stages = {}
    for interval in parts.of(horizon):
        stages[interval.stage] = stages.get(interval.stage, 0) + interval.duration
    return stages


def check_joined(request, engine_requests):
    """Check that all of a request's engine requests are known to API server, engine and worker."""
    assert len(request.engine_requests) == engine_requests
    assert sorted(engine.index for engine in request.engine_requests) == list(range(engine_requests))
    for engine in request.engine_requests:
        steps = engine.steps
        assert steps.steps[steps.place(engine.members[0][0])].begin is not None
        assert engine.joined <= engine.held <= engine.added <= engine.freed
        assert steps.place(engine.first_token) is not None
        assert steps.steps[steps.place(engine.first_token)].done <= engine.output_first


def check_server(server):
    """Check that no record was lost or set aside, no fault happened, and independent counts agree."""
    data = server.read()
    assert data.dropped == data.faults == 0
    assert all(process.hooks_off == () for process in data.processes.values())
    assert set(data.set_aside) <= {"open_request"}
    assert [check for check in data.checks if not check.holds] == []


def pieces(answer):
    """The JSON objects of an answer: one, or the events of a stream."""
    if not answer.startswith((b"data: ", b"event: ")):
        return [json.loads(answer)]
    lines = answer.split(b"\n")
    return [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]


def tokens_told(answer):
    """What an answer itself says of its tokens: of its prompts, and of what was made for them."""
    told = {}
    for piece in pieces(answer):
        for place in (piece, piece.get("response") or {}, piece.get("message") or {}):
            told |= {name: count for name, count in (place.get("usage") or {}).items() if count is not None}
    return (
        told.get("prompt_tokens", told.get("input_tokens")),
        told.get("completion_tokens", told.get("output_tokens")),
    )
