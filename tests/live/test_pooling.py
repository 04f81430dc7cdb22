"""Embeddings, pooling and scores on a real server: one prompt or many, text and images."""

from __future__ import annotations

import asyncio
import json

import needs
import pytest
from kinds import ask, check_joined, check_server, post, spent, tokens_told
from scenes import fetching, part, play

from stagetrace import Outcome, Stage, partition
from stagetrace.records import JobKind
from stagetrace.testing import check_partition
from stagetrace_analyzer.demo.media import data_url, make_jpeg

WORDS = "the lamp on the table near the window is green and the door is open"
MEDIA = {Stage.RETRIEVAL, Stage.MEDIA_DECODE, Stage.MEDIA_DECODE_WAIT, Stage.ENCODE, Stage.ENCODE_WAIT}
ALWAYS = {Stage.RECEIVE, Stage.PREPROCESS, Stage.HANDOFF, Stage.PREFILL, Stage.RESPOND}
IMAGE_TOKENS = 208


@pytest.fixture(scope="module")
def pooling_server(tmp_path_factory, start_server):
    """The smallest model as one that makes embeddings, with a media cache."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import TINY, make_model

    model = make_model(tmp_path_factory.mktemp("model") / "tiny", TINY)
    environment = {"VLLM_MEDIA_CACHE": str(tmp_path_factory.mktemp("cache"))}
    arguments = ("--runner=pooling", "--convert=embed")
    with start_server(model, *arguments, environment=environment) as server:
        yield server


def from_store(server, seed, *, delay_ms=20):
    """An image that the server fetches."""
    return part(server.media.url(seed, delay_ms=delay_ms))


def in_body(seed):
    """An image in the request itself."""
    return part(data_url(make_jpeg(seed)))


def chat(*content):
    """A conversation of one message; it ends in text."""
    return [{"role": "user", "content": [*content, {"type": "text", "text": WORDS}]}]


def document(image):
    """A document of a score that is an image."""
    return {"content": [image]}


@pytest.fixture(scope="module")
def pooled(pooling_server):
    """Every kind of request at once: its answer, its timeline, its prompts, its images, and how they come."""
    server = pooling_server
    query, answers = "which lamp is green", ["the lamp on the table", "no lamp"]
    score = {"queries": query, "documents": answers}
    rerank = {"query": query, "documents": answers}
    kinds = {
        "text": ("/v1/embeddings", {"input": WORDS}, 1, 0),
        "tokens": ("/v1/embeddings", {"input": [5, 6, 7, 8]}, 1, 0),
        "texts": ("/v1/embeddings", {"input": [WORDS, "the lamp", f"{WORDS} {WORDS}"]}, 3, 0),
        "cohere": ("/v2/embed", {"texts": [WORDS, "the lamp"], "embedding_types": ["float"]}, 2, 0),
        "pooling": ("/pooling", {"input": WORDS}, 1, 0),
        "bytes": ("/pooling", {"input": WORDS, "encoding_format": "bytes"}, 1, 0),
        "image in body": ("/v1/embeddings", {"messages": chat(in_body(10))}, 1, 1),
        "image from store": ("/pooling", {"messages": chat(from_store(server, 20))}, 1, 1),
        "images": ("/v1/embeddings", {"messages": chat(from_store(server, 30), in_body(31))}, 1, 2),
        "conversations": (
            "/v1/embeddings",
            {"messages": [chat(in_body(40)), chat(), chat(from_store(server, 41), in_body(40))]},
            3,
            3,
        ),
        "score": ("/score", score, 3, 0),
        "score on its old path": ("/v1/score", score, 3, 0),
        "rerank": ("/rerank", rerank, 3, 0),
        "rerank on its old path": ("/v1/rerank", rerank, 3, 0),
        "rerank on its other path": ("/v2/rerank", rerank, 3, 0),
        "score of images": (
            "/score",
            {"queries": query, "documents": [document(from_store(server, 50)), document(in_body(51))]},
            3,
            2,
        ),
    }
    requests = {label: (path, {"model": "tiny"} | body) for label, (path, body, *_) in kinds.items()}
    sent, timelines = ask(server, "pooled", requests)
    return {
        label: (sent[label], timelines[label], prompts, images)
        for label, (_, _, prompts, images) in kinds.items()
    }


def test_every_prompt_is_joined(pooled):
    """Each prompt is an engine request of its own, and its only output has a step."""
    for answer, request, prompts, images in pooled.values():
        check_joined(request, prompts)
        assert sorted(engine.prompt for engine in request.engine_requests) == list(range(prompts))
        assert request.facts["output_tokens"] == 0
        assert request.facts["media_items"] == len(request.items) == images
        assert request.facts["finish_reason"] == "stop"
        if answer.startswith(b"{") and b'"usage"' in answer:
            assert request.facts["prompt_tokens"] == tokens_told(answer)[0]
        if b'"id"' in answer:
            assert request.facts["external_id"] == json.loads(answer)["id"]


def test_every_partition_is_whole(pooled):
    """A pooling request has no token to decode; its answer comes in one piece and is useful at once."""
    for _, request, _, images in pooled.values():
        stages = spent(request)
        assert stages.keys() >= ALWAYS
        assert not stages.keys() & {Stage.DECODE, Stage.DECODE_WAIT}
        assert (request.tokens_before, request.facts["stream"]) == (None, False)
        assert request.first_useful <= request.last_byte
        if not images:
            assert not stages.keys() & MEDIA


def test_media_is_told_from_the_job_that_loads_it(pooled):
    """Fetch and decoding stand in the middle of preprocessing, one item after the other, and nothing waits there."""
    for _, request, _, images in pooled.values():
        parts = partition(request)
        loading = [i for i in parts.completion if i.item is not None]
        by_http = {item.index for item in request.items.values() if item.facts["scheme"] == "http"}
        assert {i.item for i in loading} == set(range(images))
        assert {i.item for i in loading if i.stage is Stage.RETRIEVAL} == by_http
        assert {i.item for i in loading if i.stage is Stage.MEDIA_DECODE} == set(range(images))
        assert all(i.stage is not Stage.MEDIA_DECODE_WAIT for i in loading)
        for item in request.items.values():
            assert item.inline
            inside = [i.duration for i in loading if i.item == item.index]
            assert sum(inside) == item.ready - item.begin


def test_facts_of_media_items(pooled):
    """Bytes, size, tokens and both caches are known for every item, also when prompts share one."""
    for label, (_, request, _, _) in pooled.items():
        for item in request.items.values():
            facts = item.facts
            assert (facts["width"], facts["height"], facts["format"]) == (320, 240, "jpeg")
            assert facts["tokens"] == IMAGE_TOKENS
            assert facts["scheme"] == "data" or facts["fetch_attempts"] == 1
            if label != "conversations":
                assert (facts["processor_cache"], facts["encoder_cache"]) == ("miss", "miss")
    shared = pooled["conversations"][1].items
    assert [shared[place].facts["processor_cache"] for place in range(3)] == ["miss", "miss", "hit"]
    assert shared[0].facts["hash"] == shared[2].facts["hash"] != shared[1].facts["hash"]
    assert shared[1].facts["encoder_cache"] == "miss"
    assert {shared[place].facts["encoder_cache"] for place in (0, 2)} == {"miss", "hit"}


def test_prompts_are_rendered_in_one_job_each(pooled):
    """Media, template, tokens and processor of a prompt are one job; the answer is made in another."""
    for _, request, prompts, _ in pooled.values():
        kinds = [job.kind for job in request.jobs]
        assert kinds.count(JobKind.RENDER) == prompts
        assert set(kinds) <= {JobKind.RENDER, JobKind.OTHER}


def test_slow_store_holds_up_the_one_thread_that_renders(pooling_server):
    """A fetch of 800 ms is retrieval of its request, and ``preprocess.wait`` of the text behind it."""

    async def scene(client):
        slow = {"model": "tiny", "messages": chat(from_store(pooling_server, 60, delay_ms=800))}
        task = asyncio.create_task(post(client, "image", "/v1/embeddings", slow))
        await client.until("image", fetching)
        await post(client, "text", "/pooling", {"model": "tiny", "input": WORDS})
        await task

    _, requests = play(pooling_server, "slow", scene)
    image, text = spent(requests["image"]), spent(requests["text"])
    assert image[Stage.RETRIEVAL] >= 800e6
    (item,) = requests["image"].items.values()
    waits = [i for i in partition(requests["image"]).completion if i.stage is Stage.PREPROCESS_WAIT]
    assert all(wait.end <= item.begin or wait.begin >= item.ready for wait in waits)
    assert text[Stage.PREPROCESS_WAIT] >= 600e6
    assert Stage.RETRIEVAL not in text


def test_media_cache_is_known_inline(pooling_server):
    """An image that the server still holds is not fetched again."""
    request = {"model": "tiny", "messages": chat(from_store(pooling_server, 70))}
    sent = {"first": ("/v1/embeddings", request), "second": ("/v1/embeddings", request)}
    _, requests = ask(pooling_server, "cached", sent, in_turn=True)
    assert [requests[label].items[0].facts.get("media_cache") for label in sent] == [None, "hit"]
    assert Stage.RETRIEVAL in spent(requests["first"])
    assert Stage.RETRIEVAL not in spent(requests["second"])
    assert requests["second"].items[0].facts["processor_cache"] == "hit"


@pytest.mark.parametrize(
    ("label", "request_body"),
    [
        ("long", {"input": "lamp " * 4000}),
        ("image", {"messages": chat(part("data:image/jpeg;base64,AAAA"))}),
    ],
)
def test_refused_requests_are_errors(pooling_server, label, request_body):
    """A request that its render job refuses never reaches the engine, and is partitioned whole."""

    async def scene(client):
        await post(client, label, "/v1/embeddings", {"model": "tiny"} | request_body, status=400)

    _, requests = play(pooling_server, f"refused {label}", scene)
    request = requests[label]
    assert (request.outcome, request.facts["error_code"]) == (Outcome.ERROR, "http_400")
    assert request.engine_requests == []
    parts = partition(request)
    check_partition(request, parts)
    assert {i.stage for i in parts.completion} >= {Stage.PREPROCESS, Stage.RESPOND}
    assert all(i.stage is not Stage.UNATTRIBUTED for i in parts.completion)


def test_client_that_goes_away_while_its_image_is_fetched(pooling_server):
    """It ends where it was, although its job goes on."""

    async def scene(client):
        slow = {"model": "tiny", "messages": chat(from_store(pooling_server, 80, delay_ms=1500))}
        task = asyncio.create_task(post(client, "gone", "/v1/embeddings", slow))
        await client.until("gone", fetching)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    _, requests = play(pooling_server, "gone", scene)
    assert requests["gone"].outcome is Outcome.CANCELLED
    parts = partition(requests["gone"])
    check_partition(requests["gone"], parts)
    assert parts.completion[-1].stage is Stage.RETRIEVAL


def test_nothing_was_lost_or_set_aside(pooling_server, pooled):
    """After all that: no dropped record, no fault, every hook as known, and independent counts agree."""
    check_server(pooling_server)
