"""Analyses that a test writes down: inputs of reports and figures, with everything a report can hold."""

from __future__ import annotations

import math

from stagetrace.stages import Horizon, Stage
from stagetrace_analyzer.results import (
    NOT_MATERIAL,
    Analysis,
    Answer,
    Check,
    ClassReport,
    Composition,
    Dominant,
    Ingest,
    Latency,
    Load,
    MediaFacts,
    OwnCost,
    PlainAnswer,
    Quantile,
    Quantiles,
    Question,
    Region,
    Remedy,
    Share,
    StageTime,
    WarmUp,
    Window,
)

MS = 1_000_000
BEGIN_UNIX_NS = 1_796_022_000 * 10**9
HOSTILE = '<a href="//evil">x</a> | `b` **c** %{y} $d$ &lt; "\x1b[31m\n# e'
"""A name that tries to be HTML, Markdown, a template of plotly, TeX, a colour code and a heading."""


def quantile(ms: float | None, low: float | None = None, high: float | None = None, **more) -> Quantile:
    """A quantile in ms."""
    values = (None if value is None else round(value * MS) for value in (ms, low, high))
    return Quantile(*values, **more)


def latency(median_ms: float, requests: int = 4000, failed: int = 0) -> Latency:
    """A latency spread around its median, whose failed requests are its largest values."""
    reached = requests - failed
    p = [k / 200 for k in range(1, 201) if k / 200 <= reached / requests]
    ms = [median_ms * math.exp(1.2 * (share - 0.5)) for share in p]
    lost = f"not reached ({100 * failed / requests:.1f} % never got there)"
    quantiles = Quantiles(
        requests,
        reached,
        quantile(median_ms, median_ms * 0.9, median_ms * 1.2, n_eff=requests / 3),
        quantile(median_ms * 1.7, median_ms * 1.6, None if failed else median_ms * 1.9, n_eff=requests / 8)
        if failed * 20 < requests
        else quantile(None, n_eff=requests / 8, reason=lost),
        quantile(
            None, reason=lost if failed else "not estimable: 4,000 requests are worth 200; needs about 8,000"
        ),
    )
    survivors = Quantiles(
        reached, reached, quantile(median_ms * 0.9), quantile(median_ms * 1.5), quantile(median_ms * 1.8)
    )
    return Latency(quantiles, survivors if failed else None, p, [round(value * MS) for value in ms])


SHARES = {
    Horizon.TTFT: {"receive": 0.02, "preprocess": 0.05, "handoff": 0.03, "prefill.wait": 0.45, "encode": 0.25}
    | {"prefill": 0.17, "respond": 0.03},
    Horizon.COMPLETION: {"receive": 0.005, "preprocess": 0.015, "handoff": 0.01, "prefill.wait": 0.12}
    | {
        "encode": 0.07,
        "prefill": 0.05,
        "decode.wait": 0.2,
        "decode": 0.5,
        "respond": 0.02,
        "unattributed": 0.01,
    },
}
"""Shares of the horizons that a class has unless it has others."""


def share(value: float) -> Share:
    """A share with an interval a tenth wide on both sides."""
    return Share(value, value * 0.9, min(1.0, value * 1.1))


def dominant_wait(horizon: Horizon, region: Region) -> Dominant:
    """One wait for all, nobody typically, and two that cannot be told apart in the tail."""
    stage = "prefill.wait" if horizon is Horizon.TTFT else "decode.wait"
    if region is Region.TYPICAL:
        return Dominant(reason=NOT_MATERIAL, seen=stage)
    if region is Region.TAIL:
        parts = {"prefill.wait": {"tokens": 0.7, "step": 0.3}, "encode.wait": {"encoder_budget": 1.0}}
        return Dominant(("prefill.wait", "encode.wait"), share(0.6), parts, seen="prefill.wait")
    reasons = {"step": 0.75, "encoder_budget": 0.2, "unheard_of": 0.05}
    return Dominant((stage,), share(0.45 if horizon is Horizon.TTFT else 0.2), {stage: reasons}, seen=stage)


def not_estimable(horizon: Horizon, region: Region) -> Dominant:
    """Nothing can be named, but something was seen."""
    needed = {Region.ALL: 200, Region.TYPICAL: 1000, Region.TAIL: 4000}[region]
    reason = f"not estimable: needs at least {needed:,} ok requests of the class"
    return Dominant(reason=reason, seen="prefill.wait" if horizon is Horizon.TTFT else "decode.wait")


