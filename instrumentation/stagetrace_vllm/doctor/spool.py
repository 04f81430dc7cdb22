"""A spool folder: whether it can be written to, and what is in it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stagetrace.attributes import SPOOL_BYTES_VARIABLE
from stagetrace.errors import DataError, UsageError
from stagetrace.gaps import Gap
from stagetrace.recorder import OFF_FILE
from stagetrace.room import SPOOL_BYTES
from stagetrace.settings import parse_spool_bytes
from stagetrace.spool import Process, SpoolData, is_spool, read_spool
from stagetrace_vllm.doctor.remarks import Level, Remark

_GIB: Final = 1 << 30
_REMOTE: Final = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gpfs", "fuse.sshfs", "fuse.gcs", "fuse.s3")
_LOST_WITHOUT: Final = {
    "api": "what happens before and behind the engine",
    "engine": "every step, and why requests wait,",
    "worker": "the encoder's part of the steps",
}


def examine_folder(folder: Path) -> Iterator[Remark]:
    """Say whether a server that runs as the calling user can record into a folder."""
    place = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not place.is_dir():
        yield _spool(Level.PROBLEM, f"{place} is no folder", "name another one")
        return
    if not os.access(place, os.W_OK | os.X_OK):
        yield _spool(
            Level.PROBLEM, f"{place} may not be written to by this user", "as whom does the server run?"
        )
    elif place == folder:
        yield _spool(Level.OK, f"{folder} may be written to")
    else:
        yield _spool(Level.OK, f"{folder} will be made")
    yield from _room(place)
    yield from _file_system(place)
    if (folder / OFF_FILE).exists():
        yield _spool(Level.PROBLEM, f"recording is switched off by {folder / OFF_FILE}", "remove it")


def _spool(level: Level, text: str, hint: str | None = None) -> Remark:
    return Remark("spool", level, text, hint)


def _room(place: Path) -> Iterator[Remark]:
    numbers = os.statvfs(place)
    free, most = numbers.f_bavail * numbers.f_frsize, _most()
    text = f"{free / _GIB:.1f} GiB are free, at most {most / _GIB:.1f} GiB will be taken"
    if free < most:
        yield _spool(Level.NOTE, f"{text}; on a full disk the newest records are lost")
    else:
        yield _spool(Level.OK, text)


def _most() -> int:
    """Return what a spool may take by its setting; one that is wrong is told elsewhere."""
    try:
        return parse_spool_bytes(os.environ[SPOOL_BYTES_VARIABLE])
    except (KeyError, UsageError):
        return SPOOL_BYTES


def _file_system(place: Path) -> Iterator[Remark]:
    kind = _kind_of(place)
    if kind is not None and kind.startswith(_REMOTE):
        yield _spool(
            Level.PROBLEM,
            f"{place} is on {kind}: records are mapped memory, and a network can stall the server",
            "name a folder on a local disk",
        )


def _kind_of(place: Path) -> str | None:
    """Return the kind of the file system that a path is on, None where that is not told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    real = place.resolve()
    kinds = {}
    for line in lines:
        mounted, _, source = line.partition(" - ")
        point = Path(mounted.split()[4].replace("\\040", " "))
        kinds[point] = source.split()[0]
    return next((kinds[each] for each in (real, *real.parents) if each in kinds), None)


def examine_records(folder: Path) -> Iterator[Remark]:
    """Say which processes have recorded into a spool, what was lost, and whether its counts agree."""
    if not is_spool(folder):
        yield _recorded(Level.NOTE, "nothing has been recorded yet")
        return
    try:
        data = read_spool(folder)
    except DataError as error:
        yield _recorded(Level.PROBLEM, error.message, error.hint)
        return
    yield from _processes(data)
    yield from _requests(data)
    yield from _losses(data)
    yield from _costs(data)


def _recorded(level: Level, text: str, hint: str | None = None) -> Remark:
    return Remark("recorded", level, text, hint)


def _processes(data: SpoolData) -> Iterator[Remark]:
    roles = Counter(process.header.role for process in data.processes.values())
    counted = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    yield _recorded(Level.OK, f"{data.records:,} records; processes: {counted}")
    for role, loses in _LOST_WITHOUT.items():
        if not roles[role]:
            yield _recorded(Level.PROBLEM, f"no {role} process has recorded: {loses} is unknown")
    hooks_off = Counter(hook for process in data.processes.values() for hook in process.hooks_off)
    for hook, count in sorted(hooks_off.items()):
        yield _recorded(Level.PROBLEM, f"hook off in {count} processes: {hook}")
    for process in data.processes.values():
        for gap in process.gaps:
            yield _recorded(Level.PROBLEM, _describe_gap(process, gap))


def _describe_gap(process: Process, gap: Gap) -> str:
    who = f"{process.header.role} process {process.header.pid}"
    return f"{who}: records are missing, {gap.cut.replace('_', ' ')}"


def _requests(data: SpoolData) -> Iterator[Remark]:
    parts = [f"{len(data.requests):,} requests have ended, {len(data.open_requests):,} are open"]
    if data.not_sampled:
        parts.append(f"{data.not_sampled:,} were left out by sampling")
    yield _recorded(Level.OK if data.requests else Level.NOTE, ", ".join(parts))
    wrong = [check for check in data.checks if not check.holds]
    if not wrong:
        yield _recorded(Level.OK, f"{len(data.checks)} of {len(data.checks)} counts agree")
    for check in wrong:
        yield _recorded(Level.PROBLEM, f"{check.name}: {check.expected:,g} expected, {check.found:,g} found")


def _losses(data: SpoolData) -> Iterator[Remark]:
    if data.dropped:
        yield _recorded(Level.PROBLEM, f"{data.dropped:,} records were dropped", "is the disk full?")
    if data.faults:
        yield _recorded(
            Level.PROBLEM, f"{data.faults:,} internal faults of the recording, which is a bug of ours"
        )
    segments, size = data.removed
    if segments:
        yield _recorded(
            Level.NOTE, f"{segments:,} old segments ({size / _GIB:.2f} GiB) were removed to make room"
        )
    for reason, count in sorted(data.set_aside.items()):
        if count:
            yield _recorded(Level.NOTE, f"set aside: {count:,} x {reason.replace('_', ' ')}")


def _costs(data: SpoolData) -> Iterator[Remark]:
    for process in data.processes.values():
        cost = process.cost
        if cost.steps and cost.busy_ns:
            each, share = cost.cost_ns / cost.steps / 1e3, cost.cost_ns / cost.busy_ns
            yield _recorded(
                Level.OK,
                f"recording took {each:.1f} us a step in {process.header.role} process {process.header.pid}, "
                f"{share:.2%} of its time, by its own estimate",
            )
