"""Values that are made once, also when several threads want them at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Key = TypeVar("Key", bound="Hashable")
Value = TypeVar("Value")


class Cache(Generic[Key, Value]):
    """The most recently used values by key; what could not be made is tried again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._made: OrderedDict[Key, Future[Value]] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key; the first thread that asks makes it, the others wait for it."""
        with self._lock:
            future = self._made.get(key)
            is_mine = future is None
            if future is None:
                future = self._made[key] = Future()
                while len(self._made) > self._most:
                    self._made.popitem(last=False)
            else:
                self._made.move_to_end(key)
        if is_mine:
            self._make(key, future, make)
        return future.result()

    def ready(self, key: Key) -> bool:
        """Whether the value is there already."""
        with self._lock:
            future = self._made.get(key)
            return future is not None and future.done()

    def _make(self, key: Key, future: Future[Value], make: Callable[[], Value]) -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - it is raised again in every thread that waits
            with self._lock:
                if self._made.get(key) is future:
                    del self._made[key]
            future.set_exception(error)
