"""Delays of known size, put into a real server's engine from outside, and the stage and reason they are found in."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from scenes import TEXT, body, play, small_image, submitted, words

from stagetrace import Horizon, Kind, Reason, Stage, partition
from stagetrace.records import JobKind
from stagetrace_analyzer.demo.model import ModelDimensions, make_model

NOTHING_BETWEEN = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""A chat template without a word of its own: where an image comes first, an image refused is a request refused."""


@pytest.fixture(scope="module")
def engine(demo_model, start_server):
    """A server with two seats, 256 tokens a step, and a KV cache for one request of the greatest length."""
    with start_server(
        demo_model,
        "--max-num-seqs=2",
        "--max-num-batched-tokens=256",
        "--block-size=32",
        "--num-gpu-blocks-override=129",
        "--max-model-len=4096",
        '--limit-mm-per-prompt={"image":14,"video":0}',
        "--trust-request-chat-template",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def wide(tmp_path_factory, start_server):
    """A server whose vision tower is wide, whose prompts are computed a token a step, and whose encoder cache holds an image."""
    dimensions = ModelDimensions(
        vision_hidden=768,
        vision_intermediate=2048,
        vision_layers=10,
        text_hidden=256,
        text_intermediate=768,
        text_layers=6,
    )
    model = make_model(tmp_path_factory.mktemp("model") / "wide", dimensions)
    with start_server(
        model,
        "--max-num-batched-tokens=256",
        "--long-prefill-token-threshold=1",
        "--trust-request-chat-template",
    ) as server:
        yield server


@pytest.mark.parametrize("victim", ["text", "image"])
def test_taken_seats(engine, find, victim):
    """Behind two long answers on two seats everybody waits for seats, with and without an image."""
    content = {"text": [words(20)], "image": [small_image(), TEXT]}[victim]

    async def scene(client):
        await client.send("first", body(*content))
        await client.send("undelayed", body(*content))
        with engine.paced(20):
            others = [await client.start("other", body(words(20), max_tokens=200)) for _ in range(2)]
            await client.send("delayed", body(*content))
            await asyncio.gather(*(other.read for other in others))

    client, requests = play(engine, f"taken seats and {victim}", scene)
    find(
        f"taken seats and {victim}",
        Stage.PREFILL_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.SEATS,
    )


def test_used_up_tokens(engine, find):
    """Behind two long prompts of somebody else a short one waits for tokens."""

    async def scene(client):
        with engine.paced(60):
            await client.send("undelayed", body(words(20)))
            others = [asyncio.create_task(client.send("other", body(words(3900)))) for _ in range(2)]
            await client.queued(1)
            await client.send("delayed", body(words(20)))
            await asyncio.gather(*others)

    client, requests = play(engine, "long prompts", scene)
    find(
        "long prompts",
        Stage.PREFILL_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.TOKENS,
    )


def test_full_kv_cache(engine, find):
    """While somebody else's state fills the KV cache, a prompt for which no blocks are free waits for KV."""
    prompt = words(1500)

    async def scene(client):
        await client.send("undelayed", body(prompt))
        with engine.paced(12):
            other = await client.start("other", body(words(3000), max_tokens=150))
            await client.send("delayed", body(prompt))
            await other.read

    client, requests = play(engine, "full KV cache", scene)
    find(
        "full KV cache",
        Stage.PREFILL_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.KV,
    )


def test_preemption(engine, find):
    """A request that loses its blocks waits in decode.wait until the other one has ended."""
    waited_ms = []
    request = body(words(1900), max_tokens=300)

    async def scene(client):
        with engine.paced(8):
            undelayed = await client.start("undelayed", request)
            await undelayed.read
            other = await client.start("other", body(words(1900), max_tokens=300))
            delayed = await client.start("delayed", request)
            await asyncio.gather(other.read, delayed.read)
        # It stalls where its longest silence begins, and finds room once the other has ended.
        stalled, _ = delayed.longest_silence()
        waited_ms.append((other.times[-1] - stalled) * 1e3)

    _, requests = play(engine, "preemption", scene)
    find(
        "preemption",
        Stage.DECODE_WAIT,
        waited_ms[0],
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.KV,
        horizon=Horizon.COMPLETION,
    )
    reasons = [part.reason for part in partition(requests["delayed"]).completion]
    assert Reason.PREEMPTING in reasons
    recomputed = [part.recompute for part in partition(requests["delayed"]).completion]
    assert True in recomputed


def test_used_up_encoder_budget(engine, find):
    """Behind somebody else's images, one of which is encoded a step, an image waits for the encoder's budget."""
    image, many = small_image(), [small_image() for _ in range(14)]
    request = body(image, TEXT, chat_template=NOTHING_BETWEEN)
    # Two short steps of text, in the first of which the image comes, and then an image a step.
    other_request = body(words(520), *many, TEXT, chat_template=NOTHING_BETWEEN)

    async def scene(client):
        # From the second time on the processor knows the images.
        await client.send("first", other_request)
        await client.send("first", request)
        await client.send("evicting", body(small_image(), TEXT))
        await client.send("undelayed", request)
        with engine.paced(60):
            other = asyncio.create_task(client.send("other", other_request))
            await client.until("other", submitted(JobKind.PROCESS))
            await client.send("delayed", request)
            await other

    client, requests = play(engine, "used up encoder budget", scene)
    find(
        "used up encoder budget",
        Stage.ENCODE_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.ENCODER_BUDGET,
    )


def slow_grammar(name):
    """A JSON schema with properties of a name, which takes over a second to compile."""
    pattern = {
        f"{name}{number}": {"type": "string", "pattern": f"^[a-z]{{{number + 1},{number + 40}}}$"}
        for number in range(20)
    }
    items = {"type": "array", "items": {"type": "object", "properties": pattern}}
    schema = {"type": "object", "properties": {f"p{number}": items for number in range(60)}}
    return {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}}


