"""What the client saw of each request."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Observation:
    """One request as its client saw it.

    Offsets are monotonic nanoseconds from the start of the request's plan.

    Attributes:
        request_id: The ``X-Request-Id`` it was sent with.
        phase: The phase it belongs to.
        label: The class it belongs to.
        intended_unix_ns: When it was to be sent, nanoseconds since the epoch.
        intended_ns: The same as an offset.
        sent_ns: When it was sent; later than intended if the client itself lagged.
        first_useful_ns: When the first chunk with text arrived, or None.
        last_ns: When it ended, however it ended.
        status: HTTP status, or None without an answer.
        error: None after a complete answer; otherwise what went wrong: the name of an
            exception, ``http``, ``server`` (an error in the middle of a stream) or ``truncated``.
        output_chunks: Chunks with text; 0 or 1 for an answer in one piece.
    """

    request_id: str
    phase: str
    label: str
    intended_unix_ns: int
    intended_ns: int
    sent_ns: int
    first_useful_ns: int | None
    last_ns: int
    status: int | None
    error: str | None
    output_chunks: int

    @property
    def ttft_ns(self) -> int | None:
        """From the intended time to the first text; None if none came."""
        return None if self.first_useful_ns is None else self.first_useful_ns - self.intended_ns

    @property
    def completion_ns(self) -> int | None:
        """From the intended time to the end of the answer; None unless it was complete."""
        return None if self.error is not None else self.last_ns - self.intended_ns


def write_observations(path: Path, observations: Iterable[Observation]) -> None:
    """Write one JSON object a line, with the fields of `Observation`."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(observation)) + "\n" for observation in observations)
