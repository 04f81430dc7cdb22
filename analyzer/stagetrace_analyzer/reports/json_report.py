"""An analysis as JSON, as ``schemas/analyze.schema.json`` describes it.

Times are in milliseconds and shares between 0 and 1.  Wherever a value is null
because it cannot be given, a ``reason`` beside it says why.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stagetrace_analyzer.analysis import (
        Analysis,
        ClassReport,
        DominantWait,
        OwnCost,
        Quantile,
        Quantiles,
        StageTime,
    )

SCHEMA_VERSION: Final = "1.0"
"""Within a major version keys are only added."""

_NS_PER_MS: Final = 1_000_000


def render_json(analysis: Analysis) -> str:
    """Return the analysis as an indented JSON text that ends with a newline."""
    return json.dumps(to_dict(analysis), indent=2, allow_nan=False) + "\n"


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """Return the analysis as plain dicts, lists, numbers and texts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "by_phase": analysis.by_phase,
        "requests": analysis.requests,
        "warm_up": analysis.warm_up,
        "unclassified": analysis.unclassified,
        "classes": [_class(report) for report in analysis.classes],
        "joins": dict(analysis.joins),
        "partition_mismatches": dict(analysis.partition_mismatches),
        "ingest": dataclasses.asdict(analysis.ingest)
        | {
            "own_cost": [_own_cost(cost) for cost in analysis.ingest.own_cost],
            "checks": [dataclasses.asdict(check) for check in analysis.ingest.checks],
        },
    }


def _class(report: ClassReport) -> dict[str, Any]:
    dominant = report.dominant_wait
    return {
        "class": report.traffic_class,
        "phase": report.phase,
        "requests": report.requests,
        "outcomes": dict(report.outcomes),
        "ttft_ms": _quantiles(report.ttft),
        "completion_ms": _quantiles(report.completion),
        "waiting_ms": _quantiles(report.waiting),
        "dominant_wait": None if dominant.stage is None else _wait(dominant),
        "dominant_wait_reason": dominant.reason,
        "dominant_waits": [
            {"horizon": wait.horizon, **_wait(wait), "reason": wait.reason} for wait in report.dominant_waits
        ],
        "unattributed_share": dict(report.unattributed),
        "partitioned": dict(report.partitioned),
        "stages": [_stage(time) for time in report.stages],
        "media": None if report.media is None else dataclasses.asdict(report.media),
    }


def _own_cost(cost: OwnCost) -> dict[str, Any]:
    return {"process": cost.process, "us_per_step": cost.ns_per_step / 1000, "share": cost.share}


def _quantiles(quantiles: Quantiles) -> dict[str, Any]:
    by_name = {"p50": quantiles.p50, "p95": quantiles.p95, "p99": quantiles.p99}
    return {
        **{name: _ms(quantile) for name, quantile in by_name.items()},
        "reason": _reasons(by_name),
        "n": quantiles.requests,
        "not_reached": quantiles.requests - quantiles.reached,
    }


def _stage(time: StageTime) -> dict[str, Any]:
    return {
        "stage": time.stage,
        "kind": time.kind,
        "horizon": time.horizon,
        "share": time.share,
        "mean_ms": time.mean_ns / _NS_PER_MS,
        "p50_ms": _ms(time.p50),
        "p95_ms": _ms(time.p95),
        "reason": _reasons({"p50": time.p50, "p95": time.p95}),
    }


def _wait(wait: DominantWait) -> dict[str, Any]:
    reasons = None if wait.reasons is None else dict(wait.reasons)
    return {"stage": wait.stage, "share": wait.share, "reasons": reasons}


def _ms(quantile: Quantile) -> float | None:
    return None if quantile.value_ns is None else quantile.value_ns / _NS_PER_MS


def _reasons(quantiles: Mapping[str, Quantile]) -> dict[str, str] | None:
    found = {name: quantile.reason for name, quantile in quantiles.items() if quantile.reason is not None}
    return found or None
