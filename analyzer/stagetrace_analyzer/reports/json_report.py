"""An analysis as JSON, as ``schemas/analyze.schema.json`` describes it.

Times are in milliseconds and shares between 0 and 1.  Wherever a value is null
because it cannot be given, a ``reason`` beside it says why.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from stagetrace_analyzer.results import (
    CONFIDENCE,
    Analysis,
    ClassReport,
    Composition,
    Dominant,
    Ingest,
    Latency,
    Load,
    MediaFacts,
    PlainAnswer,
    Quantile,
    Quantiles,
    Share,
    StageTime,
    Window,
)

SCHEMA_VERSION: Final = "1.0"
"""Within a major version keys are only added."""

NO_INTERVAL: Final = "too few blocks of requests for an interval"
"""Why a share has no interval."""

_NO_REQUEST: Final = "no request ended well"
_NO_GAP: Final = "needs two arrivals at different times"
_NOT_RECORDED: Final = "of no item is it known"
_NO_N_EFF: Final = "too few blocks of requests to tell how alike neighbours are"
_NS_PER_MS: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def render_json(analysis: Analysis) -> str:
    """Return the analysis as an indented JSON text that ends with a newline."""
    return json.dumps(to_dict(analysis), indent=2, allow_nan=False) + "\n"


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as plain dicts, lists, numbers and texts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "confidence": CONFIDENCE,
        "by_phase": analysis.by_phase,
        "selection": {option: list(values) for option, values in analysis.selection.items()},
        "requests": analysis.requests,
        "not_selected": analysis.not_selected,
        "warm_up": analysis.warm_up,
        "warm_ups": [dataclasses.asdict(warm_up) for warm_up in analysis.warm_ups],
        "unclassified": analysis.unclassified,
        "unknown_facts": dict(analysis.unknown_facts),
        "loads": [_load(load) for load in analysis.loads],
        "classes": [_class(report) for report in analysis.classes],
        "joins": dict(analysis.joins),
        "partition_mismatches": dict(analysis.partition_mismatches),
        "unusable": dict(analysis.unusable),
        "ingest": _ingest(analysis.ingest),
    }


def _class(report: ClassReport) -> dict[str, Any]:
    dominant = report.dominant_wait
    return {
        "class": report.traffic_class,
        "phase": report.phase,
        "post": report.post,
        "requests": report.requests,
        "outcomes": dict(report.outcomes),
        "ttft_ms": _latency(report.ttft),
        "completion_ms": _latency(report.completion),
        "waiting_ms": _latency(report.waiting),
        "dominant_wait": _named(dominant) if dominant.stages else None,
        "dominant_wait_reason": dominant.reason,
        "dominant_waits": [_dominant(c, c.dominant_wait) for c in report.compositions],
        "dominant_stages": [_dominant(c, c.dominant_stage) for c in report.compositions],
        "compositions": [_composition(c) for c in report.compositions],
        "answers": [_answer(found) for found in report.answers],
        "remedies": [dataclasses.asdict(remedy) for remedy in report.remedies],
        "unattributed_share": {
            **report.unattributed,
            "reason": _reasons(
                {h: _NO_REQUEST if s is None else None for h, s in report.unattributed.items()}
            ),
        },
        "partitioned": dict(report.partitioned),
        "stages": [_stage(time) for time in report.stages],
        "windows": [_window(window) for window in report.windows],
        "media": None if report.media is None else _media(report.media),
        "notes": list(report.notes),
    }


def _load(load: Load) -> dict[str, Any]:
    unknown = {name: getattr(load, name) is None for name in ("rate_per_s", "interarrival_cv")}
    reasons = {name: _NO_GAP if missing else None for name, missing in unknown.items()}
    return dataclasses.asdict(load) | {"reason": _reasons(reasons)}


def _media(media: MediaFacts) -> dict[str, Any]:
    unknown = {name: getattr(media, name) is None for name in ("mean_bytes", "mean_pixels")}
    reasons = {name: _NOT_RECORDED if missing else None for name, missing in unknown.items()}
    return dataclasses.asdict(media) | {"reason": _reasons(reasons)}


def _ingest(ingest: Ingest) -> dict[str, Any]:
    costs = [
        {"process": cost.process, "us_per_step": cost.ns_per_step / 1000, "share": cost.share}
        for cost in ingest.own_cost
    ]
    return dataclasses.asdict(ingest) | {
        "about": list(ingest.about),
        "stopped": list(ingest.stopped),
        "own_cost": costs,
        "checks": [dataclasses.asdict(check) for check in ingest.checks],
    }


# --- times -------------------------------------------------------------------------------------------


def _latency(latency: Latency) -> dict[str, Any]:
    return {
        **_quantiles(latency.quantiles),
        "survivors": None if latency.survivors is None else _quantiles(latency.survivors),
        "ecdf": {"p": list(latency.ecdf_p), "ms": [ns / _NS_PER_MS for ns in latency.ecdf_ns]},
    }


def _quantiles(quantiles: Quantiles) -> dict[str, Any]:
    by_name = {"p50": quantiles.p50, "p95": quantiles.p95, "p99": quantiles.p99}
    unknown = any(q.n_eff is None and q.value_ns is not None for q in by_name.values())
    alone = _NO_N_EFF if unknown else None
    return {
        **{name: _ms(quantile.value_ns) for name, quantile in by_name.items()},
        "interval": {name: _interval(quantile) for name, quantile in by_name.items()},
        "n_eff": {name: quantile.n_eff for name, quantile in by_name.items()},
        "reason": _reasons({name: quantile.reason for name, quantile in by_name.items()} | {"n_eff": alone}),
        "n": quantiles.requests,
        "not_reached": quantiles.requests - quantiles.reached,
    }


def _interval(quantile: Quantile) -> list[float | None] | None:
    """Bounds in ms; the upper one is None where it is at the failed requests."""
    if quantile.value_ns is None:
        return None
    # A time is never below 0: that bounds it where no request does.
    return [_ms(quantile.low_ns or 0), _ms(quantile.high_ns)]


def _stage(time: StageTime) -> dict[str, Any]:
    by_name = {"p50": time.p50, "p95": time.p95}
    return {
        "stage": time.stage,
        "kind": time.kind,
        "horizon": time.horizon,
        **_share(time.share),
        "mean_ms": time.mean_ns / _NS_PER_MS,
        "p50_ms": _ms(time.p50.value_ns),
        "p95_ms": _ms(time.p95.value_ns),
        "reason": _reasons(
            {name: quantile.reason for name, quantile in by_name.items()}
            | {"share_interval": _no_interval(time.share)}
        ),
    }


def _window(window: Window) -> dict[str, Any]:
    return {
        "begin": _instant(window.begin_unix_ns),
        "end": _instant(window.end_unix_ns),
        "arrived": window.arrived,
        "in_flight": window.in_flight,
        "ttft_p50_ms": _ms(window.ttft_p50_ns),
        "completion_p50_ms": _ms(window.completion_p50_ns),
        "stage_ms": {stage: ns / _NS_PER_MS for stage, ns in window.stage_ns.items()},
        "reason": _reasons(
            {
                "ttft_p50_ms": _no_middle(window, window.ttft_p50_ns),
                "completion_p50_ms": _no_middle(window, window.completion_p50_ns),
            }
        ),
    }


def _no_middle(window: Window, value_ns: int | None) -> str | None:
    if value_ns is not None:
        return None
    return "not reached: too many never got there" if window.arrived else "nothing arrived"


def _instant(unix_ns: int) -> str:
    """Return an instant in UTC to the microsecond, as text: JSON's numbers do not hold its nanoseconds."""
    at = _EPOCH + timedelta(microseconds=unix_ns // 1000)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ms(time_ns: float | None) -> float | None:
    return None if time_ns is None else time_ns / _NS_PER_MS


# --- what time consists of ---------------------------------------------------------------------------


def _composition(composition: Composition) -> dict[str, Any]:
    return {
        "horizon": composition.horizon,
        "region": composition.region,
        "requests": composition.requests,
        "blocks": composition.blocks,
        "mean_ms": _ms(composition.mean_ns),
        "shares": {
            stage: {**_share(share), "reason": _reasons({"share_interval": _no_interval(share)})}
            for stage, share in composition.shares.items()
        },
        "reason": _reasons({"mean_ms": _NO_REQUEST if composition.mean_ns is None else None}),
    }


def _dominant(composition: Composition, dominant: Dominant) -> dict[str, Any]:
    return {
        "horizon": composition.horizon,
        "region": composition.region,
        **_named(dominant),
        "seen": dominant.seen,
        "reason": dominant.reason,
    }


def _named(dominant: Dominant) -> dict[str, Any]:
    reasons = dominant.reasons or {}
    return {
        "stages": list(dominant.stages),
        **(_share(dominant.share) if dominant.share else {"share": None, "share_interval": None}),
        "reasons": {stage: dict(parts) for stage, parts in reasons.items()} or None,
    }


def _answer(found: PlainAnswer) -> dict[str, Any]:
    return {
        "question": found.question,
        "answer": found.answer,
        "horizon": found.horizon,
        "stages": list(found.stages),
        **(_share(found.share) if found.share else {"share": None, "share_interval": None}),
        "mean_ms": _ms(found.mean_ns),
        "reason": found.reason,
    }


def _share(share: Share) -> dict[str, Any]:
    known = share.low is not None and share.high is not None
    return {"share": share.value, "share_interval": [share.low, share.high] if known else None}


def _no_interval(share: Share) -> str | None:
    return NO_INTERVAL if share.low is None or share.high is None else None


def _reasons(reasons: Mapping[str, str | None]) -> dict[str, str] | None:
    return {name: reason for name, reason in reasons.items() if reason is not None} or None
