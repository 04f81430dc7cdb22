"""The client's clock beside the server's stages: what lies between them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagetrace_analyzer.dataset import open_dataset

_MS: Final = 1e6
_PREFIX: Final = "chatcmpl-"


@dataclass(frozen=True, slots=True)
class Spread:
    """A difference over many requests, in milliseconds."""

    p50_ms: float
    p95_ms: float
    least_ms: float

    @classmethod
    def of(cls, differences_ns: Sequence[int]) -> Spread:
        """Summarize differences in nanoseconds; there must be at least one."""
        ordered = sorted(differences_ns)
        return cls(
            p50_ms=statistics.median(ordered) / _MS,
            p95_ms=ordered[-(-len(ordered) * 95 // 100) - 1] / _MS,
            least_ms=ordered[0] / _MS,
        )

    def __str__(self) -> str:
        return f"p50 {self.p50_ms:.1f} ms, p95 {self.p95_ms:.1f} ms, least {self.least_ms:.1f} ms"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the client's figures differ from the sums of stages.

    Attributes:
        requests: Complete requests that both sides know.
        unmatched: Complete requests of the client that the dataset does not know.
        before: From the client's sending to the server's receipt.
        ttft_beyond: The client's time from the server's receipt to the first text,
            less the sum of the stages of TTFT.
        completion_beyond: The same to the last byte.
    """

    requests: int
    unmatched: int
    before: Spread | None
    ttft_beyond: Spread | None
    completion_beyond: Spread | None


def compare_with_client(dataset: Path, observations: Path) -> Agreement:
    """Match the client's observations with the dataset by request id.

    Raises:
        DataError: The dataset cannot be read.
    """
    query = "SELECT external_id, received_unix_ns, ttft_ns, completion_ns FROM requests WHERE outcome = 'ok'"
    with open_dataset([dataset]) as connection:
        rows = connection.execute(query).fetchall()
    served = {str(row[0]).removeprefix(_PREFIX): row[1:] for row in rows if row[0] is not None}
    before, ttft, completion, unmatched = [], [], [], 0
    with observations.open(encoding="utf-8") as file:
        for line in file:
            seen = json.loads(line)
            if seen["error"] is not None:
                continue
            if seen["request_id"] not in served:
                unmatched += 1
                continue
            received, ttft_ns, completion_ns = served[seen["request_id"]]
            arrival = received - seen["intended_unix_ns"] + seen["intended_ns"]
            before.append(arrival - seen["sent_ns"])
            completion.append(seen["last_ns"] - arrival - completion_ns)
            if ttft_ns is not None and seen["first_useful_ns"] is not None:
                ttft.append(seen["first_useful_ns"] - arrival - ttft_ns)
    return Agreement(
        requests=len(before),
        unmatched=unmatched,
        before=Spread.of(before) if before else None,
        ttft_beyond=Spread.of(ttft) if ttft else None,
        completion_beyond=Spread.of(completion) if completion else None,
    )
