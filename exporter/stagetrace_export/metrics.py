"""Metrics of stages: where requests of a class wait, as histograms and counters of OpenTelemetry.

One :class:`StageMetrics` feeds every reader it is given: OTLP
(:func:`otlp_readers`) and a Prometheus page (``stagetrace_export.prometheus``).
Each closed request is observed once.

Attribute values are bounded: classes come from the rules file, stages, kinds,
reasons, horizons and outcomes are enumerations, and of error types the first
`ERROR_TYPES_MAX` are told apart.  What a client can choose (label, phase,
model) is no attribute; class rules may look at it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from opentelemetry.environment_variables import OTEL_METRICS_EXPORTER
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_METRICS_PROTOCOL,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from stagetrace import __version__
from stagetrace.clock import ClockPair
from stagetrace.errors import UsageError
from stagetrace.partition import Interval, Partition
from stagetrace.stages import Horizon, Outcome, Reason, Stage
from stagetrace.summary import ended_stage
from stagetrace.timeline import RequestTimeline
from stagetrace_analyzer.classes import ClassRules, class_facts, load_rules
from stagetrace_export import conventions as names
from stagetrace_export.closed import ClosedRequests
from stagetrace_export.exporters import otlp_protocol, without_secrets
from stagetrace_export.spans import error_type

SCOPE: Final = "stagetrace"
"""Name of the instrumentation scope."""

STAGE_DURATION: Final = "stagetrace.stage.duration"
TTFT: Final = "stagetrace.request.ttft"
COMPLETION: Final = "stagetrace.request.completion"
REQUESTS: Final = "stagetrace.requests"
NOT_SAMPLED: Final = "stagetrace.requests.not_sampled"
DROPPED: Final = "stagetrace.records.dropped"
FAULTS: Final = "stagetrace.recorder.faults"
PARTIAL: Final = "stagetrace.requests.partial"
OPEN: Final = "stagetrace.requests.open"
SET_ASIDE: Final = "stagetrace.set_aside"
DATA_AGE: Final = "stagetrace.data.age"

ERROR_TYPES_MAX: Final = 32
"""Error types that are told apart; those that come later are counted as ``_OTHER``."""

SHUTDOWN_S: Final = 5.0
"""So long the last metrics may take."""

_STAGE_BOUNDS_S: Final = (
    *(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    *(0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0),
)
"""From a tenth of a millisecond to minutes; two bounds a decade, because most series are of stages."""

_LATENCY_BOUNDS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Closer together where quantiles are read."""

_EXPORTERS: Final[Mapping[str, Callable[[], MetricExporter]]] = {
    "grpc": GrpcExporter,
    "http/protobuf": HttpExporter,
}

_SET_ASIDE: Final = {
    "set_aside": "incomplete",
    "removed": "removed",
    "given_up": "given_up",
    "unreadable_segments": "unreadable_segment",
}
"""Reasons, by what the exporter counts them as: see ``ClosedRequests.commit``."""

_NS: Final = 1e9


