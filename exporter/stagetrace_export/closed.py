"""Which requests of a growing spool are closed: all that will ever be recorded of them is there.

A request that was answered needs nothing that is recorded after its last byte,
but that the engine let go of it.  One that broke off also needs the end of the
step that ran when it did.  Idle processes write nothing, so neither is asked of
them: a process of this host has recorded all that it did until it was read.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagetrace.errors import DataError
from stagetrace.gaps import NEVER
from stagetrace.spool import SpoolData, join_segments
from stagetrace.stages import Outcome
from stagetrace.timeline import EngineRequest, RequestTimeline, Step
from stagetrace_export.window import SETTLE_NS, Place, Window

_log = logging.getLogger("stagetrace")

POSITION_FILE: Final = "export.position"
"""Name, in the spool folder, of the file that says what has been exported."""

GRACE_NS: Final = 10_000_000_000

_FORMAT: Final = 1


class Closed(NamedTuple):
    """Requests that are handed out.

    Attributes:
        data: The spool as far as it matters for them: their processes, clocks, engines.
            Its other counts and requests are those of what is held, not of the spool.
        requests: Requests that have ended, complete, not handed out before, by time of receipt.
        partial: How many of them are handed out after the grace time, though more may be recorded of them.
        more: The spool holds more that was not read yet: poll again at once.
    """

    data: SpoolData
    requests: list[RequestTimeline]
    partial: int
    more: bool = False


class ClosedRequests:
    """Hands out each request of a spool once, when it is closed.

    Args:
        spool: Folder a server records into; it may be empty still.
        position: File that says what was handed out and exported; with None a restart begins with the oldest.
        grace_ns: How long after its end a request is handed out though it is not closed, in nanoseconds.

    Attributes:
        counts: What became of requests so far, see :meth:`commit`.
        losses: What was never recorded, as last read: ``records`` that processes lost, their internal
            ``faults``, and requests ``not_sampled``.
    """

    def __init__(self, spool: Path, position: Path | None = None, grace_ns: int = GRACE_NS) -> None:
        self._position = position
        self._grace_ns = grace_ns
        self._window = Window(spool, {} if position is None else _read_position(position))
        self._last: Closed | None = None
        self._unknown: dict[str, int] = {}
        self._set_aside: list[str] = []
        self._lost: dict[str, tuple[int, int]] = {}
        self.counts: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()

    def poll(self, *, final: bool = False) -> Closed:
        """Read on, and return what has been closed since the last commit.

        Args:
            final: The processes have ended, or nobody waits for them: once ``more`` is false, all requests
                that have ended have been handed out.
        """
        window = self._window
        window.read(is_last=final)
        data = join_segments(window.segments(), Counter())
        self._note_losses(data)
        judge = _Judge(data, window)
        ended = [request for request in judge.ended() if window.is_unfinished(request.request_id)]
        whole = {request.request_id: judge.is_closed(request) for request in ended}
        at_last = not window.more and (final or not window.is_written)
        handed = [r for r in ended if at_last or whole[r.request_id] or judge.waited(r) > self._grace_ns]
        self._note_unknown(data, is_last=at_last)
        partial = sum(not whole[request.request_id] for request in handed)
        self._last = Closed(data, handed, partial, window.more)
        return self._last

    def _note_unknown(self, data: SpoolData, *, is_last: bool) -> None:
        """Find the requests of which something is gone, and has not come within the grace time."""
        known = {request.request_id for request in (*data.requests, *data.open_requests)}
        unknown = [request_id for request_id in self._window.unfinished() if request_id not in known]
        now = {request_id: self._read_until(request_id, data) for request_id in unknown}
        self._unknown = {request_id: self._unknown.get(request_id, at) for request_id, at in now.items()}
        since = self._unknown
        self._set_aside = [
            r for r, at in now.items() if is_last or at == NEVER or at - since[r] > self._grace_ns
        ]

    def _read_until(self, request_id: str, data: SpoolData) -> int:
        process = data.processes.get(request_id.rpartition("-")[0])
        return NEVER if process is None else self._window.horizon(process.header.clock)

    def _note_losses(self, data: SpoolData) -> None:
        """Add up what the processes counted in their headers; what one has counted stays when it is gone."""
        self._lost |= {name: (p.header.dropped, p.header.faults) for name, p in data.processes.items()}
        self.losses["records"] = sum(dropped for dropped, _ in self._lost.values())
        self.losses["faults"] = sum(faults for _, faults in self._lost.values())
        self.losses["not_sampled"] = self._window.not_sampled

    def commit(self) -> None:
        """Note that what the last poll gave has been exported.

        ``counts`` then has: ``exported``, of them ``partial``; ``set_aside``, of which something is gone;
        ``removed``, whose records were removed to make room before they were exported (at most: those
        that sampling left out are among them); ``given_up``, in flight for too long to be held; ``open``.

        Raises:
            OSError: The position cannot be stored.
        """
        last, self._last = self._last, None
        if last is None:
            return
        finished = [request.request_id for request in last.requests] + self._set_aside
        self._window.forget(finished, last.data.engines)
        self.counts["exported"] += len(last.requests)
        self.counts["partial"] += last.partial
        self.counts["set_aside"] += len(self._set_aside)
        self.counts["removed"] = self._window.removed
        self.counts["given_up"] = self._window.given_up
        self.counts["unreadable_segments"] = self._window.unreadable
        self.counts["open"] = sum(1 for _ in self._window.unfinished())
        if self._position is not None:
            _write_position(self._position, self._window.places())

    def is_written(self) -> bool:
        """Whether a process may go on to write that had written when the spool was read last."""
        return self._window.is_written

    def have_ended(self) -> bool:
        """Whether processes had written, and all had ended, when the spool was read last."""
        return not self.is_empty() and not self.is_written()

    def is_empty(self) -> bool:
        """Whether no process had written when the spool was read last."""
        return self._window.is_empty


class _Judge:
    """Knows up to when everything is recorded, and who writes no more."""

    def __init__(self, data: SpoolData, window: Window) -> None:
        self._data = data
        self._window = window
        self._ended = window.ended
        self._clocks_of_engines = {
            process.header.clock
            for name, process in data.processes.items()
            if process.header.role == "engine" and name not in self._ended
        }

    def ended(self) -> list[RequestTimeline]:
        """Return the requests that have ended, or whose process was dead before the spool was read."""
        ended = [r for r in self._data.requests if r.ended is not None]
        lost = [r for r in self._data.requests + self._data.open_requests if r.ended is None]
        lost = [request for request in lost if request.instance in self._ended]
        for request in lost:
            # The id of a process of another container says nothing; that its lock is free does.
            request.outcome = Outcome.LOST
        return sorted(ended + lost, key=attrgetter("received"))

    def waited(self, request: RequestTimeline) -> int:
        """Return for how many nanoseconds all has been recorded since a request ended."""
        return self._window.horizon(self._clock(request)) - _end(request)

    def _clock(self, request: RequestTimeline) -> str:
        return self._data.processes[request.instance].header.clock

    def is_closed(self, request: RequestTimeline) -> bool:
        """Whether nothing that will be recorded can change a request."""
        if not (self._window.is_written or self._window.more):
            return True
        if self.waited(request) < SETTLE_NS:
            return False
        return all(self._is_over(engine, request) for engine in request.engine_requests) and (
            request.last_byte is not None or request.instance in self._ended or _is_finished(request)
        )

    def _is_over(self, engine: EngineRequest, request: RequestTimeline) -> bool:
        steps = engine.steps
        if steps is None and self._clock(request) not in self._clocks_of_engines:
            return True
        if steps is not None and steps.engine in self._ended:
            return True
        if engine.freed is None or not _is_encoded(engine):
            return False
        if request.last_byte is not None:
            return True
        if steps is None:
            return False
        place = steps.ending_after(_end(request) - 1)
        return place < len(steps.steps) and (steps.ends[place] is not None or steps.is_open(place))


def _end(request: RequestTimeline) -> int:
    times = (request.received, request.body_complete, request.first_useful, request.last_byte, request.ended)
    return max(time for time in times if time is not None)


def _is_finished(request: RequestTimeline) -> bool:
    """Whether nothing is under way in the front end for a request that broke off."""
    jobs = (job.ended for job in request.jobs)
    items = (item.ready for item in request.items.values())
    parts = (part.end for part in request.parts)
    return not any(time is None for times in (jobs, items, parts) for time in times)


def _is_encoded(engine: EngineRequest) -> bool:
    """Whether the encoder's part of each step is known that encoded items of a request, or never will be."""
    steps = engine.steps
    if steps is None:
        return True
    places = [place for number in engine.encoded if (place := steps.place(number)) is not None]
    return all(_is_told(steps.steps[place]) or _is_passed(steps.steps[place + 1 :]) for place in places)


