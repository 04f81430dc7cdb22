"""The stages of real requests on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict

import aiohttp
import numpy as np
import pytest
from scenes import play, processed

from stagetrace import Horizon, Kind, Outcome, Reason, Stage, partition
from stagetrace.testing import check_partition
from stagetrace_analyzer.demo.media import data_url, make_jpeg

WORDS = "the lamp on the table near the window is green and the door is open"


def image(server, seed, *, by_url, size=(320, 240)):
    """A part of a message with a distinct image."""
    url = server.media.url(seed, size=size) if by_url else data_url(make_jpeg(seed, size))
    return {"type": "image_url", "image_url": {"url": url}}


def body(content, *, stream=True, max_tokens=8, **more):
    """A chat completion that makes exactly ``max_tokens`` tokens."""
    return {
        "messages": [{"role": "user", "content": content}],
        "stream": stream,
        "max_tokens": max_tokens,
    } | more


async def send(session, server, phase, label, request):
    """Send a request; returns status and the whole answer."""
    headers = {"baggage": f"stagetrace.phase={phase},stagetrace.label={label}"}
    url = f"{server.url}/v1/chat/completions"
    async with session.post(url, json=server.visible | request, headers=headers) as response:
        return response.status, await response.read()


def run(coroutine_of_session):
    """Run a coroutine with a session of its own."""

    async def within():
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            return await coroutine_of_session(session)

    return asyncio.run(within())


@pytest.fixture(scope="module")
def mixture(live_server):
    """Every kind of request at once: 0 to 4 images, by http and data URL, streaming and not."""
    requests = []
    for images in range(5):
        for by_url in (True, False):
            for stream in (True, False):
                seed = 100 * images + 10 * by_url + stream
                parts = [image(live_server, seed * 10 + place, by_url=by_url) for place in range(images)]
                text = {"type": "text", "text": f"{WORDS} {seed}"}
                label = "image" if images else "text"
                requests.append((label, body([text, *parts], stream=stream)))

    async def all_at_once(session):
        sent = (send(session, live_server, "mixture", label, request) for label, request in requests)
        return await asyncio.gather(*sent)

    answers = run(all_at_once)
    assert [status for status, _ in answers] == [200] * len(requests)
    return live_server.requests("mixture", len(requests))


def test_every_request_is_joined(mixture):
    """Each request is known to API server, engine and worker, and ended well."""
    for request in mixture:
        assert request.outcome is Outcome.OK
        (engine,) = request.engine_requests
        first = engine.steps.place(engine.members[0][0])
        assert engine.steps.steps[first].begin is not None
        assert engine.first_token is not None
        assert request.facts["output_tokens"] == 8


def test_every_partition_is_whole(mixture):
    """Both horizons are covered exactly, and under 2 % of them is unattributed in every class."""
    totals = defaultdict(lambda: [0, 0])
    for request in mixture:
        parts = partition(request)
        check_partition(request, parts)
        for horizon in Horizon:
            for interval in parts.of(horizon):
                total = totals[request.facts["label"], horizon]
                total[0] += interval.duration
                total[1] += interval.duration if interval.stage is Stage.UNATTRIBUTED else 0
    assert len(totals) == 4
    for (label, horizon), (whole, unattributed) in totals.items():
        assert unattributed <= 0.02 * whole, (label, horizon)


def test_stages_that_must_occur(mixture):
    """Text never meets media stages; images meet all of theirs, and retrieval only by http."""
    for request in mixture:
        stages = {interval.stage for interval in partition(request).completion}
        assert {
            Stage.RECEIVE,
            Stage.PREPROCESS,
            Stage.HANDOFF,
            Stage.PREFILL,
            Stage.DECODE,
            Stage.RESPOND,
        } <= stages
        media = {Stage.MEDIA_DECODE, Stage.ENCODE}
        if request.items:
            assert media <= stages
        else:
            assert not stages & (media | {Stage.RETRIEVAL, Stage.MEDIA_DECODE_WAIT, Stage.ENCODE_WAIT})
        by_http = {item.facts["scheme"] for item in request.items.values()} == {"http"}
        assert (Stage.RETRIEVAL in stages) == by_http


def test_facts_of_media_items(mixture):
    """Bytes, size, format, tokens, hash and the caches' answers are known for every item."""
    for request in mixture:
        assert len(request.items) == request.facts["media_items"]
        for item in request.items.values():
            assert (item.facts["width"], item.facts["height"], item.facts["format"]) == (320, 240, "jpeg")
            assert item.facts["bytes"] > 1000
            assert item.facts["tokens"] == 208
            assert item.facts["processor_cache"] == item.facts["encoder_cache"] == "miss"
            assert item.facts["scheme"] == "data" or item.facts["fetch_attempts"] == 1


