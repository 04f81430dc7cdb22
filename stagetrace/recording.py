"""What this process records with: its one recorder, and the request that the running code works for.

The recording API and the plug-ins of servers share it, so that a stage that a
user adds in a server's own code belongs to the request that the plug-in traces.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextvars import ContextVar, Token
from itertools import count
from pathlib import Path
from typing import Final

from stagetrace.attributes import SPOOL_BYTES_VARIABLE, SPOOL_VARIABLE
from stagetrace.recorder import Recorder
from stagetrace.room import SPOOL_BYTES, segment_bytes
from stagetrace.settings import parse_spool_bytes, setting

_log = logging.getLogger("stagetrace")


class _Process:
    """The state of recording in this process."""

    folder: Path | None = None
    recorder: Recorder | None = None


request_numbers: Final = count(1)
"""Numbers of the requests of this process."""


def process_recorder() -> Recorder | None:
    """Return the recorder of this process, None when it does not record."""
    return _Process.recorder


def open_recorder(spool: str | os.PathLike[str] | None = None) -> Recorder | None:
    """Return the recorder of this process, made from the environment on the first call.

    Args:
        spool: Folder to record into; None leaves it to ``STAGETRACE_SPOOL``.

    Returns:
        None when there is no folder: then nothing is recorded.
    """
    folder = spool or os.environ.get(SPOOL_VARIABLE)
    if _Process.recorder is not None:
        if spool is not None and Path(spool) != _Process.folder:
            _log.warning("stagetrace: this process records into %s already", _Process.folder)
    elif folder:
        spool_bytes = setting(SPOOL_BYTES_VARIABLE, parse_spool_bytes, SPOOL_BYTES)
        _Process.folder = Path(folder)
        _Process.recorder = Recorder(_Process.folder, segment_bytes(spool_bytes), spool_bytes)
    return _Process.recorder


def close_recorder() -> None:
    """Let go of the recorder; what it has written stays."""
    _Process.folder = _Process.recorder = None


class Traced:
    """A request as this process knows it.

    Args:
        recorder: Where it is recorded; None when sampling has left it out.
        number: Its number in this process.
        origin: Its id, when another call received it.

    Attributes:
        over: It has ended: nothing more belongs to it, but the work of tickets.
    """

    __slots__ = ("began_output", "number", "origin", "over", "parts", "record", "recorder")

    def __init__(self, recorder: Recorder | None, number: int, origin: str | None = None) -> None:
        self.recorder = recorder
        self.record: Callable[..., None] = _nowhere if recorder is None else recorder.record
        self.number = number
        self.origin = origin
        self.parts = count()
        self.began_output = False
        self.over = False

    @property
    def request_id(self) -> str:
        """The request's id in reports; empty when sampling has left it out."""
        if self.origin is not None or self.recorder is None:
            return self.origin or ""
        return f"{self.recorder.process}-{self.number}"


def _nowhere(*_fields: int) -> None:
    """Record nothing."""


LEFT_OUT: Final = Traced(None, 0)
"""Stands for every request that is not recorded."""

current: ContextVar[Traced | None] = ContextVar("stagetrace_current", default=None)
"""The request that the running task or thread works for."""


def leave(token: Token[Traced | None], traced: Traced | None) -> None:
    """Go back from a request to the one before, if it is the current one, and never to one that is over.

    Generators share the context of whoever reads them: another one may have entered meanwhile.
    """
    if current.get() is not traced:
        return
    try:
        current.reset(token)
    except (ValueError, RuntimeError):
        return  # a generator or a task that was closed elsewhere; its context goes with it
    before = current.get()
    if before is not None and before.over:
        current.set(None)


# What a fork copies of the parent's request is not the child's: it has another name, and records of its own.
os.register_at_fork(after_in_child=lambda: current.set(None))