def compositions(mean_ms: float, shares=SHARES, waits=dominant_wait) -> tuple[Composition, ...]:
    """Compositions of both horizons in all regions; the tail takes four times as long."""
    longer = {Region.ALL: 1.0, Region.TYPICAL: 0.8, Region.TAIL: 4.0}
    part = {Region.ALL: 1.0, Region.TYPICAL: 0.2, Region.TAIL: 0.05}
    return tuple(
        Composition(
            horizon,
            region,
            requests=3760 * part[region],
            blocks=30,
            mean_ns=mean_ms * MS * longer[region] * (1 if horizon is Horizon.TTFT else 4),
            shares={stage: share(value) for stage, value in shares[horizon].items()},
            dominant_wait=waits(horizon, region),
            dominant_stage=Dominant(("prefill.wait",), share(0.45), seen="prefill.wait")
            if horizon is Horizon.TTFT
            else Dominant(("decode",), share(0.5), seen="decode"),
        )
        for horizon in Horizon
        for region in Region
    )


def stage_times(mean_ms: float, shares=SHARES) -> tuple[StageTime, ...]:
    """Stages of both horizons."""
    return tuple(
        StageTime(
            horizon,
            stage,
            Stage(stage).kind,
            share(value),
            mean_ms * MS * value,
            quantile(mean_ms * value * 0.8),
            quantile(mean_ms * value * 2),
        )
        for horizon in Horizon
        for stage, value in shares[horizon].items()
    )


def plain_answers() -> tuple[PlainAnswer, ...]:
    """All three kinds of answers."""
    return (
        PlainAnswer(Question.DOWNLOAD, Answer.NO, Horizon.TTFT, ("retrieval",), Share(0.0, 0.0, 0.0), 0.0),
        PlainAnswer(
            Question.ENCODER_QUEUE, Answer.YES, Horizon.TTFT, ("encode.wait",), share(0.15), 9.0 * MS
        ),
        PlainAnswer(
            Question.TRANSFER_WAIT,
            Answer.CANNOT_TELL,
            Horizon.TTFT,
            ("embedding_transfer.wait", "kv_transfer.wait"),
            None,
            None,
            "no ok request reached ttft",
        ),
        PlainAnswer(
            Question.INPUT,
            Answer.CANNOT_TELL,
            Horizon.TTFT,
            ("media_decode.wait", "preprocess.wait"),
            share(0.05),
            3.0 * MS,
            "its share is 4.5 to 5.5 %, with 5 % in between",
        ),
        PlainAnswer(Question.OUTPUT, Answer.YES, Horizon.COMPLETION, ("decode",), share(0.7), 168.0 * MS),
    )


def windows(mean_ms: float, begin_s: int = 0) -> tuple[Window, ...]:
    """Twelve windows of 10 s; in one nothing arrives and in one too many fail."""
    return tuple(
        Window(
            begin_unix_ns=BEGIN_UNIX_NS + (begin_s + 10 * k) * 10**9,
            end_unix_ns=BEGIN_UNIX_NS + (begin_s + 10 * k + 10) * 10**9,
            arrived=0 if k == 4 else 20 + 3 * k,
            in_flight=0.2 * k,
            ttft_p50_ns=None if k in {4, 9} else round(mean_ms * (1 + k / 10) * MS),
            completion_p50_ns=None if k in {4, 9} else round(mean_ms * 4 * (1 + k / 10) * MS),
            stage_ns={}
            if k == 4
            else {
                stage: value * mean_ms * 4 * MS * (1 + k / 10)
                for stage, value in SHARES[Horizon.COMPLETION].items()
            },
        )
        for k in range(12)
    )


REMEDY = Remedy(
    key="smaller_steps",
    advice="Lower the token budget of a step, so that a step is shorter.",
    option="--max-num-batched-tokens",
    check="prefill.wait with the reason step falls; throughput may fall too.",
    source="https://docs.vllm.ai/en/stable/configuration/optimization/",
)