def test_streaming_is_told_apart(mixture):
    """A streamed answer has its first useful byte before its last one; one in a piece has all its decoding before."""
    for request in mixture:
        decoding = [i for i in partition(request).ttft if i.stage is Stage.DECODE]
        if request.facts["stream"]:
            assert request.first_useful < request.last_byte
        else:
            assert decoding


def test_seats(mixture):
    """Twenty requests on four seats: some wait because every seat is taken."""
    waits = [
        interval.reason
        for request in mixture
        for interval in partition(request).completion
        if interval.stage is Stage.PREFILL_WAIT
    ]
    assert Reason.SEATS in waits


def test_queue_lengths_agree_with_the_scheduler(live_server, mixture):
    """The scheduler's own running count bounds what each step holds, and its tokens add up."""
    (steps,) = live_server.read().engines
    assert [step.number for step in steps.steps] == list(range(1, len(steps.steps) + 1))
    for step in steps.steps:
        assert step.requests <= step.running <= 4
        assert step.decodes <= step.requests <= step.tokens or not step.tokens
        assert step.done is not None or step is steps.steps[-1]


def test_text_arriving_in_an_encoding_step_waits_for_the_step(live_server):
    """Other people's images show as ``prefill.wait`` with reason ``step``, not as a long hand-off."""
    images = [image(live_server, 7000 + place, by_url=False) for place in range(4)]

    async def text_into_encoding(client):
        with live_server.paced(600):
            owner = asyncio.create_task(client.send("image", body([*images, {"type": "text", "text": "x"}])))
            await client.until("image", processed)
            await asyncio.sleep(0.1)
        await client.send("text", body(WORDS))
        await owner

    _, requests = play(live_server, "into", text_into_encoding)
    text = partition(requests["text"])
    spent = defaultdict(int)
    for interval in text.ttft:
        spent[interval.stage, interval.reason] += interval.duration
    whole = requests["text"].first_useful - requests["text"].received
    assert spent[Stage.PREFILL_WAIT, Reason.STEP] > 0.5 * whole
    assert spent[Stage.HANDOFF, None] < 0.1 * whole
    assert all(interval.stage is not Stage.ENCODE for interval in text.completion)
    waited = next(i for i in text.ttft if i.stage is Stage.PREFILL_WAIT)
    owner = requests["image"].engine_requests[0]
    assert any(number in owner.encoded for number in range(waited.first_step, waited.last_step + 1))


def test_little_is_unattributed_under_twice_the_capacity(live_server):
    """At twice the rate that the server can do, under 2 % of both horizons is unattributed at p95 in every class."""

    def labelled(number):
        if number % 2:
            return "text", body(f"{number} {WORDS}")
        return "image", body(
            [image(live_server, 6000 + number, by_url=False), {"type": "text", "text": WORDS}]
        )

    async def served_per_s(session, numbers):
        began = time.monotonic()
        await asyncio.gather(*(send(session, live_server, "capacity", *labelled(n)) for n in numbers))
        return len(numbers) / (time.monotonic() - began)

    # The first burst after other work is served more slowly than what has settled.
    capacity = max(
        run(lambda session, begin=begin: served_per_s(session, range(begin, begin + 24))) for begin in (0, 24)
    )
    requests = [labelled(number) for number in range(100, 180)]

    async def twice_as_fast(session):
        began = time.monotonic()
        sent = []
        for request in requests:
            sent.append(asyncio.create_task(send(session, live_server, "overload", *request)))
            await asyncio.sleep(0.25 / capacity)
        sending_s = time.monotonic() - began
        await asyncio.gather(*sent)
        return sending_s, time.monotonic() - began

    sending_s, whole_s = run(twice_as_fast)
    assert whole_s >= 2 * sending_s, "the server could do more than half of it"
    unattributed = defaultdict(list)
    for request in live_server.requests("overload", 80):
        parts = partition(request)
        for horizon in Horizon:
            intervals = parts.of(horizon)
            missing = sum(i.duration for i in intervals if i.stage is Stage.UNATTRIBUTED)
            unattributed[request.facts["label"], horizon].append(missing / sum(i.duration for i in intervals))
    assert len(unattributed) == 4
    for shares in unattributed.values():
        assert np.quantile(shares, 0.95, method="higher") < 0.02


