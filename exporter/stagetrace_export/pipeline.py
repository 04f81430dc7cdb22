"""The way of closed requests to a receiver: partition, make spans, deliver, count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan

from stagetrace import Partition, RequestTimeline, SpoolData, partition
from stagetrace_analyzer.classes import ClassRules
from stagetrace_export.closed import Closed
from stagetrace_export.exporters import Delivery
from stagetrace_export.metrics import StageMetrics
from stagetrace_export.spans import Origin, ended_steps, parent_of, request_spans, step_spans

UNSAMPLED: Final = "parent_not_sampled"
"""Why a request is set aside whose client says that its trace is not sampled."""

_Partitioned = Sequence[tuple[RequestTimeline, Partition]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be exported of a spool.

    Attributes:
        rules: Rules that give a request its traffic class.
        unsampled: Also requests whose client says that their trace is not sampled.
        steps: Also the engines' steps.
        final: Nothing more will be recorded.
    """

    rules: ClassRules
    unsampled: bool = False
    steps: bool = False
    final: bool = False


class Pipeline:
    """Carries requests to a receiver.

    Args:
        delivery: Takes spans.
        wanted: What is exported.
        metrics: Where requests that were exported are counted as well, or None.

    Attributes:
        counts: What was taken: ``requests``, ``spans`` (with those of steps), ``steps``; and what
            was set aside, by reason.
    """

    def __init__(self, delivery: Delivery, wanted: Wanted, metrics: StageMetrics | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._delivery = delivery
        self._wanted = wanted
        self._metrics = metrics
        self._last_steps: dict[str, int] = {}

    def export(self, closed: Closed) -> bool:
        """Deliver requests, and with them the steps that have ended.

        Returns:
            Whether the receiver took everything.  If not, nothing is counted; the same may be tried again.
        """
        data = closed.data
        places = self._ended_steps(data)
        if not (closed.requests or any(places.values())):
            return True
        requests = [(r, partition(r)) for r in closed.requests if self._wanted.unsampled or is_sampled(r)]
        origin = Origin.of(data, self._wanted.rules, steps=self._wanted.steps)
        before = self._delivery.spans
        if not self._delivery.export(_spans(requests, data, places, origin)):
            return False
        self.counts += Counter(
            requests=len(requests),
            spans=self._delivery.spans - before,
            steps=sum(map(len, places.values())),
            **{UNSAMPLED: len(closed.requests) - len(requests)},
        )
        self._note_steps(data, places)
        self._observe(closed, requests)
        return True

    def _ended_steps(self, data: SpoolData) -> dict[str, range]:
        if not self._wanted.steps:
            return {}
        return {
            steps.engine: ended_steps(
                steps, after=self._last_steps.get(steps.engine, 0), final=self._wanted.final
            )
            for steps in data.engines
        }

    def _note_steps(self, data: SpoolData, places: dict[str, range]) -> None:
        for steps in data.engines:
            if found := places.get(steps.engine):
                self._last_steps[steps.engine] = steps.steps[found[-1]].number

    def _observe(self, closed: Closed, requests: _Partitioned) -> None:
        """Count requests, also those that have no spans: metrics are not sampled."""
        if self._metrics is None:
            return
        known = {request.request_id: parts for request, parts in requests}
        for request in closed.requests:
            parts = known.get(request.request_id) or partition(request)
            self._metrics.observe(request, parts, closed.data.pair(request.instance))


def is_sampled(request: RequestTimeline) -> bool:
    """Whether a client that sent a ``traceparent`` says that its trace is sampled; others' always are."""
    parent = parent_of(request)
    return parent is None or parent.trace_flags.sampled


def _spans(
    requests: _Partitioned, data: SpoolData, places: dict[str, range], origin: Origin
) -> Iterator[ReadableSpan]:
    for request, parts in requests:
        yield from request_spans(request, parts, origin)
    for steps in data.engines:
        if found := places.get(steps.engine):
            yield from step_spans(steps, found, origin.clocks[steps.engine], origin.resources[steps.engine])
