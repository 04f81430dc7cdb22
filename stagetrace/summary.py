"""What is told of a request as a whole, once its time is partitioned; datasets and spans tell the same."""

from __future__ import annotations

from itertools import takewhile

from stagetrace.partition import Partition
from stagetrace.stages import Outcome, Stage
from stagetrace.timeline import RequestTimeline


def ended_stage(request: RequestTimeline, parts: Partition) -> Stage | None:
    """Return the stage in which a request failed or broke off; that the client was told comes after it."""
    if request.outcome is Outcome.OK:
        return None
    stages = [interval.stage for interval in parts.completion]
    told = request.outcome is Outcome.ERROR and stages[-1:] == [Stage.RESPOND]
    return next(iter(reversed(stages[:-1] if told else stages)), None)


def shared_intervals(parts: Partition) -> int:
    """Return how many intervals from the beginning both horizons have in common."""
    pairs = zip(parts.ttft, parts.completion, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
