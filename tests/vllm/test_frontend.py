"""The front end's hooks, with a host that behaves like vLLM's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from stagetrace import Recorder, read_spool
from stagetrace.records import JobKind
from stagetrace_vllm.frontend import (
    wrap_get_bytes,
    wrap_get_cache_missing_items,
    wrap_get_cached_bytes,
    wrap_get_response,
    wrap_load_from_url,
    wrap_load_from_url_async,
    wrap_streaming_error,
    wrap_submit,
)
from stagetrace_vllm.http import TracedApplication

JPEG = b"\xff\xd8\xff\xe0 and more"


class ImageMediaIO:
    """Names the modality, as vLLM's reader of images does."""


class Connector:
    """Loads items as vLLM's does: from its cache, or in two attempts from a store."""

    def __init__(self, cached=None):
        self.cached = cached

    def _get_cached_bytes(self, _url):
        return self.cached

    async def load(self, url, pool):
        """Look into the cache on the pool, and nothing else."""
        return await asyncio.get_running_loop().run_in_executor(pool, self._get_cached_bytes, url)

    def load_from_url(self, url, media_io):
        """Load an item in the thread that asks."""
        content = self._get_cached_bytes(url) or self.get_bytes(url)
        return SimpleNamespace(original_bytes=content, media=SimpleNamespace(size=(32, 24)))

    def get_bytes(self, url):
        """Fetch in two attempts."""
        if "gone" in url:
            raise FileNotFoundError
        return (self.get_response(), self.get_response())[1]

    def get_response(self):
        """One attempt."""
        return JPEG


def hooked(recorder):
    """The connector with the hooks of the plug-in."""
    members = {
        "_get_cached_bytes": wrap_get_cached_bytes(Connector._get_cached_bytes, recorder),
        "get_bytes": wrap_get_bytes(Connector.get_bytes, recorder),
        "get_response": wrap_get_response(Connector.get_response, recorder),
        "load_from_url": wrap_load_from_url(Connector.load_from_url, recorder),
    }
    members["_get_cached_bytes"].__name__ = "_get_cached_bytes"
    return type("Hooked", (Connector,), members)


def run(folder, application, *, path="/v1/embeddings"):
    """Run an application as the one that answers a request; returns the request as it was recorded."""
    recorder = Recorder(folder)

    async def answering(_scope, _receive, _send):
        with ThreadPoolExecutor(1) as pool:
            pool.submit = wrap_submit(pool.submit, recorder)
            await application(recorder, partial(asyncio.get_running_loop().run_in_executor, pool))

    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    asyncio.run(TracedApplication(answering, recorder)(scope, None, None))
    data = read_spool(folder)
    assert (data.dropped, data.faults) == (0, 0)
    (request,) = data.requests
    return request


@pytest.mark.parametrize(("cached", "fact"), [(b"bytes", "hit"), (None, None)])
def test_hit_of_the_media_cache_is_a_fact_of_the_item(tmp_path, cached, fact):
    """An item that the cache held is a hit; the hop to the cache is no job either way."""
    answers = []

    async def application(recorder, submit):
        load = wrap_load_from_url_async(Connector.load, recorder)
        answers.append(await load(hooked(recorder)(cached), "http://store/image.jpg", submit.args[0]))

    request = run(tmp_path, application, path="/v1/chat/completions")
    assert answers == [cached]
    assert request.items[0].facts.get("media_cache") == fact
    assert request.jobs == []


def test_items_that_a_job_loads(tmp_path):
    """They are known with the job that loads them, their fetch and its attempts, and what they are."""

    async def application(recorder, submit):
        connector = hooked(recorder)()

        def render(*urls):
            return [connector.load_from_url(url, ImageMediaIO()) for url in urls]

        await submit(render, "http://store/1.jpg")
        await submit(render, "http://store/2.jpg", "http://store/3.jpg")
        connector.cached = JPEG
        await submit(render, "https://store/4.jpg")

    request = run(tmp_path, application)
    assert [job.kind for job in request.jobs] == [JobKind.RENDER] * 3
    assert [request.items[index].job for index in range(4)] == [0, 1, 1, 2]
    for index, item in request.items.items():
        job = request.jobs[item.job]
        assert item.inline
        assert job.started <= item.begin <= item.ready <= job.ended
        facts = item.facts
        assert (facts["bytes"], facts["width"], facts["height"], facts["format"]) == (
            len(JPEG),
            32,
            24,
            "jpeg",
        )
        assert (facts["modality"], facts["host"]) == ("image", "store")
        held = index == 3
        assert facts.get("media_cache") == ("hit" if held else None)
        assert [fetch.attempts for fetch in item.fetches] == ([] if held else [2])
        assert all(item.begin <= fetch.begin <= fetch.end <= item.ready for fetch in item.fetches)


