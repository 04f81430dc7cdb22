"""Which token a chunk of a stream is made of."""

from __future__ import annotations

from typing import Any

from stagetrace.recorder import Recorder


class Delivery:
    """Which of the engine's tokens the next chunk of a stream is made of.

    Chunks are not tokens: a parser may swallow tokens, a slow consumer finds
    several merged, and ``--stream-interval`` holds them back.  So until the
    first useful chunk the queues between the engine's outputs and the request's
    tasks are watched, on those queue objects alone; each prompt has one.
    """

    __slots__ = ("_latest", "_queues", "_released", "_taken", "_tokens")

    def __init__(self) -> None:
        self._queues: list[Any] = []
        self._tokens: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._latest = 0
        self._released = False

    def watch(self, queue: Any, first_choice: int, recorder: Recorder) -> None:
        """Watch a prompt's queue, which several answers share; they are counted on from the first choice."""
        if queue is None or self._released or any(queue is known for known in self._queues):
            return
        self._queues.append(queue)
        put, get, get_nowait = queue.put, queue.get, queue.get_nowait
        # What was put since the queue was emptied: tokens before the first one of it, by choice.
        pending: dict[int, int] = {}

        def watched_put(output: Any) -> None:
            try:
                self._note_put(output, first_choice, pending)
            except Exception:
                recorder.fault()
            put(output)

        async def watched_get() -> Any:
            output = await get()
            self._note_taken(pending)
            return output

        def watched_get_nowait() -> Any:
            output = get_nowait()
            if output is not None:
                self._note_taken(pending)
            return output

        queue.put, queue.get, queue.get_nowait = watched_put, watched_get, watched_get_nowait

    def first(self, choice: int | None) -> tuple[int, int]:
        """Return the choice of a chunk, and its tokens before the chunk; None is the choice taken last."""
        known = choice if choice in self._taken else None
        found = self._latest if known is None else known
        return found, self._taken.get(found, 0)

    def release(self) -> None:
        """Watch no longer."""
        self._released = True
        for queue in self._queues:
            del queue.put, queue.get, queue.get_nowait
        self._queues.clear()

    def _note_put(self, output: Any, first_choice: int, pending: dict[int, int]) -> None:
        for one in getattr(output, "outputs", ()):
            choice = first_choice + one.index
            known = self._tokens[choice] = self._tokens.get(choice, 0) + len(one.token_ids)
            if known:
                pending.setdefault(choice, known - 1)

    def _note_taken(self, pending: dict[int, int]) -> None:
        if pending:
            self._latest = next(iter(pending))
            self._taken.update(pending)
            pending.clear()
