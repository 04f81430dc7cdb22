"""A request's timeline and partition -> the spans of OpenTelemetry's SDK.

A request is a SERVER span with an INTERNAL child for every interval of its completion
horizon.  Ids are derived from the request's, so that the same spool always gives the
same spans, and a receiver that was sent them twice can tell.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from stagetrace import Horizon, Interval, Outcome, Partition, RequestTimeline, SpoolData, __version__
from stagetrace.clock import ClockPair
from stagetrace.spool import Process
from stagetrace.summary import ended_stage, shared_intervals
from stagetrace.timeline import Step, Steps
from stagetrace_analyzer.classes import ClassRules, class_facts
from stagetrace_export import conventions as names

SCOPE: Final = InstrumentationScope(names.DISTRO, __version__)

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSET: Final = Status(StatusCode.UNSET)
_ERROR: Final = Status(StatusCode.ERROR)
_CLIENTS_FAULT: Final = range(400, 500)
_S: Final = 1e9

Attributes = dict[str, names.Value]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the records of a spool come from.

    Attributes:
        resources: The resource of every process, by its name.
        services: What serves in each process, by its name.
        clocks: Both clocks at one instant, by the name of the process.
        rules: What gives a request its traffic class.
        steps: Whether the spans of stages link to those of steps.
    """

    resources: Mapping[str, Resource]
    services: Mapping[str, str]
    clocks: Mapping[str, ClockPair]
    rules: ClassRules
    steps: bool = False

    @classmethod
    def of(cls, data: SpoolData, rules: ClassRules, *, steps: bool = False) -> Origin:
        """Take the resources and the clocks of a spool's processes."""
        return cls(
            {name: process_resource(process) for name, process in data.processes.items()},
            {name: _service(process) for name, process in data.processes.items()},
            {name: data.pair(name) for name in data.processes},
            rules,
            steps,
        )


def process_resource(process: Process) -> Resource:
    """Return the resource of a process; what the ``OTEL_*`` variables say of it wins."""
    header = process.header
    attributes: Attributes = {
        names.SERVICE_NAME: _service(process),
        names.SERVICE_INSTANCE_ID: header.process,
        names.HOST_NAME: header.host,
        names.PROCESS_PID: header.pid,
        names.DISTRO_NAME: names.DISTRO,
        names.DISTRO_VERSION: header.version,
        names.ROLE: header.role,
    }
    if "version" in process.facts:
        attributes[names.SERVICE_VERSION] = process.facts["version"]
    return _resource(attributes)


def _service(process: Process) -> str:
    return process.facts.get("service", names.PROVIDER)


def service_resource(spool: Path) -> Resource:
    """Return the resource of the service as a whole, for what is told of all its processes together.

    Args:
        spool: Where it records: what tells it from another on the same host, and stays over a restart.
    """
    host = socket.gethostname()
    return _resource(
        {
            names.SERVICE_NAME: names.PROVIDER,
            names.SERVICE_INSTANCE_ID: f"{_derived(f'{host}/{spool.absolute()}', 16):032x}",
            names.HOST_NAME: host,
            names.DISTRO_NAME: names.DISTRO,
            names.DISTRO_VERSION: __version__,
        }
    )


def _resource(attributes: Attributes) -> Resource:
    return Resource.create(attributes).merge(OTELResourceDetector().detect())


def parent_of(request: RequestTimeline) -> SpanContext | None:
    """Return the span in which the client sent a request; None without a valid ``traceparent``."""
    text = request.facts.get("traceparent")
    found = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return parent if parent.is_valid else None


