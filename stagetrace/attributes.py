"""Names that cross the border of the process: settings and baggage keys, in one place."""

from __future__ import annotations

from typing import Final

SPOOL_VARIABLE: Final = "STAGETRACE_SPOOL"
"""Environment variable that names the folder to record into; without it nothing is recorded."""

SPOOL_BYTES_VARIABLE: Final = "STAGETRACE_SPOOL_MAX_BYTES"
"""Size that this folder may reach before its oldest segments are removed: bytes, or as in 512M, 2G."""

SAMPLE_VARIABLE: Final = "STAGETRACE_SAMPLE"
"""Which requests are recorded: a share, ``parent``, or ``parent:`` and a share; all without it."""

EXPORT_VARIABLE: Final = "STAGETRACE_EXPORT"
"""``otlp``: the server starts an exporter of its spool; nothing is exported without it."""

CARRIER_KEY: Final = "stagetrace-request"
"""Key, also as a header, under which one process tells another which request it works for."""

BAGGAGE_PREFIX: Final = "stagetrace."
BAGGAGE_PHASE: Final = "stagetrace.phase"
"""Phase of an experiment, as the client names it."""
BAGGAGE_LABEL: Final = "stagetrace.label"
"""The client's own class of the request."""
BAGGAGE_ARM: Final = "stagetrace.arm"
"""Arm of an experiment."""
BAGGAGE_INTENDED_UNIX_NS: Final = "stagetrace.intended_unix_ns"
"""When the client meant to send the request, in nanoseconds since the epoch."""
