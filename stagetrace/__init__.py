"""Stage tracing and wait analysis for multimodal LLM serving.

Servers record (:class:`Recorder`), readers join (:func:`read_spool`) and say
where each request's time went (:func:`partition`).
"""

from stagetrace._version import __version__
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
    "Horizon",
    "Interval",
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
    "UsageError",
    "__version__",
    "is_spool",
    "partition",
    "read_spool",
]
