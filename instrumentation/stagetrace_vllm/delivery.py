"""Which token a chunk of a stream is made of."""

from __future__ import annotations

from typing import Any

from stagetrace.recorder import Recorder


class Delivery:
    """Which of the engine's tokens the next chunk of a stream is made of.

    Chunks are not tokens: a parser may swallow tokens, a slow consumer finds
    several merged, and ``--stream-interval`` holds them back.  So until the
    first useful chunk the queue between the engine's outputs and the request's
    task is watched, on that one queue object.
    """

    __slots__ = ("_pending", "_queue", "_tokens", "taken")

    def __init__(self) -> None:
        self._queue: Any = None
        self._tokens: dict[int, int] = {}
        self._pending: tuple[int, int] | None = None
        self.taken = (0, 0)

    def watch(self, queue: Any, recorder: Recorder) -> None:
        """Watch a queue; several answers of a request share one."""
        if queue is None or self._queue is not None:
            return
        self._queue = queue
        put, get, get_nowait = queue.put, queue.get, queue.get_nowait

        def watched_put(output: Any) -> None:
            try:
                self._note_put(output)
            except Exception:
                recorder.fault()
            put(output)

        async def watched_get() -> Any:
            output = await get()
            self._note_taken()
            return output

        def watched_get_nowait() -> Any:
            output = get_nowait()
            if output is not None:
                self._note_taken()
            return output

        queue.put, queue.get, queue.get_nowait = watched_put, watched_get, watched_get_nowait

    def release(self) -> None:
        """Watch no longer."""
        if self._queue is not None:
            del self._queue.put, self._queue.get, self._queue.get_nowait
            self._queue = None

    def _note_put(self, output: Any) -> None:
        for choice in getattr(output, "outputs", ()):
            known = self._tokens.get(choice.index, 0) + len(choice.token_ids)
            self._tokens[choice.index] = known
            if self._pending is None and known:
                self._pending = (choice.index, known - 1)

    def _note_taken(self) -> None:
        if self._pending is not None:
            self.taken, self._pending = self._pending, None
