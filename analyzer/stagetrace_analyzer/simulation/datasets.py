"""Simulated requests -> dataset: the same tables as those of a real server.

The stages of a request are laid one behind the other, and its horizons are
their sums, so everything adds up to the nanosecond.  A stage that took no time
has no row.  What a simulation has no notion of is null: an unknown fact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from stagetrace.stages import Horizon, Outcome, Reason, Stage
from stagetrace_analyzer.dataset import INGEST, MEDIA, REQUESTS, STAGES, write_tables
from stagetrace_analyzer.simulation.columns import chosen, known, numbered, rows_of, same

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from stagetrace_analyzer.simulation.columns import Column
    from stagetrace_analyzer.simulation.stations import Visit
    from stagetrace_analyzer.simulation.traffic import Traffic

BEGIN_UNIX_NS: Final = 1_767_225_600 * 10**9
"""When the first run of a dataset begins: 2026-01-01T00:00:00Z."""

BETWEEN_RUNS_NS: Final = 10**9
"""Between the end of a run and the begin of the next one in the same dataset."""

INSTANCE: Final = "simulated"
"""Name of the one server."""

BOTH: Final = "both"
"""Horizon of what comes before the first token."""

_HORIZONS: Final = (BOTH, Horizon.TTFT.value, Horizon.COMPLETION.value)
_FRONT_END: Final = frozenset(
    {
        Stage.RECEIVE,
        Stage.RETRIEVAL,
        Stage.MEDIA_DECODE_WAIT,
        Stage.MEDIA_DECODE,
        Stage.PREPROCESS_WAIT,
        Stage.PREPROCESS,
        Stage.HANDOFF,
        Stage.RESPOND,
    }
)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long each request is in a stage.

    Attributes:
        horizon: ``both`` before the first token, else ``ttft`` or ``completion``.
        stage: The stage; one horizon passes it at most once.
        duration_ns: By request, shape (requests,); 0 for one that is not in it.
        reason: Why they wait, None if nothing says so.
    """

    horizon: str
    stage: Stage
    duration_ns: NDArray[np.int64]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """How each request ended; arrays of shape (requests,).

    Attributes:
        outcome: An `Outcome` each.
        broke_off_ns: When one that failed or was cancelled ended, ns from its receipt,
            at most its whole length.  Of one that is ``ok`` or ``lost`` it says nothing.
    """

    outcome: NDArray[np.str_]
    broke_off_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Requests and the stages that they go through, in order of time within each horizon.

    Attributes:
        traffic: The requests.
        stages: Their stages.
        phase: Phase of an experiment, or None.
        ends: How they ended; None if all ended well.
        open_loop: Whether requests were sent at their time whatever became of others;
            only then there is a time at which they were meant to be sent.
    """

    traffic: Traffic
    stages: tuple[StageTimes, ...]
    phase: str | None = None
    ends: Ends | None = None
    open_loop: bool = True


def station_stages(visit: Visit, stage: Stage, reason: Reason | None = None) -> tuple[StageTimes, ...]:
    """Return a station before the first token as stages: the wait for ``stage``, and ``stage``."""
    wait = Stage(f"{stage.value}.wait")
    return (
        StageTimes(BOTH, wait, visit.wait_ns, reason),
        StageTimes(BOTH, stage, visit.service_ns),
    )


def answer_stages(decode_ns: NDArray[np.int64], respond_ns: int) -> tuple[StageTimes, ...]:
    """Return the answer as stages: ``respond`` to the first byte; ``decode`` and ``respond`` to the last."""
    respond = np.full(len(decode_ns), respond_ns, np.int64)
    return (
        StageTimes(Horizon.TTFT.value, Stage.RESPOND, respond),
        StageTimes(Horizon.COMPLETION.value, Stage.DECODE, decode_ns),
        StageTimes(Horizon.COMPLETION.value, Stage.RESPOND, respond),
    )


def write_runs(folder: Path, runs: Sequence[SimulatedRun], about: str, *, force: bool = False) -> None:
    """Write runs one behind the other as one dataset.

    Args:
        folder: Folder of the dataset.
        runs: The runs, in order of time.
        about: What was simulated, in one line; stands beside every figure.
        force: Overwrite an existing dataset.

    Raises:
        UsageError: The dataset exists and ``force`` is not set.
        DataError: The folder cannot be written.
        ValueError: A run passes a stage twice on one horizon, ends before its first byte, or a request
            breaks off outside of its time.
    """
    tables: dict[str, list[pa.RecordBatch]] = {"requests": [], "media": [], "stages": []}
    first, begin_unix_ns = 0, BEGIN_UNIX_NS
    for run in runs:
        laid = _Laid(run)
        tables["requests"].append(_request_rows(run, laid, first, begin_unix_ns))
        tables["media"].append(_media_rows(run.traffic, first))
        tables["stages"].append(_stage_rows(run, laid, first))
        first += len(run.traffic.arrival_ns)
        last_ns = run.traffic.arrival_ns + laid.completion_ns
        begin_unix_ns += int(last_ns.max(initial=0)) + BETWEEN_RUNS_NS
    tables["ingest"] = [ingest_rows([f"Simulated: {about}"], first)]
    write_tables(folder, tables, force=force)


def ingest_rows(about: Sequence[str], requests: int) -> pa.RecordBatch:
    """Return the rows of the table ``ingest``: remarks, and a number of requests without records."""
    rows = [
        *(("about", remark, 1) for remark in about),
        ("records", "", 0),
        ("requests", "", requests),
        ("dropped", "", 0),
        ("faults", "", 0),
    ]
    return pa.RecordBatch.from_pylist(
        [{"name": name, "reason": reason, "count": count} for name, reason, count in rows], schema=INGEST
    )


class _Laid:
    """The stages of a run laid one behind the other, and cut where requests broke off.

    Arrays of shape (requests, stages): ``begin_ns``, and ``duration_ns``, which is 0
    where there is no row.  Arrays of shape (requests,): ``ttft_ns`` and
    ``completion_ns`` without cuts, ``ended_ns``, and whether the first byte was sent (``useful``).
    """

    def __init__(self, run: SimulatedRun) -> None:
        self.outcome, broke_off_ns = _ends(run)
        horizon = np.array([times.horizon for times in run.stages])
        self.before = horizon == BOTH
        self.path = horizon != Horizon.TTFT.value
        _check_stages(run.stages)
        whole = np.column_stack([times.duration_ns for times in run.stages]).astype(np.int64)
        self.ttft_ns = whole[:, horizon != Horizon.COMPLETION.value].sum(axis=1)
        self.completion_ns = whole[:, self.path].sum(axis=1)
        if np.any(self.ttft_ns > self.completion_ns):
            raise ValueError("a last byte comes before the first one")
        self.begin_ns = np.empty_like(whole)
        for members in (self.path, horizon != Horizon.COMPLETION.value):
            self.begin_ns[:, members] = np.cumsum(whole[:, members], axis=1) - whole[:, members]
        self.ok = self.outcome == Outcome.OK.value
        self.lost = self.outcome == Outcome.LOST.value
        self.ended_ns = np.where(self.ok, self.completion_ns, np.where(self.lost, 0, broke_off_ns))
        if np.any((self.ended_ns < 0) | (self.ended_ns > self.completion_ns)):
            raise ValueError("a request breaks off outside of its time")
        self.useful = self.ttft_ns <= self.ended_ns
        cut = np.clip(self.ended_ns[:, None] - self.begin_ns, 0, whole)
        self.duration_ns = np.where(self.path, cut, np.where(self.useful[:, None], whole, 0))


def _ends(run: SimulatedRun) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    requests = len(run.traffic.arrival_ns)
    if run.ends is None:
        return np.full(requests, Outcome.OK.value), np.zeros(requests, np.int64)
    return run.ends.outcome, run.ends.broke_off_ns


def _check_stages(stages: Sequence[StageTimes]) -> None:
    for horizon in Horizon:
        passed = [times.stage for times in stages if times.horizon in {BOTH, horizon.value}]
        if len(passed) != len(set(passed)):
            raise ValueError(f"the {horizon.value} horizon passes a stage twice")
    if unknown := {times.horizon for times in stages} - set(_HORIZONS):
        raise ValueError(f"unknown horizons: {', '.join(sorted(unknown))}")


def _request_rows(run: SimulatedRun, laid: _Laid, first: int, begin_unix_ns: int) -> pa.RecordBatch:
    traffic = run.traffic
    count = len(traffic.arrival_ns)
    number = first + np.arange(count)
    sent = begin_unix_ns + traffic.arrival_ns
    images = _images(traffic)
    pixels = (
        images * np.array([one.image_size[0] * one.image_size[1] for one in traffic.classes])[traffic.number]
    )
    failed = laid.outcome == Outcome.ERROR.value
    max_tokens = np.array([one.max_tokens or 0 for one in traffic.classes])[traffic.number]
    columns: dict[str, Column] = {
        "request": number,
        "request_id": numbered(f"{INSTANCE}-", number),
        "instance": same(INSTANCE, count),
        "model": same(INSTANCE, count),
        "phase": same(run.phase, count),
        "label": chosen([one.label for one in traffic.classes], traffic.number),
        "received_unix_ns": sent,
        "ttft_ns": known(laid.ttft_ns, laid.useful),
        "completion_ns": known(laid.completion_ns, laid.ok),
        "ended_ns": known(laid.ended_ns, ~laid.lost),
        "outcome": pa.array(laid.outcome),
        "error_code": known(np.full(count, "http_500"), failed),
        "status": known(np.where(failed, 500, 200), failed | laid.useful),
        "ended_stage": _ended_stages(run, laid),
        "finish_reason": known(np.full(count, "length"), laid.ok),
        "stream": np.ones(count, np.bool_),
        "media_items": images,
        "pixels": known(pixels, images > 0),
        "max_tokens": known(max_tokens, max_tokens > 0),
        "joined": same("api+engine+worker", count),
    }
    facts = {
        "intended_unix_ns": sent if run.open_loop else None,
        "prompt_tokens": traffic.prompt_tokens,
        "output_tokens": traffic.output_tokens,
    }
    columns |= {name: values for name, values in facts.items() if values is not None}
    return rows_of(REQUESTS, count, columns)


def _media_rows(traffic: Traffic, first: int) -> pa.RecordBatch:
    images = _images(traffic)
    of = np.repeat(np.arange(len(images)), images)
    sizes = np.array([one.image_size for one in traffic.classes])[traffic.number[of]]
    columns: dict[str, Column] = {
        "request": first + of,
        "item": np.arange(len(of)) - np.repeat(np.cumsum(images) - images, images),
        "width": sizes[:, 0],
        "height": sizes[:, 1],
    }
    return rows_of(MEDIA, len(of), columns)


def _stage_rows(run: SimulatedRun, laid: _Laid, first: int) -> pa.RecordBatch:
    request, which = np.nonzero(laid.duration_ns)
    count = len(request)
    horizon = np.array([_HORIZONS.index(times.horizon) for times in run.stages])[which]
    # Without a first byte there is only one horizon, and nothing to share.
    horizon[~laid.useful[request]] = _HORIZONS.index(Horizon.COMPLETION.value)
    stages = [times.stage for times in run.stages]
    columns: dict[str, Column] = {
        "request": first + request,
        "horizon": chosen(_HORIZONS, horizon),
        "stage": chosen([stage.value for stage in stages], which),
        "kind": chosen([stage.kind.value for stage in stages], which),
        "reason": chosen([times.reason and times.reason.value for times in run.stages], which),
        "occurrence": np.ones(count, np.int64),
        "begin_ns": laid.begin_ns[request, which],
        "duration_ns": laid.duration_ns[request, which],
        "recompute": np.zeros(count, np.bool_),
        "role": chosen(["api" if stage in _FRONT_END else "engine" for stage in stages], which),
    }
    return rows_of(STAGES, count, columns)


def _ended_stages(run: SimulatedRun, laid: _Laid) -> pa.Array[Any]:
    """Last stage of those that broke off; unknown for all others, and for one that broke off at once."""
    was_in = (laid.duration_ns > 0) & laid.path
    last = len(run.stages) - 1 - np.argmax(was_in[:, ::-1], axis=1)
    broke_off = ~(laid.ok | laid.lost) & was_in.any(axis=1)
    return chosen([times.stage.value for times in run.stages], last, broke_off)


def _images(traffic: Traffic) -> NDArray[np.int64]:
    return np.array([one.images for one in traffic.classes], np.int64)[traffic.number]
