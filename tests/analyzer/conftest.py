"""Datasets made of rows that a test writes down."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from stagetrace.stages import Stage
from stagetrace_analyzer.dataset import CHECKS, INGEST, MEDIA, REQUESTS, STAGES, write_tables

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000


@dataclass
class Rows:
    """Rows of a dataset under construction."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    media: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    ingest: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def request(self, *stages: tuple[Any, ...], **facts: Any) -> int:
        """Add a request; its horizons are as long as its stages unless facts say otherwise.

        A stage is (horizon, stage, ms) or (horizon, stage, ms, reason).  Returns its number.
        """
        number = next(self._numbers)
        request_id = facts.pop("request_id", f"request-{number}")
        lengths = {
            horizon: sum(round(s[2] * MS) for s in stages if s[0] in {horizon, "both"})
            for horizon in ("ttft", "completion")
        }
        row = {
            "request": number,
            "request_id": request_id,
            "instance": "server",
            "received_unix_ns": 10**18 + number,
            "outcome": "ok",
            "joined": "api+engine+worker",
            "media_items": 0,
            "max_tokens": 16,
            "ttft_ns": lengths["ttft"] if stages else None,
            "completion_ns": lengths["completion"] if stages else None,
        }
        self.requests.append(row | facts)
        for occurrence, (horizon, stage, ms, *reason) in enumerate(stages):
            self.stages.append(
                {
                    "request": number,
                    "horizon": horizon,
                    "stage": stage,
                    "kind": Stage(stage).kind.value,
                    "reason": reason[0] if reason else None,
                    "occurrence": occurrence,
                    "begin_ns": 0,
                    "duration_ns": round(ms * MS),
                    "recompute": False,
                    "role": "engine",
                }
            )
        return number

    def write(self, folder: Path) -> Path:
        """Write the rows as a dataset; return its folder."""
        tables = {"requests": REQUESTS, "media": MEDIA, "stages": STAGES, "checks": CHECKS, "ingest": INGEST}
        rows = {name: pa.Table.from_pylist(getattr(self, name), schema) for name, schema in tables.items()}
        write_tables(folder, rows)
        return folder


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture(scope="session")
def new_rows() -> type[Rows]:
    """Make rows anew for each of many examples."""
    return Rows


@pytest.fixture
def two_classes() -> Rows:
    """400 requests that were given short texts and images in three phases, after 8 of warm-up.

    Image requests wait 40 of 100 ms before the first token, three quarters of
    it for a running step; text requests do not wait.
    """
    rows = Rows()
    for _ in range(8):
        rows.request(("both", "receive", 1000.0), phase="warm-up")
    phases = {"text": (0,), "image": (1,), "mixture": (0, 1)}
    for phase, modalities in phases.items():
        for _, modality in itertools.product(range(100), modalities):
            waits = [("both", "prefill.wait", 30.0, "step"), ("both", "prefill.wait", 10.0, "encoder_budget")]
            request = rows.request(
                ("both", "receive", 10.0),
                *(waits if modality else []),
                ("both", "prefill", 45.0),
                ("ttft", "respond", 5.0),
                ("completion", "decode", 95.0),
                ("completion", "respond", 5.0),
                phase=phase,
                media_items=modality,
            )
            if modality:
                rows.media.append(
                    {"request": request, "item": 0, "bytes": 1000, "width": 20, "height": 10}
                    | {"encoder_cache": "hit" if phase == "mixture" else "miss"}
                )
    rows.ingest += [
        {"name": "records", "reason": "", "count": 5000},
        {"name": "requests", "reason": "", "count": 408},
        {"name": "set_aside", "reason": "torn record", "count": 3},
        {"name": "dropped", "reason": "", "count": 2},
        {"name": "faults", "reason": "", "count": 1},
        {"name": "not_sampled", "reason": "", "count": 3600},
        {"name": "removed", "reason": "segments", "count": 12},
        {"name": "removed", "reason": "bytes", "count": 50_000_000},
        {
            "name": "stopped",
            "reason": "api 7 switched off from 2026-01-01T00:00:00Z to 2026-01-01T00:01:00Z",
            "count": 1,
        },
        {"name": "cost_ns_per_step", "reason": "engine 8 0a1b", "count": 9250},
        {"name": "cost_per_million", "reason": "engine 8 0a1b", "count": 2100},
        {"name": "hook_off", "reason": "vllm.engine:step", "count": 1},
    ]
    rows.checks += [
        {"name": "in = out", "expected": 8.0, "found": 8.0, "tolerance": 0.0, "holds": True},
        {"name": "queue", "expected": 100.0, "found": 90.0, "tolerance": 0.02, "holds": False},
    ]
    return rows
