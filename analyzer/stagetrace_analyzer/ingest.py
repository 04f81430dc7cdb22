"""Spool -> dataset: every request partitioned, every table typed."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from stagetrace.clock import ClockPair
from stagetrace.gaps import NEVER, Gap
from stagetrace.partition import Interval, Partition, partition
from stagetrace.records import StopReason
from stagetrace.spool import SpoolData, is_spool, read_spool
from stagetrace.summary import ended_stage, shared_intervals
from stagetrace.timeline import RequestTimeline, Steps
from stagetrace_analyzer.classes import class_facts
from stagetrace_analyzer.dataset import (
    CHECKS,
    CLOCKS,
    INGEST,
    LOOP_LAG,
    MEDIA,
    OCCUPANCY,
    REQUESTS,
    STAGES,
    STEPS,
    write_tables,
)

__all__ = ["HASH_KEY_VARIABLE", "ingest_spool", "is_spool"]

HASH_KEY_VARIABLE: Final = "STAGETRACE_HASH_KEY"
"""Key of the media hashes in datasets; without it each dataset has a key of its own."""

_BATCH_REQUESTS: Final = 4096
_HASH_HEX: Final = 32
_LARGEST_PID: Final = 2**31 - 1
_TRACEPARENT_PARTS: Final = 4

Row = dict[str, Any]


def ingest_spool(spool: Path, dataset: Path, *, about: str | None = None, force: bool = False) -> None:
    """Write the dataset of a spool.

    Args:
        spool: Folder a server recorded into; it may still do so.
        dataset: Folder of the dataset.
        about: What belongs beside every figure of it, such as that its model is a toy.
        force: Overwrite an existing dataset.

    Raises:
        DataError: The spool holds no segment.
        UsageError: The dataset exists and ``force`` is not set.
    """
    data = read_spool(spool)
    rows = _Rows(data)
    write_tables(
        dataset,
        {
            "requests": _table(REQUESTS, rows.requests),
            "media": _table(MEDIA, rows.media),
            "stages": _table(STAGES, rows.stages),
            "steps": _table(STEPS, (row for steps in data.engines for row in _step_rows(steps, data))),
            "loop_lag": _table(LOOP_LAG, _lag_rows(data)),
            "clocks": _table(CLOCKS, _clock_rows(data)),
            "occupancy": _table(OCCUPANCY, rows.occupancy),
            "checks": _table(CHECKS, _check_rows(data)),
            "ingest": _table(INGEST, _ingest_rows(data, about)),
        },
        force=force,
    )


def _table(schema: pa.Schema, rows: Iterable[Row]) -> Iterable[pa.RecordBatch]:
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH_REQUESTS)):
        yield pa.RecordBatch.from_pylist(batch, schema=schema)


class _Rows:
    """The rows of the tables that come from requests."""

    def __init__(self, data: SpoolData) -> None:
        self._hash = _KeyedHash()
        self.requests: list[Row] = []
        self.media: list[Row] = []
        self.stages: list[Row] = []
        self.occupancy: list[Row] = []
        for number, request in enumerate(data.requests):
            parts = partition(request)
            named = {"request": number}
            self.requests.append(named | _request_row(request, parts, data.pair(request.instance)))
            self.media += [named | row for row in _media_rows(request, parts, self._hash)]
            self.stages += [named | row for row in _stage_rows(request, parts)]
            self.occupancy += [named | row for row in _occupancy_rows(request)]


class _KeyedHash:
    """Hashes of media items under a key: those of known images could be guessed otherwise."""

    def __init__(self) -> None:
        given = os.environ.get(HASH_KEY_VARIABLE)
        self._key = given.encode() if given else secrets.token_bytes(32)

    def __call__(self, identifier: str) -> str:
        return hmac.new(self._key, identifier.encode(), hashlib.sha256).hexdigest()[:_HASH_HEX]


def _request_row(request: RequestTimeline, parts: Partition, pair: ClockPair) -> Row:
    facts = request.facts
    classed = class_facts(request)
    trace_id, parent_span_id = _trace_context(facts.get("traceparent"))
    return {name: facts.get(name) for name in _FACT_COLUMNS} | {
        "request_id": request.request_id,
        "trace_id": trace_id,
        "parent_span_id": parent_span_id,
        "instance": request.instance,
        "received_unix_ns": pair.unix(request.received),
        "upload_ns": _since(request, request.body_complete),
        "ttft_ns": _since(request, request.first_useful),
        "completion_ns": _since(request, request.last_byte),
        "ended_ns": _since(request, request.ended),
        "outcome": request.outcome,
        "ended_stage": ended_stage(request, parts),
        "media_items": classed["media_items"],
        "media_bytes": classed["media_bytes"],
        "pixels": classed["pixels"],
        "joined": _joined(request),
    }


_FACT_COLUMNS: Final = (
    "external_id",
    "path",
    "model",
    "phase",
    "label",
    "arm",
    "intended_unix_ns",
    "error_code",
    "status",
    "finish_reason",
    "stream",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "max_tokens",
)


def _since(request: RequestTimeline, time: int | None) -> int | None:
    return None if time is None else time - request.received


def _trace_context(traceparent: object) -> tuple[str | None, str | None]:
    parts = traceparent.split("-") if isinstance(traceparent, str) else []
    if len(parts) < _TRACEPARENT_PARTS or (len(parts[1]), len(parts[2])) != (32, 16):
        return None, None
    return parts[1], parts[2]


def _joined(request: RequestTimeline) -> str:
    engines = [engine for engine in request.engine_requests if engine.held is not None]
    if not engines:
        return "api"
    for engine in engines:
        for number, _ in engine.members:
            place = None if engine.steps is None else engine.steps.place(number)
            if engine.steps is not None and place is not None and engine.steps.steps[place].begin is not None:
                return "api+engine+worker"
    return "api+engine"


def _media_rows(request: RequestTimeline, parts: Partition, keyed: _KeyedHash) -> Iterator[Row]:
    critical = None if parts.critical_item is None else request.items[parts.critical_item].ready
    for item in request.items.values():
        hashed = item.facts.get("hash")
        slack = None if critical is None or item.ready is None else critical - item.ready
        if item.inline:
            slack = 0
        yield item.facts | {
            "item": item.index,
            "hash": keyed(hashed) if isinstance(hashed, str) else None,
            "begin_ns": _since(request, item.begin),
            "ready_ns": _since(request, item.ready),
            "slack_ns": slack,
        }


def _stage_rows(request: RequestTimeline, parts: Partition) -> Iterator[Row]:
    shared = shared_intervals(parts)
    occurrences: dict[str, int] = {}
    yield from _intervals(request, parts.ttft[:shared], "both", occurrences)
    yield from _intervals(request, parts.ttft[shared:], "ttft", dict(occurrences))
    yield from _intervals(request, parts.completion[shared:], "completion", dict(occurrences))


def _intervals(
    request: RequestTimeline, intervals: Iterable[Interval], horizon: str, occurrences: dict[str, int]
) -> Iterator[Row]:
    for interval in intervals:
        stage = interval.stage
        occurrence = occurrences[stage] = occurrences.get(stage, 0) + 1
        yield {
            "horizon": horizon,
            "stage": stage,
            "kind": stage.kind,
            "reason": interval.reason,
            "holder": interval.holder,
            "occurrence": occurrence,
            "begin_ns": interval.begin - request.received,
            "duration_ns": interval.duration,
            "item": interval.item,
            "first_step": interval.first_step,
            "last_step": interval.last_step,
            "recompute": interval.recompute,
            "role": "api" if interval.first_step is None else "engine",
        }


def _occupancy_rows(request: RequestTimeline) -> Iterator[Row]:
    for engine in request.engine_requests:
        steps = engine.steps
        if steps is None:
            continue
        changes = sorted(engine.members)
        for first, last in engine.spans(steps):
            begin, stop = steps.steps[first].number, steps.steps[last].number
            # The step that it came in with may not be recorded.
            tokens_before = [tokens for step, tokens in changes if step <= begin][-1]
            within = [(begin, tokens_before), *(change for change in changes if begin < change[0] <= stop)]
            ends = [step - 1 for step, _ in within[1:]] + [stop]
            for (step, tokens), end in zip(within, ends, strict=True):
                yield {
                    "engine": steps.engine,
                    "first_step": step,
                    "last_step": end,
                    "tokens": tokens,
                }


def _check_rows(data: SpoolData) -> Iterator[Row]:
    for check in data.checks:
        yield {
            "name": check.name,
            "expected": float(check.expected),
            "found": float(check.found),
            "tolerance": check.tolerance,
            "holds": check.holds,
        }


def _step_rows(steps: Steps, data: SpoolData) -> Iterator[Row]:
    unix = data.pair(steps.engine).unix
    previous_end = 0
    for place, step in enumerate(steps.steps):
        end = steps.ends[place]
        begin = step.begin if step.begin is None else max(step.begin, previous_end)
        previous_end = previous_end if end is None else end
        encoder = steps.encoder_part(place)
        yield {
            "engine": steps.engine,
            "step": step.number,
            "scheduled_unix_ns": unix(step.scheduled),
            "begin_unix_ns": None if begin is None else unix(begin),
            "end_unix_ns": None if end is None else unix(end),
            "encoder_begin_unix_ns": None if encoder is None else unix(encoder[0]),
            "encoder_end_unix_ns": None if encoder is None else unix(encoder[1]),
            "encoder_device_ns": step.encoder_device_ns,
            "requests": step.requests,
            "tokens": step.tokens,
            "decodes": step.decodes,
            "encoder_items": step.encoder_items,
            "running": step.running,
            "waiting": step.waiting,
            "reason": step.reason,
            "holder": step.head,
        }


def _lag_rows(data: SpoolData) -> Iterator[Row]:
    for lag in data.lags:
        at = data.pair(lag.process).unix(lag.at)
        yield {"instance": lag.process, "at_unix_ns": at, "duration_ns": lag.duration}


def _clock_rows(data: SpoolData) -> Iterator[Row]:
    for process in data.processes.values():
        header = process.header
        named = {name: process.facts.get(name) for name in ("service", "model", "version")} | {
            "process": header.process,
            "role": "+".join(process.roles),
            "pid": header.pid if 0 <= header.pid <= _LARGEST_PID else None,
            "host": header.host,
            "clock": header.clock,
            "stagetrace_version": header.version,
            "records": process.records,
        }
        for pair in process.readings:
            yield named | {"at_unix_ns": pair.unix_ns, "monotonic_ns": pair.monotonic_ns}


def _ingest_rows(data: SpoolData, about: str | None) -> Iterator[Row]:
    if about is not None:
        yield {"name": "about", "reason": about, "count": 1}
    yield {"name": "records", "reason": "", "count": data.records}
    yield {"name": "requests", "reason": "", "count": len(data.requests)}
    yield {"name": "dropped", "reason": "", "count": data.dropped}
    yield {"name": "faults", "reason": "", "count": data.faults}
    for reason, number in sorted(data.set_aside.items()):
        yield {"name": "set_aside", "reason": reason, "count": number}
    yield from _switch_rows(data)
    hooks = sorted({hook for process in data.processes.values() for hook in process.hooks_off})
    for hook in hooks:
        yield {"name": "hook_off", "reason": hook, "count": 1}


_STOPPED: Final = {
    StopReason.LOST: "no room for records",
    StopReason.OFF: "switched off",
    StopReason.FAULTS: "stopped itself after too many internal faults",
    StopReason.COST: "stopped itself because it cost too much",
}


def _switch_rows(data: SpoolData) -> Iterator[Row]:
    """What was not recorded on purpose, or is no longer there, and what recording has cost."""
    segments, size = data.removed
    if segments:
        yield {"name": "removed", "reason": "segments", "count": segments}
        yield {"name": "removed", "reason": "bytes", "count": size}
    if data.not_sampled:
        yield {"name": "not_sampled", "reason": "", "count": data.not_sampled}
    for process in data.processes.values():
        header, cost = process.header, process.cost
        name = f"{header.role} {header.pid}"
        for gap in process.gaps:
            if gap.reason:
                words = f"{name} {_STOPPED[gap.reason]} {_period(gap, data.pair(header.process))}"
                yield {"name": "stopped", "reason": words, "count": 1}
        if cost.steps and cost.busy_ns:
            whose = f"{name} {header.process}"
            yield {"name": "cost_ns_per_step", "reason": whose, "count": cost.cost_ns // cost.steps}
            yield {"name": "cost_per_million", "reason": whose, "count": 10**6 * cost.cost_ns // cost.busy_ns}


def _period(gap: Gap, pair: ClockPair) -> str:
    begin = _utc(pair.unix(gap.begin))
    return f"since {begin}" if gap.end == NEVER else f"from {begin} to {_utc(pair.unix(gap.end))}"


def _utc(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
