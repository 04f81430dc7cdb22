"""The front end's hooks, with a host that behaves like vLLM's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagetrace import Recorder, read_spool
from stagetrace_vllm.frontend import wrap_load_from_url_async, wrap_submit
from stagetrace_vllm.http import TracedApplication


class Connector:
    """Loads an item as vLLM's does: a look into the cache, and nothing else."""

    def __init__(self, cached):
        self.cached = cached

    def _get_cached_bytes(self, _url):
        return self.cached

    async def load(self, url, pool):
        """Look into the cache on the pool."""
        return await asyncio.get_running_loop().run_in_executor(pool, self._get_cached_bytes, url)


@pytest.mark.parametrize(("cached", "fact"), [(b"bytes", "hit"), (None, None)])
def test_hit_of_the_media_cache_is_a_fact_of_the_item(tmp_path, cached, fact):
    """An item that the cache held is a hit; the hop to the cache is no job either way."""
    recorder = Recorder(tmp_path)
    load = wrap_load_from_url_async(Connector.load, recorder)
    answers = []

    async def application(_scope, _receive, _send):
        with ThreadPoolExecutor(1) as pool:
            pool.submit = wrap_submit(pool.submit, recorder)
            answers.append(await load(Connector(cached), "http://store/image.jpg", pool))

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(TracedApplication(application, recorder)(scope, None, None))
    (request,) = read_spool(tmp_path).requests
    assert answers == [cached]
    assert request.items[0].facts.get("media_cache") == fact
    assert request.jobs == []