def request_spans(request: RequestTimeline, parts: Partition, origin: Origin) -> list[ReadableSpan]:
    """Make the spans of one request that has ended.

    Args:
        request: What is recorded of it.
        parts: Where its time went.
        origin: Where the records come from.

    Returns:
        The request's own span, then those of its stages in order of time: they begin and end
        with it and leave no gap.
    """
    name = request.request_id
    parent = parent_of(request)
    trace_id, flags = (
        (_derived(name, 16), _SAMPLED) if parent is None else (parent.trace_id, parent.trace_flags)
    )
    context = SpanContext(trace_id, _derived(name), is_remote=False, trace_flags=flags)
    unix = origin.clocks[request.instance].unix
    attributes = _request_attributes(request, parts, origin)
    root = ReadableSpan(
        name=" ".join(_known(attributes, names.OPERATION_NAME, names.REQUEST_MODEL)) or "request",
        context=context,
        parent=parent,
        kind=SpanKind.SERVER,
        resource=origin.resources[request.instance],
        instrumentation_scope=SCOPE,
        attributes=attributes,
        events=_events(request, parts, unix(0)),
        status=_status(request),
        start_time=unix(request.received),
        end_time=unix(_end(request)),
    )
    return [root, *_stage_spans(request, parts, context, origin)]


def _stage_spans(
    request: RequestTimeline, parts: Partition, parent: SpanContext, origin: Origin
) -> Iterator[ReadableSpan]:
    engines = {e.steps.engine: e.steps for e in request.engine_requests if e.steps is not None}
    begin_of_time = origin.clocks[request.instance].unix(0)
    shared = shared_intervals(parts)
    occurrences: Counter[str] = Counter()
    for place, interval in enumerate(parts.completion):
        stage = interval.stage.value
        occurrences[stage] += 1
        steps = None if interval.first_step is None else _steps_of(interval, engines)
        instance = request.instance if steps is None else steps.engine
        yield ReadableSpan(
            name=stage,
            context=SpanContext(
                parent.trace_id,
                _derived(f"{request.request_id}/{place}"),
                is_remote=False,
                trace_flags=parent.trace_flags,
            ),
            parent=parent,
            resource=origin.resources[instance],
            instrumentation_scope=SCOPE,
            attributes=_stage_attributes(interval, occurrences[stage], is_shared=place < shared),
            links=_links(interval, steps) if origin.steps and steps is not None else (),
            start_time=begin_of_time + interval.begin,
            end_time=begin_of_time + interval.end,
        )


def _stage_attributes(interval: Interval, occurrence: int, *, is_shared: bool) -> Attributes:
    stage, _, _, reason, holder, item, first_step, last_step, recompute = interval
    attributes: Attributes = {
        names.STAGE: stage.value,
        names.KIND: stage.kind.value,
        names.HORIZON: "both" if is_shared else "completion",
        names.OCCURRENCE: occurrence,
    }
    if reason is not None:
        attributes[names.REASON] = reason.value
    if holder is not None:
        attributes[names.HOLDER] = holder
    if item is not None:
        attributes[names.ITEM] = item
    if first_step is not None and last_step is not None:
        attributes[names.FIRST_STEP] = first_step
        attributes[names.LAST_STEP] = last_step
    if recompute:
        attributes[names.RECOMPUTE] = True
    return attributes


def _steps_of(interval: Interval, engines: Mapping[str, Steps]) -> Steps | None:
    """Return the engine that an interval is of; only requests of several engines leave a choice."""
    candidates = list(engines.values())
    for steps in candidates if len(candidates) > 1 else ():
        place = None if interval.first_step is None else steps.place(interval.first_step)
        if place is not None:
            end = steps.ends[place]
            if steps.begins[place] <= interval.begin and (end is None or interval.begin < end):
                return steps
    return candidates[0] if candidates else None


