"""Which requests are recorded when not all are."""

from __future__ import annotations

import random
from typing import Final

_LOW_BITS: Final = 64
_LOW_HEX: Final = 16
_SAMPLED_FLAG: Final = 1


class Sampler:
    """Chooses requests, as the samplers of OpenTelemetry do.

    A share is chosen by the trace's id (``traceidratio``), so that all servers
    of a trace choose alike, or by chance when a request belongs to no trace.

    Args:
        share: Share of the requests to record, between 0 and 1.
        parent: Whether the caller's decision, the sampled flag of its
            ``traceparent``, goes before the share (``parentbased_traceidratio``).

    Raises:
        ValueError: The share is none.
    """

    def __init__(self, share: float = 1.0, *, parent: bool = False) -> None:
        if not 0 <= share <= 1:
            raise ValueError(share)
        self._bound = round(share * (1 << _LOW_BITS))
        self._parent = parent
        # Its own: the host may have seeded the global one, and counts on its sequence.
        self._random = random.Random()  # noqa: S311 - not for secrets

    @property
    def takes_all(self) -> bool:
        """Whether every request is recorded."""
        return not self._parent and self._bound > (1 << _LOW_BITS) - 1

    def takes(self, traceparent: str | None) -> bool:
        """Decide on a request by its well-formed ``traceparent``, or None if it has none."""
        if traceparent is None:
            return self._random.getrandbits(_LOW_BITS) < self._bound
        _, trace, _, flags = traceparent.split("-")
        if self._parent:
            return bool(int(flags, 16) & _SAMPLED_FLAG)
        return int(trace[-_LOW_HEX:], 16) < self._bound
