"""What an analysis finds: frozen values that reports, the dashboard and programs read.

Nothing here computes.  All times are int64 nanoseconds and all shares between 0
and 1, unless a name says otherwise.  Wherever a figure cannot be given it is
None, and a ``reason`` says why and what it would take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from stagetrace.stages import Horizon, Kind

CONFIDENCE: Final = 0.95
"""Confidence of every interval."""

NOT_MATERIAL: Final = "nobody waits materially: the time is work"
"""Why no wait is dominant although there are enough requests."""


class Region(StrEnum):
    """Which requests of a class, by how long their horizon was."""

    ALL = "all"
    TYPICAL = "typical"
    """Between the quantiles 0.4 and 0.6 of the horizon."""
    TAIL = "tail"
    """Above the quantile 0.95 of the horizon."""


class Answer(StrEnum):
    """An answer to a plain question."""

    YES = "yes"
    NO = "no"
    CANNOT_TELL = "cannot tell"


class Question(StrEnum):
    """The plain questions that are answered for every class."""

    DOWNLOAD = "download"
    """Is download slow?"""
    ENCODER_QUEUE = "encoder_queue"
    """Does encoding queue?"""
    TRANSFER_WAIT = "transfer_wait"
    """Does a transfer between servers wait?"""
    INPUT = "input"
    """Is input processing jammed?"""
    OUTPUT = "output"
    """Does output dominate?"""


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile in ns with its interval.

    Without a value, ``reason`` says why: too few requests to bound it, or not
    reached because too many never got there.  A value whose upper bound is at the failed
    requests has ``high_ns`` None, and a reason as well.  ``n_eff`` is the number
    of independent requests that these requests are worth at this quantile, None
    if that cannot be told.
    """

    value_ns: int | None
    low_ns: int | None = None
    high_ns: int | None = None
    n_eff: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles over all requests of a class, failed ones at plus infinity.

    ``requests`` is their number; ``reached`` is how many have a finite value.
    """

    requests: int
    reached: int
    p50: Quantile
    p95: Quantile
    p99: Quantile


@dataclass(frozen=True, slots=True)
class Latency:
    """One latency of a class.

    ``survivors`` are the quantiles over the requests that reached the end of it;
    None if all did.  ``ecdf_ns`` are the values at the probabilities
    ``ecdf_p``, over all requests; it stops where requests failed.
    """

    quantiles: Quantiles
    survivors: Quantiles | None
    ecdf_p: Sequence[float]
    ecdf_ns: Sequence[int]


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a horizon with its interval; ``low`` and ``high`` are None without enough blocks."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class StageTime:
    """Time in one stage on one horizon, over the requests that ended well.

    ``share`` is the sum of the time in the stage over the sum of the horizon;
    the shares of a horizon add up to 1.  A request that was never in the stage
    counts as 0 in ``mean_ns``, ``p50`` and ``p95``, which are exact up to half a
    percent (`stagetrace_analyzer.buckets`).
    """

    horizon: Horizon
    stage: str
    kind: Kind
    share: Share
    mean_ns: float
    p50: Quantile
    p95: Quantile


@dataclass(frozen=True, slots=True)
class Dominant:
    """The stage with the largest share, or the smallest set of stages that surely holds it.

    ``stages`` is empty if none is named, and ``reason`` says why; ``seen`` is
    the stage that was largest in these requests all the same, None if all took
    no time.  ``share`` is that of the set together.  ``reasons`` are by stage
    the shares of the scheduler's reasons within it, the largest first; a stage
    without any recorded reason is absent.
    """

    stages: tuple[str, ...] = ()
    share: Share | None = None
    reasons: Mapping[str, Mapping[str, float]] | None = None
    reason: str | None = None
    seen: str | None = None


@dataclass(frozen=True, slots=True)
class Composition:
    """What the horizon of a region's requests consists of.

    ``requests`` is how many they are; one at a quantile may belong to the region
    in part.  ``mean_ns`` is their mean horizon, None without any.  ``shares``
    are by stage, as requests meet them, and add up to 1.
    """

    horizon: Horizon
    region: Region
    requests: float
    blocks: int
    mean_ns: float | None
    shares: Mapping[str, Share]
    dominant_wait: Dominant
    dominant_stage: Dominant


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The answer to one of the plain questions, with its figure.

    ``share`` is the part of ``horizon`` that the question is about, None if no
    request ended well; ``mean_ns`` is its mean time a request.  ``reason`` says
    why nothing can be told.
    """

    question: Question
    answer: Answer
    horizon: Horizon
    stages: tuple[str, ...]
    share: Share | None
    mean_ns: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something cheaper than another topology that is worth trying first.

    ``option`` is the setting of vLLM, None if it is not one; ``check`` says how one
    sees that it worked; ``source`` is where the advice is from.
    """

    key: str
    advice: str
    option: str | None
    check: str
    source: str


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time: what arrived in it, and how long that took.

    ``in_flight`` is the mean number of requests of the class in the server.
    ``stage_ns`` is the mean time by stage on the completion horizon over the
    requests that arrived in it and ended well; ``ttft_p50_ns`` is over all that
    arrived, None if none or if it is not reached.
    """

    begin_unix_ns: int
    end_unix_ns: int
    arrived: int
    in_flight: float
    ttft_p50_ns: int | None
    completion_p50_ns: int | None
    stage_ns: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """Media items of a class: number, known mean sizes, items by each cache's answer."""

    items: int
    mean_bytes: float | None
    mean_pixels: float | None
    processor_cache: Mapping[str, int]
    encoder_cache: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClassReport:
    """One traffic class, in one phase or (``phase`` is None) in all of them.

    ``post`` marks a class that is decided by what was only known at the end.
    ``partitioned`` is, by horizon, the number of requests behind ``stages``:
    those that ended well and whose stages add up to the horizon exactly.
    ``unattributed`` is the share of each horizon that no record explains, None
    if there is no such request.  ``waiting`` leaves out requests whose stages do
    not add up.  ``compositions`` has one entry a horizon and
    region, ``answers`` one a question, ``remedies`` those for the dominant waits.
    """

    traffic_class: str
    phase: str | None
    post: bool
    requests: int
    outcomes: Mapping[str, int]
    ttft: Latency
    completion: Latency
    waiting: Latency
    partitioned: Mapping[Horizon, int]
    stages: tuple[StageTime, ...]
    compositions: tuple[Composition, ...]
    answers: tuple[PlainAnswer, ...]
    remedies: tuple[Remedy, ...]
    windows: tuple[Window, ...]
    unattributed: Mapping[Horizon, float | None]
    media: MediaFacts | None
    notes: tuple[str, ...]

    def composition(self, horizon: Horizon, region: Region) -> Composition:
        """Return what the horizon of the region's requests consists of."""
        return next(c for c in self.compositions if (c.horizon, c.region) == (horizon, region))

    @property
    def dominant_wait(self) -> Dominant:
        """The dominant wait of all requests before the first token."""
        return self.composition(Horizon.TTFT, Region.ALL).dominant_wait