def test_cached_image_is_not_encoded_again(live_server):
    """An image seen before is a hit of both caches and has no encode stage."""

    async def twice(session):
        for _ in range(2):
            parts = [image(live_server, 8000, by_url=False), {"type": "text", "text": WORDS}]
            await send(session, live_server, "twice", "image", body(parts))

    run(twice)
    first, second = live_server.requests("twice", 2)
    assert {first.items[0].facts[name] for name in ("processor_cache", "encoder_cache")} == {"miss"}
    assert {second.items[0].facts[name] for name in ("processor_cache", "encoder_cache")} == {"hit"}
    stages = {interval.stage for interval in partition(second).completion}
    assert not stages & {Stage.ENCODE, Stage.ENCODE_WAIT}


def test_slow_media_server_is_retrieval(live_server):
    """A fetch of 600 ms is 600 ms of retrieval, and not of anything else that waits."""

    async def slow(session):
        part = {"type": "image_url", "image_url": {"url": live_server.media.url(8100, delay_ms=600)}}
        await send(session, live_server, "slow", "image", body([part]))

    run(slow)
    (request,) = live_server.requests("slow", 1)
    parts = partition(request)
    retrieval = sum(i.duration for i in parts.ttft if i.stage is Stage.RETRIEVAL)
    waits = sum(i.duration for i in parts.ttft if i.stage.kind is Kind.WAIT)
    assert retrieval >= 600e6
    assert waits < 0.2 * retrieval


@pytest.mark.parametrize(
    ("request_body", "status"),
    [
        (body([{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}]), {400, 422}),
        (body("x " * 5000), {400}),
        (body(WORDS, max_tokens=-1), {400}),
    ],
)
def test_refused_requests_are_errors_by_status(live_server, request_body, status):
    """A request that fails validation is an error with its status as code, partitioned whole."""
    phase = f"refused-{abs(hash(json.dumps(request_body)))}"

    async def refused(session):
        return await send(session, live_server, phase, "text", request_body)

    answered, _ = run(refused)
    assert answered in status
    (request,) = live_server.requests(phase, 1)
    assert (request.outcome, request.facts["error_code"]) == (Outcome.ERROR, f"http_{answered}")
    check_partition(request, partition(request))


def test_client_that_goes_away_is_cancelled(live_server):
    """A client that leaves in the middle of a stream cancels its request, in the stage it was in."""

    async def leave(session):
        headers = {"baggage": "stagetrace.phase=leave"}
        url = f"{live_server.url}/v1/chat/completions"
        async with session.post(
            url, json=live_server.visible | body(WORDS, max_tokens=1000), headers=headers
        ) as response:
            await response.content.readuntil(b"\n\n")
            response.close()

    def let_go(data):
        left = [request for request in data.requests if request.facts.get("phase") == "leave"]
        return any(request.engine_requests[0].freed for request in left)

    with live_server.paced(10):
        run(leave)
        live_server.wait_for(let_go)
    (request,) = live_server.requests("leave", 1)
    assert request.outcome is Outcome.CANCELLED
    parts = partition(request)
    check_partition(request, parts)
    # Between the last step and the news of the client there may be an instant that nobody recorded.
    stages = [interval.stage for interval in parts.completion if interval.duration > 1e6]
    assert stages[-1] in {Stage.DECODE, Stage.RESPOND}


def test_nothing_was_lost_or_set_aside(live_server, mixture):
    """After all that: no dropped record, no internal fault, every hook as known."""
    data = live_server.read()
    assert data.dropped == data.faults == 0
    assert all(process.hooks_off == () for process in data.processes.values())
    assert {process.header.role for process in data.processes.values()} == {"api", "engine", "worker"}
    assert data.processes[data.engines[0].engine].facts["model"] == "tiny"
    harmless = {"open_request"}
    assert set(data.set_aside) <= harmless
    assert [check for check in data.checks if not check.holds] == []