def _request_attributes(request: RequestTimeline, parts: Partition, origin: Origin) -> Attributes:
    facts, classed, stage = request.facts, class_facts(request), ended_stage(request, parts)
    found: dict[str, names.Value | None] = {
        names.PROVIDER_NAME: origin.services[request.instance],
        names.REQUEST_STREAM: facts.get("stream") or None,
        names.RESPONSE_FINISH_REASONS: _finish_reasons(request),
        names.IMAGE_INPUT_TOKENS: _image_tokens(request),
        names.ERROR_TYPE: error_type(request),
        names.REQUEST_ID: request.request_id,
        names.CLASS: origin.rules.class_of(classed),
        names.OUTCOME: None if request.outcome is None else request.outcome.value,
        names.ENDED_STAGE: None if stage is None else stage.value,
        names.MEDIA_ITEMS: classed["media_items"],
        names.MEDIA_BYTES: classed["media_bytes"],
        names.MEDIA_PIXELS: classed["pixels"],
    }
    path = facts.get("path")
    if path in names.OPERATIONS:
        found[names.HTTP_METHOD] = "POST"
        found[names.HTTP_ROUTE] = path
        found[names.OPERATION_NAME] = names.OPERATIONS[path]
    else:
        found[names.URL_PATH] = path
    if request.first_useful is not None:
        found[names.TTFT_DURATION] = (request.first_useful - request.received) / _S
        found[names.TTFT_WAITING] = parts.waiting(Horizon.TTFT) / _S
    if request.last_byte is not None:
        found[names.COMPLETION_DURATION] = (request.last_byte - request.received) / _S
        found[names.COMPLETION_WAITING] = parts.waiting(Horizon.COMPLETION) / _S
    found |= {name: facts.get(column) for name, column in _FACTS.items()}
    return {name: value for name, value in found.items() if value is not None}


_FACTS: Final = {
    names.REQUEST_MODEL: "model",
    names.REQUEST_MAX_TOKENS: "max_tokens",
    names.RESPONSE_ID: "external_id",
    names.INPUT_TOKENS: "prompt_tokens",
    names.CACHED_INPUT_TOKENS: "cached_tokens",
    names.OUTPUT_TOKENS: "output_tokens",
    names.HTTP_STATUS: "status",
    names.PHASE: "phase",
    names.LABEL: "label",
    names.ARM: "arm",
    names.INTENDED: "intended_unix_ns",
}
"""Attributes that are facts of the request as they are, by their column in the dataset."""


def _known(attributes: Attributes, *wanted: str) -> Iterator[str]:
    return (str(attributes[name]) for name in wanted if name in attributes)


def _finish_reasons(request: RequestTimeline) -> tuple[str, ...] | None:
    """Return a reason an answer; an answer made in several rounds ends with its last one."""
    reasons = {engine.index: engine.finish_reason for engine in request.engine_requests}
    ended = [reason or "error" for _, reason in sorted(reasons.items())]
    return tuple(names.FINISH_REASONS.get(reason, reason) for reason in ended) or None


def _image_tokens(request: RequestTimeline) -> int | None:
    tokens = [item.facts.get("tokens") for item in request.items.values()]
    known = [number for number in tokens if isinstance(number, int)]
    images = all(item.facts.get("modality") == "image" for item in request.items.values())
    return sum(known) if known and images and len(known) == len(tokens) else None


def error_type(request: RequestTimeline) -> str | None:
    """Return the ``error.type`` of a request that did not end well: a status from 400, or a name."""
    if request.outcome is Outcome.ERROR:
        return str(request.facts.get("error_code", names.OTHER_ERROR)).removeprefix("http_")
    return None if request.outcome in {Outcome.OK, None} else str(request.outcome)


def _status(request: RequestTimeline) -> Status:
    """Tell a server's error from a client's: as for HTTP servers, the latter leaves the status unset."""
    if request.outcome is Outcome.LOST:
        return _ERROR
    if request.outcome is not Outcome.ERROR or request.facts.get("status") in _CLIENTS_FAULT:
        return _UNSET
    return _ERROR


def _end(request: RequestTimeline) -> int:
    """Return the end of the completion horizon, or the last that is known of a request without one."""
    if request.last_byte is not None:
        return request.last_byte
    if request.ended is not None:
        return request.ended
    known = (request.received, request.body_complete, request.first_useful)
    return max(time for time in known if time is not None)


def _events(request: RequestTimeline, parts: Partition, begin_of_time: int) -> tuple[Event, ...]:
    if request.first_useful is None:
        return ()
    attributes = {names.STAGE: parts.ttft[-1].stage.value} if parts.ttft else None
    return (Event(names.FIRST_USEFUL_EVENT, attributes, begin_of_time + request.first_useful),)


# --- steps ---