class StageMetrics:
    """Counts requests, and the time they spent in each stage.

    Args:
        readers: Who gets the metrics; see `otlp_readers` and ``PrometheusPage.reader``.
        resource: What describes the server in OTLP, or None for the SDK's default.
        rules: Rules that give a request its class, or None for the default ones.
    """

    def __init__(
        self,
        readers: Sequence[MetricReader],
        *,
        resource: Resource | None = None,
        rules: ClassRules | None = None,
    ) -> None:
        self._rules = load_rules() if rules is None else rules
        self._provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(SCOPE, __version__)
        self._stage = _stage_histogram(meter)
        self._ttft = _latency_histogram(meter, TTFT, "Time from receipt to the first useful byte")
        self._completion = _latency_histogram(meter, COMPLETION, "Time from receipt to the last byte")
        self._requests = meter.create_counter(REQUESTS, "{request}", "Requests that have ended")
        self._sources: list[ClosedRequests] = []
        _watch(meter, self._sources)
        self._error_types: set[str] = set()
        self._newest_unix_ns: int | None = None
        meter.create_observable_gauge(
            DATA_AGE, [self._data_age], "s", "Time since the newest closed request ended"
        )

    def observe(self, request: RequestTimeline, parts: Partition, pair: ClockPair) -> None:
        """Count a closed request.

        Args:
            request: The request.
            parts: Its partition.
            pair: Clocks of the process that served it.
        """
        # Who was closed without an end was given up.
        outcome = request.outcome or Outcome.LOST
        name = self._rules.class_of(class_facts(request))
        whose = {"class": name, "outcome": outcome.value}
        self._requests.add(1, whose | self._failure(request, parts))
        if outcome is Outcome.OK:
            for horizon in Horizon:
                self._observe_stages(parts.of(horizon), {"class": name, "horizon": horizon.value})
        if request.first_useful is not None:
            self._ttft.record((request.first_useful - request.received) / _NS, whose)
        if request.last_byte is not None:
            self._completion.record((request.last_byte - request.received) / _NS, whose)
        if request.ended is not None:
            self._newest_unix_ns = max(self._newest_unix_ns or 0, pair.unix(request.ended))

    def _failure(self, request: RequestTimeline, parts: Partition) -> dict[str, str]:
        """Say where and why a request did not end well."""
        said = {}
        if (stage := ended_stage(request, parts)) is not None:
            said["ended_stage"] = stage.value
        if request.outcome is Outcome.ERROR:
            said[names.ERROR_TYPE] = self._error_type(error_type(request) or names.OTHER_ERROR)
        return said

    def _error_type(self, code: str) -> str:
        """Return an error's code, or that it is one too many."""
        if len(self._error_types) < ERROR_TYPES_MAX:
            self._error_types.add(code)
        return code if code in self._error_types else names.OTHER_ERROR

    def _observe_stages(self, intervals: Iterable[Interval], whose: dict[str, str]) -> None:
        spent: Counter[tuple[Stage, Reason | None]] = Counter()
        for interval in intervals:
            spent[interval.stage, interval.reason] += interval.duration
        for (stage, reason), duration in spent.items():
            why = {} if reason is None else {"reason": reason.value}
            self._stage.record(duration / _NS, whose | {"stage": stage.value, "kind": stage.kind.value} | why)

    def watch(self, source: ClosedRequests) -> None:
        """Tell, from now on, what a source of requests has lost and set aside, as it counts it itself."""
        self._sources.append(source)

    def _data_age(self, _options: CallbackOptions) -> Iterator[Observation]:
        if self._newest_unix_ns is not None:
            yield Observation((time.time_ns() - self._newest_unix_ns) / _NS)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Hand everything to the exporters and stop; what takes longer than the timeout is left."""
        # It raises when the time is over, and has said before why.
        with suppress(Exception):
            self._provider.shutdown(timeout_s * 1e3)


def _watch(meter: Meter, sources: Sequence[ClosedRequests]) -> None:
    """Create the metrics that are what the sources count, at the instant of each collection."""

    def losses(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(sum(source.losses[name] for source in sources))]

    def counts(names: Mapping[str, Mapping[str, str]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [
            Observation(sum(source.counts[name] for source in sources), attributes)
            for name, attributes in names.items()
        ]

    meter.create_observable_counter(
        DROPPED, [losses("records")], "{record}", "Records that the server's processes lost"
    )
    meter.create_observable_counter(
        FAULTS, [losses("faults")], "{fault}", "Faults within the recording itself"
    )
    meter.create_observable_counter(
        NOT_SAMPLED, [losses("not_sampled")], "{request}", "Requests that were left out by sampling"
    )
    meter.create_observable_counter(
        PARTIAL,
        [counts({"partial": {}})],
        "{request}",
        "Requests of which more may have been recorded after they were counted",
    )
    meter.create_observable_counter(
        SET_ASIDE,
        [counts({name: {"reason": reason} for name, reason in _SET_ASIDE.items()})],
        "{item}",
        "What was recorded and could not be used",
    )
    meter.create_observable_gauge(
        OPEN, [counts({"open": {}})], "{request}", "Requests that have not ended, as last read"
    )


def _stage_histogram(meter: Meter) -> Histogram:
    return meter.create_histogram(
        STAGE_DURATION,
        "s",
        "Time that a request spent in a stage, all its stays there together",
        explicit_bucket_boundaries_advisory=_STAGE_BOUNDS_S,
    )


def _latency_histogram(meter: Meter, name: str, description: str) -> Histogram:
    return meter.create_histogram(
        name, "s", description, explicit_bucket_boundaries_advisory=_LATENCY_BOUNDS_S
    )


def otlp_readers() -> list[MetricReader]:
    """Return the reader that sends metrics over OTLP, unless ``OTEL_METRICS_EXPORTER`` is ``none``.

    The reader and its exporter heed the standard variables: ``OTEL_EXPORTER_OTLP_*`` and
    ``OTEL_METRIC_EXPORT_*``.

    Returns:
        One reader, which has started its thread, or none.

    Raises:
        UsageError: A variable has a value that nothing can be made of.
    """
    wanted = os.environ.get(OTEL_METRICS_EXPORTER, "").strip() or "otlp"
    if wanted == "none":
        return []
    if wanted != "otlp":
        raise UsageError(
            f"{OTEL_METRICS_EXPORTER}={wanted}: unknown exporter",
            hint="otlp or none; --prometheus serves a page",
        )
    exporter = _EXPORTERS[otlp_protocol(OTEL_EXPORTER_OTLP_METRICS_PROTOCOL)]
    try:
        return [PeriodicExportingMetricReader(exporter())]
    except Exception as error:
        raise UsageError(
            f"OTLP metrics cannot be set up: {without_secrets(str(error))}",
            hint="look at the variables that begin with OTEL_EXPORTER_OTLP and OTEL_METRIC_EXPORT",
        ) from error