def test_slow_grammar(engine, find):
    """A grammar that compiles slowly is a wait for it, once; the second time it is there."""

    async def scene(client):
        # The first one of all takes longer than any other.
        for label, name in (("first", "p"), ("delayed", "q"), ("undelayed", "q")):
            request = body(TEXT, response_format=slow_grammar(name), allowed_token_ids=None)
            await client.send(label, request)

    client, requests = play(engine, "slow grammar", scene)
    find(
        "slow grammar",
        Stage.PREFILL_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.GRAMMAR,
    )


def test_wide_vision_tower(wide, find):
    """An image that has to be encoded takes as much longer as its ``encode`` says."""
    request = body(small_image(), TEXT)

    async def scene(client):
        # The processor knows the image from then on; the encoder has room for one only.
        await client.send("first", request)
        await client.send("evicting", body(small_image(), TEXT))
        await client.send("delayed", request)
        await client.send("undelayed", request)

    client, requests = play(wide, "wide vision tower", scene)
    find("wide vision tower", Stage.ENCODE, client.injected_ms, requests["delayed"], requests["undelayed"])


def test_full_encoder_cache(wide, find):
    """While somebody else's image is still being computed, another one finds no room in the encoder's cache."""
    # A strip is few tiles, so that what it costs itself matters little; a square fills the cache.
    request = body(small_image((320, 40)), TEXT, chat_template=NOTHING_BETWEEN)
    other_request = body(small_image((256, 256)), TEXT, chat_template=NOTHING_BETWEEN)

    async def scene(client):
        # A prompt is only computed piece by piece while there is somebody else.
        companion = await client.start("companion", body(words(20), max_tokens=1900))
        await client.send("first", request)
        await client.send("evicting", other_request)
        # A prompt is as many steps as it has tokens: they must last as long in both.
        with wide.paced(25):
            await client.send("undelayed", request)
            other = asyncio.create_task(client.send("other", other_request))
            # Everybody is silent while the other image is encoded.
            await companion.silence(0.5)
            await client.send("delayed", request)
        await asyncio.gather(other, companion.read)

    client, requests = play(wide, "full encoder cache", scene)
    find(
        "full encoder cache",
        Stage.ENCODE_WAIT,
        client.injected_ms,
        requests["delayed"],
        requests["undelayed"],
        reason=Reason.ENCODER_CACHE,
    )


def test_both_classes_wait_for_the_same_seats(engine):
    """Twenty images and twenty texts at once on two seats: both classes wait longest in the same stage for the same reason."""

    async def scene(client):
        images = [body(small_image(), words(20), max_tokens=8) for _ in range(20)]
        texts = [body(words(20), max_tokens=8) for _ in range(20)]
        pairs = zip(images, texts, strict=True)
        labelled = [
            (label, each) for pair in pairs for label, each in zip(("image", "text"), pair, strict=True)
        ]
        await asyncio.gather(*(client.send(label, request) for label, request in labelled))

    play(engine, "forty on two seats", scene)
    spent = defaultdict(lambda: defaultdict(int))
    for request in engine.requests("forty on two seats", 40):
        for interval in partition(request).ttft:
            if interval.stage.kind is Kind.WAIT:
                spent[request.facts["label"]][interval.stage, interval.reason] += interval.duration
    dominant = {label: max(waits, key=waits.get) for label, waits in spent.items()}
    assert dominant == dict.fromkeys(("image", "text"), (Stage.PREFILL_WAIT, Reason.SEATS))