def test_items_that_the_event_loop_loads(tmp_path):
    """They have no job; one that fails is ready when it failed, and the host sees its own exception."""

    async def application(recorder, _submit):
        connector = hooked(recorder)()
        connector.load_from_url("http://store/1.jpg", media_io=ImageMediaIO())
        with pytest.raises(FileNotFoundError):
            connector.load_from_url("http://store/gone.jpg", ImageMediaIO())

    request = run(tmp_path, application)
    assert [(item.inline, item.job) for item in request.items.values()] == [(True, None)] * 2
    assert request.items[1].ready >= request.items[1].fetches[0].end
    assert [item.facts["modality"] for item in request.items.values()] == ["image"] * 2


def test_nothing_is_recorded_outside_of_requests(tmp_path):
    """Warming up and profiling load items too."""
    connector = hooked(Recorder(tmp_path / "spool"))()
    assert connector.load_from_url("http://store/1.jpg", ImageMediaIO()).original_bytes == JPEG
    assert not (tmp_path / "spool").exists()


def test_hits_of_the_processor_cache_are_those_of_their_prompt(tmp_path):
    """Each prompt's answer of the cache counts its own items from 0; some prompts have none, some two kinds."""

    async def application(recorder, submit):
        connector = hooked(recorder)()
        look = wrap_get_cache_missing_items(lambda hits: (hits, None), recorder)

        def render(urls, hits):
            for url in urls:
                connector.load_from_url(url, ImageMediaIO())
            return look(hits)

        await submit(render, ["http://store/1", "http://store/2"], {"image": [True, False]})
        await submit(render, [], {})
        await submit(render, ["http://store/3"], {"image": [True], "audio": []})
        await submit(render, ["http://store/4"], {"image": [True, True]})

    request = run(tmp_path, application)
    assert [request.items[index].facts.get("processor_cache") for index in range(4)] == [
        "hit",
        "miss",
        "hit",
        None,
    ]


def test_hits_for_items_that_were_loaded_before_all_prompts(tmp_path):
    """Where the event loop loads the items of all prompts, they are processed in the same order."""

    async def application(recorder, submit):
        connector = hooked(recorder)()
        look = wrap_get_cache_missing_items(lambda hits: (hits, None), recorder)
        for number in range(3):
            connector.load_from_url(f"http://store/{number}", ImageMediaIO())

        def render(hits):
            return look(hits)

        await submit(render, {"image": [False]})
        await submit(render, {"image": [True, False]})

    request = run(tmp_path, application)
    assert [request.items[index].facts["processor_cache"] for index in range(3)] == ["miss", "hit", "miss"]


@pytest.mark.parametrize(
    ("told", "kwargs", "code"),
    [
        (FileNotFoundError("/secret"), {}, "FileNotFoundError"),
        ("secret", {"err_type": "InternalServerError"}, "InternalServerError"),
        ("secret", {}, "streaming_error"),
    ],
)
def test_error_in_a_stream_has_a_code_and_never_a_text(tmp_path, told, kwargs, code):
    """The code is the exception's class, or the type that vLLM gives a text."""

    def create_streaming_error_response(_self, message, **_kwargs):
        return message

    answers = []

    async def application(recorder, _submit):
        hooked = wrap_streaming_error(create_streaming_error_response, recorder)
        answers.append(hooked(None, told, **kwargs))

    request = run(tmp_path, application, path="/v1/chat/completions")
    assert answers == [told]
    assert request.facts["error_code"] == code
    assert all(b"secret" not in path.read_bytes() for path in tmp_path.iterdir())
