"""What the horizons of a class consist of, and which wait dominates them.

A stage is named when it has the largest share of the horizon in at least 95 % of
the draws of blocks, and when that share is material; otherwise the smallest set of
stages is named that holds the largest one in 95 % of the draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from stagetrace.stages import Horizon, Kind, Outcome, Reason, Stage
from stagetrace_analyzer.intervals import MIN_BLOCKS, P95, requests_needed, share
from stagetrace_analyzer.resampling import BOUNDS
from stagetrace_analyzer.results import (
    CONFIDENCE,
    NOT_MATERIAL,
    Answer,
    Composition,
    Dominant,
    PlainAnswer,
    Quantiles,
    Question,
    Region,
    Share,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from stagetrace_analyzer.population import Places
    from stagetrace_analyzer.resampling import Resampled

MATERIAL_SHARE: Final = 0.05
"""A stage is material from this share of the horizon on."""

MATERIAL_NS: Final = 1_000_000
"""A stage is material from this mean time a request on."""

MIN_REQUESTS: Final = 200
"""Fewer requests in a region name no stage."""

MIN_WORTH: Final = 50
"""Nor do requests in a region that are worth fewer independent ones: a tail of a few long queues."""

_QUESTIONS: Final[Mapping[Question, tuple[Horizon, tuple[Stage, ...], float]]] = {
    Question.DOWNLOAD: (Horizon.TTFT, (Stage.RETRIEVAL,), MATERIAL_SHARE),
    Question.ENCODER_QUEUE: (Horizon.TTFT, (Stage.ENCODE_WAIT,), MATERIAL_SHARE),
    Question.TRANSFER_WAIT: (
        Horizon.TTFT,
        (Stage.EMBEDDING_TRANSFER_WAIT, Stage.KV_TRANSFER_WAIT),
        MATERIAL_SHARE,
    ),
    Question.INPUT: (Horizon.TTFT, (Stage.MEDIA_DECODE_WAIT, Stage.PREPROCESS_WAIT), MATERIAL_SHARE),
    Question.OUTPUT: (Horizon.COMPLETION, (Stage.DECODE_WAIT, Stage.DECODE), 0.5),
}
"""The horizon and the stages that a question is about, and the share from which the answer is yes."""


def stage_order(stage: str) -> tuple[int, str]:
    """Sort key: as requests meet the stages; stages that the model does not know come last."""
    known = [known_stage.value for known_stage in Stage]
    return (known.index(stage) if stage in known else len(known)), stage


def compositions(
    horizon: Horizon, regions: Mapping[Region, Resampled], places: Places, latency: Quantiles
) -> tuple[Composition, ...]:
    """Return the composition of a horizon in each region.

    Args:
        horizon: Which.
        regions: Sums over the requests of each region.
        places: Columns of the sums.
        latency: Quantiles of the horizon, with the effective number of requests at each.
    """
    found = []
    for region, sums in regions.items():
        lower, upper = BOUNDS[region]
        n_eff = (latency.p95 if region is Region.TAIL else latency.p50).n_eff
        worth = None if n_eff is None else n_eff * float(upper - lower)
        found.append(_composition(horizon, region, sums, places, worth))
    return tuple(found)


def _composition(
    horizon: Horizon, region: Region, sums: Resampled, places: Places, worth: float | None
) -> Composition:
    missing = _missing(region, sums, worth)
    blocks = _blocks(sums, worth)
    requests = float(sums.requests[0])
    resampled = {
        stage: sums.shares(places.of(stage)) for stage in sorted(set(places.stages), key=stage_order)
    }
    met = {stage: shares for stage, shares in resampled.items() if shares[0] > 0}
    waits = [stage for stage in met if places.kind_of[stage] is Kind.WAIT]
    return Composition(
        horizon=horizon,
        region=region,
        requests=requests,
        blocks=sums.blocks,
        mean_ns=float(sums.horizon_ns[0]) / requests if requests else None,
        shares={stage: share(shares, blocks) for stage, shares in met.items()},
        dominant_wait=_dominant({stage: met[stage] for stage in waits}, sums, places, missing),
        dominant_stage=_dominant(met, sums, places, missing),
    )


def _dominant(
    shares: Mapping[str, NDArray[np.float64]], sums: Resampled, places: Places, missing: str | None
) -> Dominant:
    """Name the stage with the largest share, or the smallest set that surely holds it.

    Args:
        shares: By stage, its share in every draw; only stages that took time.
        sums: Sums over the requests.
        places: Columns of the sums.
        missing: Why nothing can be named, None if something can.
    """
    seen = max(shares, key=lambda stage: shares[stage][0], default=None)
    if missing is not None:
        return Dominant(reason=missing, seen=seen)
    if seen is None or not _material(shares[seen][0], sums):
        return Dominant(reason=NOT_MATERIAL, seen=seen)
    stages = _surely_largest(shares)
    together = share(sums.shares(places.of(*stages)), sums.blocks)
    reasons = {stage: found for stage in stages if (found := _reasons(stage, sums, places))}
    return Dominant(stages, together, reasons or None, seen=seen)


def _missing(region: Region, sums: Resampled, worth: float | None) -> str | None:
    """Why nothing can be named, and what it would take."""
    requests = float(sums.requests[0])
    lower, upper = BOUNDS[region]
    if requests < MIN_REQUESTS or sums.blocks < MIN_BLOCKS:
        needed = math.ceil(MIN_REQUESTS / (upper - lower))
        return f"not estimable: needs at least {needed:,} {Outcome.OK} requests of the class"
    if worth is not None and worth < MIN_WORTH:
        return _worth_too_little(requests, worth, float(upper - lower))
    return None


def _worth_too_little(requests: float, worth: float, part: float = 1.0) -> str:
    """Say how many requests of a class it would take; ``requests`` are that part of them."""
    needed = math.ceil(requests / part * MIN_WORTH / max(worth, 1.0))
    are = f"these {requests:,.0f} requests are worth {worth:,.0f} independent ones"
    return f"not estimable: {are}; needs about {needed:,} of the class"


def _blocks(sums: Resampled, worth: float | None) -> int:
    """Return the number of blocks that an interval of a share may rest on."""
    return sums.blocks if worth is None or worth >= MIN_WORTH else 0


def _material(value: float, sums: Resampled, least: float = MATERIAL_SHARE) -> bool:
    mean_ns = value * float(sums.horizon_ns[0] / sums.requests[0])
    return value >= least and mean_ns >= MATERIAL_NS


def _surely_largest(shares: Mapping[str, NDArray[np.float64]]) -> tuple[str, ...]:
    stages = list(shares)
    draws = np.array([shares[stage][1:] for stage in stages])
    often = np.bincount(np.argmax(draws, axis=0), minlength=len(stages)) / draws.shape[1]
    order = np.argsort(-often, kind="stable")
    needed = int(np.searchsorted(np.cumsum(often[order]), CONFIDENCE)) + 1
    return tuple(stages[place] for place in order[:needed])


def _reasons(stage: str, sums: Resampled, places: Places) -> dict[str, float] | None:
    """Shares of the reasons; time without one is unknown, unless no reason at all was recorded."""
    spent_ns: dict[str, float] = defaultdict(float)
    columns = places.of(stage)
    if all(places.reasons[place] is None for place in columns if sums.spent_ns[0, place]):
        return None
    for place in columns:
        spent_ns[places.reasons[place] or Reason.UNKNOWN.value] += float(sums.spent_ns[0, place])
    total_ns = math.fsum(spent_ns.values())
    in_order = sorted(spent_ns.items(), key=lambda item: -item[1])
    return {reason: ns / total_ns for reason, ns in in_order if ns}


def plain_answers(
    sums: Mapping[Horizon, Resampled], places: Places, worth: Mapping[Horizon, float | None]
) -> tuple[PlainAnswer, ...]:
    """Answer the plain questions.

    Args:
        sums: Sums over all requests of a class, by horizon.
        places: Columns of the sums.
        worth: How many independent requests they are worth, by horizon; None if that is not known.
    """
    return tuple(
        _plain_answer(question, sums[of[0]], places, worth[of[0]]) for question, of in _QUESTIONS.items()
    )


def _plain_answer(question: Question, sums: Resampled, places: Places, worth: float | None) -> PlainAnswer:
    horizon, stages, least = _QUESTIONS[question]
    names = tuple(stage.value for stage in stages)
    if not sums.horizon_ns[0]:
        reason = f"no {Outcome.OK} request reached {horizon}"
        return PlainAnswer(question, Answer.CANNOT_TELL, horizon, names, None, None, reason)
    found = share(sums.shares(places.of(*names)), _blocks(sums, worth))
    mean_ns = found.value * float(sums.horizon_ns[0] / sums.requests[0])
    undecided = _undecided(found, least, sums, worth)
    answer = Answer.CANNOT_TELL
    if undecided is None:
        above = found.low is not None and found.low >= least and mean_ns >= MATERIAL_NS
        answer = Answer.YES if above else Answer.NO
    return PlainAnswer(question, answer, horizon, names, found, mean_ns, undecided)


def _undecided(found: Share, least: float, sums: Resampled, worth: float | None) -> str | None:
    # What befalls one request in twenty may be missing among fewer.
    needed = requests_needed(P95)
    if sums.requests[0] >= needed and worth is not None and worth < MIN_WORTH:
        return _worth_too_little(float(sums.requests[0]), worth)
    if found.low is None or found.high is None or sums.requests[0] < needed:
        return f"not estimable: needs at least {needed:,} {Outcome.OK} requests"
    if found.low < least <= found.high:
        between = f"{100 * found.low:.1f} to {100 * found.high:.1f} %"
        return f"its share is {between}, with {100 * least:.0f} % in between"
    return None
