"""Stage tracing and wait analysis for multimodal LLM serving.

Servers record (:func:`start`, :func:`request`, :func:`stage`), readers join (:func:`read_spool`) and say
where each request's time went (:func:`partition`).
"""

from stagetrace._version import __version__
from stagetrace.api import (
    Facts,
    ItemFacts,
    Ticket,
    carrier,
    facts,
    finish,
    first_output,
    item,
    request,
    resume,
    stage,
    start,
    wait,
)
from stagetrace.errors import (
    DataError,
    MissingExtraError,
    ServerError,
    StagetraceError,
    UsageError,
)
from stagetrace.partition import Interval, Partition, partition
from stagetrace.recorder import Recorder
from stagetrace.spool import SpoolData, is_spool, read_spool
from stagetrace.stages import Horizon, Kind, Outcome, Reason, Stage
from stagetrace.timeline import RequestTimeline

__all__ = [
    "DataError",
    "Facts",
    "Horizon",
    "Interval",
    "ItemFacts",
    "Kind",
    "MissingExtraError",
    "Outcome",
    "Partition",
    "Reason",
    "Recorder",
    "RequestTimeline",
    "ServerError",
    "SpoolData",
    "Stage",
    "StagetraceError",
    "Ticket",
    "UsageError",
    "__version__",
    "carrier",
    "facts",
    "finish",
    "first_output",
    "is_spool",
    "item",
    "partition",
    "read_spool",
    "request",
    "resume",
    "stage",
    "start",
    "wait",
]
