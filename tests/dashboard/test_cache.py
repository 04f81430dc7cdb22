from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagetrace_dashboard.cache import Cache


def test_a_value_is_made_once():
    """However many threads ask at a time, one makes the value and all get it."""
    cache, made, start = Cache(2), [], threading.Barrier(8)

    def make():
        made.append(1)
        return object()

    def ask(_):
        start.wait()
        return cache.get("key", make)

    with ThreadPoolExecutor(8) as pool:
        found = set(map(id, pool.map(ask, range(8))))
    assert (len(found), len(made)) == (1, 1)


def test_the_oldest_is_forgotten():
    """Beyond its size the value goes that was not used for longest."""
    cache = Cache(2)
    for key in ("a", "b", "a", "c"):
        cache.get(key, lambda key=key: key)
    assert cache.get("a", lambda: "new") == "a"
    assert cache.get("b", lambda: "new") == "new"


def test_a_failure_is_tried_again():
    """What could not be made is an error for who waits, and is made anew for who asks next."""
    cache = Cache(2)
    with pytest.raises(ZeroDivisionError):
        cache.get("key", lambda: 1 // 0)
    assert cache.get("key", lambda: 5) == 5