def _is_told(step: Step) -> bool:
    return step.encoder_end is not None or step.encoder_device_ns is not None or step.unseen


def _is_passed(later: Iterable[Step]) -> bool:
    """Whether two more steps have ended: a worker tells of its device's time with the next one, if ever."""
    return sum(step.done is not None for step in later) > 1


# --- the position ----------------------------------------------------------------------------------


def _read_position(path: Path) -> dict[str, Place]:
    """Read where to go on; what cannot be read is told in one line, and all begins with the oldest."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}", hint="another file can be named as the position"
        ) from error
    try:
        stored: dict[str, Any] = json.loads(content)
        if stored["format"] != _FORMAT:
            raise ValueError(stored["format"])  # noqa: TRY301 - told like all other damage
        return {name: _place(fields) for name, fields in stored["processes"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        _log.warning(
            "stagetrace: %s: the position cannot be read; exporting from the oldest request on", path
        )
        return {}


def _place(fields: Mapping[str, Any]) -> Place:
    segment, offset = map(int, fields["read"])
    return Place(
        int(fields["segment"]),
        (segment, offset),
        int(fields["latest"]),
        frozenset(map(int, fields["unfinished"])),
    )


def _write_position(path: Path, places: Mapping[str, Place]) -> None:
    processes = {
        name: {
            "segment": place.segment,
            "read": place.read,
            "latest": place.latest,
            "unfinished": sorted(place.unfinished),
        }
        for name, place in places.items()
    }
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    # Nobody's link is followed.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, "processes": processes}, file)
    new.replace(path)