def ended_steps(steps: Steps, *, after: int = 0, final: bool = False) -> range:
    """Return the places of the steps after a number that have ended, up to the first that has not.

    A step whose encoder's part a device must still tell of has not ended, unless two later ones have.

    Args:
        steps: The steps of an engine.
        after: Number of the last step that is not wanted any more.
        final: Nothing more will be recorded.
    """
    first = steps.place_from(after + 1)
    places = range(first, len(steps.steps))
    return range(first, next((p for p in places if not _has_ended(steps, p, final=final)), places.stop))


def _has_ended(steps: Steps, place: int, *, final: bool) -> bool:
    if steps.ends[place] is None:
        return False
    known = not steps.steps[place].encoder_items or steps.encoder_part(place) is not None
    return final or known or sum(end is not None for end in steps.ends[place + 1 : place + 3]) == _TOLD_BY


_TOLD_BY: Final = 2
"""A worker tells of its device's time with the next step, if ever."""


def step_spans(steps: Steps, places: range, clock: ClockPair, resource: Resource) -> Iterator[ReadableSpan]:
    """Make the spans of an engine's steps that have ended: a trace a step, the encoder's part a child in it.

    A step is the time in which it had the device: it begins when a worker took it up, but not
    before the step before it had ended.

    Args:
        steps: The steps of an engine.
        places: Which of them, see `ended_steps`.
        clock: Both clocks of the engine's process.
        resource: The engine's process.
    """
    for place in places:
        step, end = steps.steps[place], steps.ends[place]
        if end is None:
            continue
        before = steps.ends[place - 1] if place else None
        begin = max(step.scheduled if step.begin is None else step.begin, before or 0)
        context = _step_context(steps.engine, step.number)
        yield ReadableSpan(
            name=names.STEP_SPAN,
            context=context,
            resource=resource,
            instrumentation_scope=SCOPE,
            attributes=_step_attributes(step, clock),
            start_time=clock.unix(min(begin, end)),
            end_time=clock.unix(end),
        )
        part = steps.encoder_part(place)
        if part is not None:
            yield _encoder_span(steps.engine, step, context, part, (clock, resource))


def _encoder_span(
    engine: str,
    step: Step,
    parent: SpanContext,
    part: tuple[int, int],
    whose: tuple[ClockPair, Resource],
) -> ReadableSpan:
    clock, resource = whose
    span_id = _derived(f"{engine}/{step.number}/encoder")
    return ReadableSpan(
        name=names.ENCODER_SPAN,
        context=SpanContext(parent.trace_id, span_id, is_remote=False, trace_flags=_SAMPLED),
        parent=parent,
        resource=resource,
        instrumentation_scope=SCOPE,
        attributes={names.STEP_ENCODER_ITEMS: step.encoder_items},
        start_time=clock.unix(part[0]),
        end_time=clock.unix(part[1]),
    )


def _step_attributes(step: Step, clock: ClockPair) -> Attributes:
    attributes: Attributes = {
        names.STEP_NUMBER: step.number,
        names.STEP_TOKENS: step.tokens,
        names.STEP_REQUESTS: step.requests,
        names.STEP_DECODES: step.decodes,
        names.STEP_ENCODER_ITEMS: step.encoder_items,
        names.STEP_RUNNING: step.running,
        names.STEP_WAITING: step.waiting,
        names.STEP_SCHEDULED: clock.unix(step.scheduled),
    }
    if step.reason is not None:
        attributes[names.REASON] = step.reason.value
    return attributes


def _links(interval: Interval, steps: Steps) -> tuple[Link, ...]:
    """Link to the first and the last step that an interval covers; a long answer has thousands."""
    numbers = sorted({n for n in (interval.first_step, interval.last_step) if n is not None})
    return tuple(Link(_step_context(steps.engine, number)) for number in numbers)


def _step_context(engine: str, number: int) -> SpanContext:
    name = f"{engine}/{number}"
    return SpanContext(_derived(name, 16), _derived(name), is_remote=False, trace_flags=_SAMPLED)


def _derived(name: str, size: int = 8) -> int:
    """Return an id of a span, or with 16 bytes of a trace, that a name always has; 0 would be none."""
    return int.from_bytes(blake2b(name.encode(), digest_size=size).digest()) or 1