@dataclass(frozen=True, slots=True)
class Load:
    """What was put on the server in a phase, all classes together.

    ``rate_per_s`` and ``interarrival_cv`` (standard deviation over mean of the
    times between arrivals) are of the intended times where clients told them
    (``open_loop``), else of the times of receipt.  ``achieved`` is the share of
    the requests that had ended by the last arrival of their phase; ``in_flight`` is
    the mean number of requests in the server until then.

    No figure is of the ``pauses_s`` seconds between phases that are looked at as one, or
    between datasets.  ``intended_set_aside`` intended times cannot be, and count as not
    told.
    """

    phase: str | None
    requests: int
    open_loop: bool
    rate_per_s: float | None
    interarrival_cv: float | None
    achieved: float
    in_flight: float
    overloaded: bool
    pauses_s: float = 0.0
    intended_set_aside: int = 0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Requests at the begin of a phase of one dataset that are left out.

    ``settled`` is False if the figures still drifted where the search had to stop, or until
    the end: ``trend`` is 1 if the rest became slower until then, -1 if it became faster, 0
    if neither is sure.
    """

    phase: str | None
    requests: int
    of: int
    rule: str
    settled: bool
    trend: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """A thing counted by two witnesses, over all datasets; ``holds`` if they agree in each."""

    name: str
    expected: float
    found: float
    holds: bool


@dataclass(frozen=True, slots=True)
class OwnCost:
    """What recording has cost a process, by its own estimate: of each step, and of the steps' time."""

    process: str
    ns_per_step: int
    share: float


@dataclass(frozen=True, slots=True)
class Ingest:
    """What the datasets were made from.

    ``about`` are remarks that belong beside every figure, such as that the run
    was simulated.  ``set_aside`` is by reason.  ``not_sampled`` requests were
    left out by sampling.  ``removed`` counts the ``segments`` and ``bytes`` that
    were removed to keep spools within their size.  ``stopped`` says which
    process did not record, why and when.  ``hooks_off`` counts, by hook point,
    the processes that did not know it and therefore recorded nothing there.
    ``checks`` are counts that must agree.
    """

    about: Sequence[str]
    records: int
    requests: int
    set_aside: Mapping[str, int]
    dropped: int
    faults: int
    not_sampled: int
    removed: Mapping[str, int]
    stopped: Sequence[str]
    own_cost: tuple[OwnCost, ...]
    hooks_off: Mapping[str, int]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The classes of one or more datasets, and how good the data are.

    ``requests`` are analysed.  ``selection`` repeats what was asked for, by
    option, and ``not_selected`` requests did not meet it.  ``warm_ups`` are left
    out as well.  ``unclassified`` of the analysed ones meet no rule;
    ``unknown_facts`` counts, by field that the rules ask for, the requests of
    which it is not known.  ``joins`` counts requests by the processes whose
    records were found.  ``partition_mismatches`` counts, by horizon, requests
    whose stages do not add up to it.  ``unusable`` counts, by what is wrong with them,
    rows of the datasets that no figure is of.
    """

    by_phase: bool
    selection: Mapping[str, Sequence[str]]
    requests: int
    not_selected: int
    warm_ups: tuple[WarmUp, ...]
    unclassified: int
    unknown_facts: Mapping[str, int]
    loads: tuple[Load, ...]
    classes: tuple[ClassReport, ...]
    joins: Mapping[str, int]
    partition_mismatches: Mapping[Horizon, int]
    ingest: Ingest
    unusable: Mapping[str, int] = field(default_factory=dict)

    @property
    def warm_up(self) -> int:
        """Number of requests that are left out as warm-up."""
        return sum(warm_up.requests for warm_up in self.warm_ups)