def report(
    name: str = "text/short", phase: str | None = "mixture", mean_ms: float = 60.0, **changes
) -> ClassReport:
    """A class with 4,000 requests of which 240 failed."""
    fields = {
        "traffic_class": name,
        "phase": phase,
        "post": False,
        "requests": 4000,
        "outcomes": {"ok": 3760, "error": 200, "cancelled": 40},
        "ttft": latency(mean_ms * 0.8, failed=40),
        "completion": latency(mean_ms * 3.5, failed=240),
        "waiting": latency(mean_ms * 0.3),
        "partitioned": {Horizon.TTFT: 3760, Horizon.COMPLETION: 3755},
        "stages": stage_times(mean_ms),
        "compositions": compositions(mean_ms),
        "answers": plain_answers(),
        "remedies": (REMEDY,),
        "windows": windows(mean_ms),
        "unattributed": {Horizon.TTFT: 0.0, Horizon.COMPLETION: 0.01},
        "media": MediaFacts(300, 24_800.0, None, {"hit": 100, "miss": 200}, {"unknown": 300}),
        "notes": ("neighbouring blocks of requests are alike (correlation 0.41)",),
    }
    return ClassReport(**fields | changes)


def poor(name: str = HOSTILE, phase: str | None = None) -> ClassReport:
    """A class of three requests with a hostile name, of which none ended well."""
    few = "not estimable: needs at least 6 requests"
    nothing = Latency(Quantiles(3, 0, *(quantile(None, reason=few) for _ in range(3))), None, [], [])
    empty = {horizon: {} for horizon in Horizon}
    none_yet = tuple(
        Composition(c.horizon, c.region, 0.0, 1, None, {}, Dominant(reason=few), Dominant(reason=few))
        for c in compositions(1.0, shares=empty)
    )
    return report(
        name,
        phase,
        post=True,
        requests=3,
        outcomes={"lost": 3},
        ttft=nothing,
        completion=nothing,
        waiting=nothing,
        partitioned=dict.fromkeys(Horizon, 0),
        stages=(),
        compositions=none_yet,
        answers=tuple(
            PlainAnswer(
                a.question, Answer.CANNOT_TELL, a.horizon, a.stages, None, None, "no ok request reached it"
            )
            for a in plain_answers()
        ),
        remedies=(),
        windows=(Window(BEGIN_UNIX_NS, BEGIN_UNIX_NS, 3, 0.0, None, None, {}),),
        unattributed=dict.fromkeys(Horizon),
        media=None,
        notes=(),
    )


INGEST = Ingest(
    about=("Simulated requests: nothing here was measured.",),
    records=31_689,
    requests=8003,
    set_aside={"torn record": 3},
    dropped=2,
    faults=1,
    not_sampled=3600,
    removed={"segments": 12, "bytes": 50_000_000},
    stopped=[f"api {n} switched off from 2026-01-01T00:00:00Z to 2026-01-01T00:01:00Z" for n in range(6)],
    own_cost=(OwnCost("engine 8 0a1b", 9250, 0.0021),),
    hooks_off={"vllm.engine:step": 1},
    checks=(Check("in = out", 8.0, 8.0, holds=True), Check("queue", 100.0, 90.0, holds=False)),
)


def analysis(*classes: ClassReport, **changes) -> Analysis:
    """An analysis in which everything that a report must say is so."""
    open_loop = True
    fields = {
        "by_phase": True,
        "selection": {"class": ("text/short", "image/long"), "since": ("30m",)},
        "requests": sum(found.requests for found in classes),
        "not_selected": 1200,
        "warm_ups": (
            WarmUp("warm-up", 40, 40, "sent to warm up", settled=True),
            WarmUp("mixture", 1000, 4000, "MSER-5", settled=False),
        ),
        "unclassified": 3,
        "unknown_facts": {"max_tokens": 12},
        "loads": (
            Load(
                "mixture",
                8000,
                open_loop,
                12.34,
                1.02,
                0.81,
                55.5,
                overloaded=True,
                pauses_s=600.0,
                intended_set_aside=7,
            ),
            Load(None, 3, open_loop, None, None, 1.0, 0.1, overloaded=False),
        ),
        "classes": classes,
        "joins": {"api+engine+worker": 8000, "api": 3},
        "partition_mismatches": {Horizon.TTFT: 0, Horizon.COMPLETION: 5},
        "unusable": {"intervals on an unknown horizon": 9},
        "ingest": INGEST,
    }
    return Analysis(**fields | changes)


def everything() -> Analysis:
    """Classes that are named and not, a set, survivors, and one whose name is hostile."""
    few = report(
        "image/long",
        mean_ms=400.0,
        post=True,
        outcomes={"ok": 4000},
        ttft=latency(320.0),
        completion=latency(1400.0),
        compositions=compositions(400.0, waits=not_estimable),
        stages=stage_times(400.0),
        remedies=(),
        notes=(),
        media=None,
    )
    return analysis(report(), few, poor())
