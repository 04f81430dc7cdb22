"""The engine core: requests held, steps scheduled and done, and why the rest waits.

Everything is recorded by change: a request that has one token in every step
from its second to its last is not mentioned again in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stagetrace.clock import monotonic_ns
from stagetrace.inbound import digest
from stagetrace.meter import CostMeter
from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, ReasonCode, RecordKind
from stagetrace_vllm.reading import announce_version, attribute
from stagetrace_vllm.reasons import (
    NO_REASON,
    PREEMPTING,
    READS,
    UNKNOWN,
    are_prefills_deferred,
    head_of_queue,
    note_adapters,
    queue_reason,
    running_reason,
)

STEP_MARK: Final = "_stagetrace_step"
"""Attribute of the scheduler's output that carries the step to the worker."""

_KEY: Final = "_stagetrace_key"
_TRACE: Final = "_stagetrace_steps"

_HELD = int(RecordKind.HELD)
_ENGINE_ITEM = int(RecordKind.ENGINE_ITEM)
_ADDED = int(RecordKind.ADDED)
_STEP = int(RecordKind.STEP)
_HEAD = int(RecordKind.HEAD)
_MEMBER = int(RecordKind.MEMBER)
_STEP_ITEM = int(RecordKind.STEP_ITEM)
_BLOCKED = int(RecordKind.BLOCKED)
_PREEMPTED = int(RecordKind.PREEMPTED)
_STEP_DONE = int(RecordKind.STEP_DONE)
_FIRST_TOKEN = int(RecordKind.FIRST_TOKEN)
_FREED = int(RecordKind.FREED)
_PAUSE = int(RecordKind.PAUSE)
_FRAME = int(RecordKind.FRAME)
_ALIVE = int(RecordKind.ALIVE)
_NO_HEAD: Final = -1
_U32: Final = 0xFFFFFFFF
_ENCODER_BUDGET = int(ReasonCode.ENCODER_BUDGET)
_ENCODER_CACHE = int(ReasonCode.ENCODER_CACHE)
_TOKENS = int(ReasonCode.TOKENS)
_REFUSED: Final = frozenset({_ENCODER_BUDGET, _ENCODER_CACHE, _TOKENS})
_REMOTE_EMBEDDING = int(ReasonCode.REMOTE_EMBEDDING)
_REMOTE_KV = int(ReasonCode.REMOTE_KV)
_LOADING: Final = "WAITING_FOR_REMOTE_KVS"
_STATUS_REASONS: Final = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": int(ReasonCode.GRAMMAR),
    _LOADING: _REMOTE_KV,
}


StepMark = tuple[int, int, bool, int]
"""What a worker needs to know of the step it runs: number of the engine's process, number of
the step in it, whether media items are encoded in it, when its scheduling began.

A plain tuple, because it is pickled with the scheduler's output and a worker on another
host need not have this package.
"""


class _StepTrace:
    """What is remembered from step to step of one scheduler."""

    __slots__ = (
        "blocked",
        "can_allocate",
        "composition",
        "decodes",
        "deferred",
        "done",
        "epoch",
        "head",
        "last_tried",
        "loads",
        "members",
        "number",
        "polled",
        "preempting",
        "prefilling",
        "reasons",
        "was_blocked",
    )

    def __init__(self) -> None:
        self.number = 0
        self.done = 0
        # Of the recorder, when all that is recorded by change was last recorded.
        self.epoch = 0
        self.decodes = 0
        self.composition: tuple[int, int, int, int] | None = None
        self.members: Mapping[str, int] = {}
        self.prefilling: dict[str, int] = {}
        # Requests with a reason of their own: in the step that is being composed, in the one before.
        self.blocked: dict[str, int] = {}
        self.was_blocked: dict[str, int] = {}
        self.preempting = False
        # Whether the scheduler has all that reasons are read from.
        self.reasons = True
        # Whether prefills are put off, and who was tried last, in the step that is being composed.
        self.deferred = False
        self.last_tried: str | None = None
        self.head = NONE
        # Requests, running and waiting, in the poll that was recorded last; None after a step with tokens.
        self.polled: tuple[int, int] | None = None
        # Requests whose KV the connector would load from now on, if there are blocks to load it into.
        self.loads: list[Any] = []
        # What the encoder cache manager last said no to: the request and why.
        self.can_allocate: tuple[str, int] | None = None


def _trace_of(scheduler: Any) -> _StepTrace:
    try:
        return scheduler.__dict__[_TRACE]  # type: ignore[no-any-return]
    except KeyError:
        trace = scheduler.__dict__[_TRACE] = _StepTrace()
        return trace


# --- requests --------------------------------------------------------------------------------------


def wrap_scheduler_init(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Note the model; watch what the scheduler asks, where its class is chosen at run time.

    ``EngineCore.__init__`` would be too late: it is what loads the plug-in.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            recorder.role = "engine"
            name = self.vllm_config.model_config.served_model_name
            recorder.announce(RecordKind.PROCESS_FACT, Fact.MODEL, name if isinstance(name, str) else name[0])
            announce_version(recorder)
            _trace_of(self).reasons = _has_reasons(self, recorder)
            _watch_encoder_cache(self, recorder)
            _watch_connectors(self, recorder)
        except Exception:
            recorder.fault()

    return init


def _has_reasons(scheduler: Any, recorder: Recorder) -> bool:
    """Whether reasons can be read from a scheduler; listed as off where they cannot."""
    missing = [name for name in READS if not hasattr(scheduler, name)]
    if missing:
        recorder.announce(RecordKind.HOOK_OFF, 0, f"reasons of waits: no {', '.join(missing)}")
    return not missing


def _watch(owner: Any, name: str, note: Callable[..., None], recorder: Recorder) -> None:
    """Have every answer of an object's method noted, with what it was asked."""
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        try:
            note(answer, *args, **kwargs)
        except Exception:
            recorder.fault()
        return answer

    setattr(owner, name, watched)


def _watch_encoder_cache(scheduler: Any, recorder: Recorder) -> None:
    trace = _trace_of(scheduler)

    def note(allowed: bool, request: Any, item: int, budget: int, *_: Any) -> None:
        if not allowed:
            over = request.get_num_encoder_embeds(item) > budget
            trace.can_allocate = (request.request_id, _ENCODER_BUDGET if over else _ENCODER_CACHE)

    _watch(scheduler.encoder_cache_manager, "can_allocate", note, recorder)


def _watch_connectors(scheduler: Any, recorder: Recorder) -> None:
    trace = _trace_of(scheduler)

    def note_matched(answer: Any, request: Any, *_: Any) -> None:
        tokens, asynchronously = answer
        if tokens is None:  # it has still to find out
            trace.blocked[request.request_id] = _REMOTE_KV
        elif asynchronously:
            trace.loads.append(request)

    def note_available(available: bool, request: Any, *_: Any) -> None:
        if not available:
            trace.blocked[request.request_id] = _REMOTE_EMBEDDING

    if scheduler.connector is not None:
        _watch(scheduler.connector, "get_num_new_matched_tokens", note_matched, recorder)
    if scheduler.ec_connector is not None:
        _watch(scheduler.ec_connector, "ensure_cache_available", note_available, recorder)


def wrap_preprocess_add_request(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when the engine's input thread holds a request, and its media items."""

    def preprocess_add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            _note_held(result[0], recorder)
        except Exception:
            recorder.fault()
        return result

    return preprocess_add_request


def _note_held(request: Any, recorder: Recorder) -> None:
    held = monotonic_ns()
    if held >= recorder.look_at:
        recorder.look(held)
    key = recorder.define(request.request_id)
    setattr(request, _KEY, key)
    features = request.mm_features or ()
    recorder.record_at(held, _HELD, key, request.num_prompt_tokens, request.max_tokens, len(features))
    for index, feature in enumerate(features):
        place = feature.mm_position
        identifier = recorder.define(digest(feature.identifier))
        last = place.offset + place.length - 1
        recorder.record(_ENGINE_ITEM, key, index, identifier, place.get_num_embeds(), last)


def wrap_scheduler_add_request(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when the scheduler holds a request: from here on it has tried it."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        key = attribute(request, _KEY)
        if key is not None:
            recorder.record(_ADDED, key)
            try:
                _trace_of(self).prefilling[request.request_id] = key
            except Exception:
                recorder.fault()
        return original(self, request, *args, **kwargs)

    return add_request


def wrap_preempt_request(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record that a request lost its seat in the step that is being composed."""

    def preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        key = attribute(request, _KEY)
        if key is not None:
            try:
                trace = _trace_of(self)
                trace.preempting = True
                computed = min(request.num_computed_tokens, request.num_tokens)
                recorder.record(_PREEMPTED, key, trace.number + 1, computed)
            except Exception:
                recorder.fault()
        return original(self, request, *args, **kwargs)

    return preempt_request


def wrap_free_request(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record that the scheduler lets go of a request, and how it ended."""

    def free_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        key = attribute(request, _KEY)
        if key is not None:
            try:
                status = recorder.intern(request.status.name.removeprefix("FINISHED_").lower())
                _note_first_token(_trace_of(self), request, recorder)
                recorder.record(_FREED, key, status, request.num_output_tokens)
            except Exception:
                recorder.fault()
        return original(self, request, *args, **kwargs)

    return free_request


def wrap_set_pause_state(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when the engine is paused and when it goes on: nothing may be scheduled in between."""

    def set_pause_state(self: Any, pause_state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            recorder.record(_PAUSE, 0, pause_state.name != "UNPAUSED")
        except Exception:
            recorder.fault()
        return original(self, pause_state, *args, **kwargs)

    return set_pause_state


# --- steps -----------------------------------------------------------------------------------------


def wrap_try_schedule_encoder_inputs(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Notice when the encoder refuses a request: tokens were asked for and none is left."""

    def try_schedule_encoder_inputs(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(self, request, num_computed_tokens, num_new_tokens, *args, **kwargs)
        try:
            if not result[1] and num_new_tokens:
                _note_refusal(self, request.request_id)
        except Exception:
            recorder.fault()
        return result

    return try_schedule_encoder_inputs


def _note_refusal(scheduler: Any, identifier: str) -> None:
    trace = _trace_of(scheduler)
    said_no, trace.can_allocate = trace.can_allocate, None
    if said_no is not None and said_no[0] == identifier:
        trace.blocked[identifier] = said_no[1]
    elif scheduler.scheduler_config.disable_chunked_mm_input:
        # The encoder was not asked: what is left of the tokens is less than the item.
        trace.blocked[identifier] = _TOKENS


def wrap_handle_blocked_waiting_request(
    original: Callable[..., Any], recorder: Recorder
) -> Callable[..., Any]:
    """Notice that the scheduler looked at a request, found it not ready, and passed it over.

    Its status alone would not do: it stays as it was while nobody looks, as when all seats are taken.
    """

    def handle_blocked_waiting_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        ready = original(self, request, *args, **kwargs)
        try:
            trace = _trace_of(self)
            trace.last_tried = request.request_id
            if not ready:
                trace.blocked[request.request_id] = _STATUS_REASONS.get(request.status.name, UNKNOWN)
        except Exception:
            recorder.fault()
        return ready

    return handle_blocked_waiting_request


def wrap_schedule(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record a step: its composition, the queue, and why the queue was left."""
    meter = CostMeter(recorder)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = monotonic_ns()
        try:
            trace = _trace_of(self)
            # Set outside of a step by a reset of the prefix cache, it would be said of this one.
            trace.preempting = False
            trace.last_tried = None
            trace.deferred = trace.reasons and are_prefills_deferred(self, bool(args and args[0]))
            if begin >= recorder.look_at:
                recorder.look(begin)
        except Exception:
            recorder.fault()
        output = original(self, *args, **kwargs)
        composed = monotonic_ns()
        try:
            if recorder.stopped:
                _skip_step(trace)
                return output
            _note_step(self, output, begin, recorder)
            meter.step(begin, monotonic_ns() - composed, trace.number)
        except Exception:
            recorder.fault()
        return output

    return schedule


def _skip_step(trace: _StepTrace) -> None:
    """Leave a step unmarked and unrecorded; what hooks found out for it must not pile up."""
    trace.blocked.clear()
    trace.loads.clear()
    if trace.composition is not None:
        # One number stands for all steps that were skipped, so that the next one is seen to follow none.
        trace.composition = None
        trace.number += 1


def _begin_frame(scheduler: Any, trace: _StepTrace, begin: int, recorder: Recorder) -> None:
    """Have all recorded anew that is recorded by change: a reader may know nothing of what was before."""
    trace.epoch = recorder.epoch
    trace.composition, trace.head, trace.members, trace.was_blocked = None, _NO_HEAD, {}, {}
    recorder.record_at(begin, _FRAME, trace.number)
    recorder.record_at(begin, _PAUSE, 0, scheduler.pause_state.name != "UNPAUSED")
    for request in scheduler.requests.values():
        key = attribute(request, _KEY)
        if key is not None and not request.is_finished():
            recorder.record_at(begin, _ALIVE, key, request.status.name == "RUNNING")


def _note_step(scheduler: Any, output: Any, begin: int, recorder: Recorder) -> None:
    trace = _trace_of(scheduler)
    blocked = _take_blocked(trace)
    preempting, trace.preempting = trace.preempting, False
    tokens = output.total_num_scheduled_tokens
    counts = running, waiting = scheduler.get_request_counts()
    if not tokens and _is_without_news(trace, counts, blocked):
        return
    trace.polled = None if tokens else counts
    number = trace.number = trace.number + 1
    encodes = bool(output.scheduled_encoder_inputs)
    setattr(output, STEP_MARK, (recorder.number, number, encodes, begin))
    if trace.epoch != recorder.epoch:
        _begin_frame(scheduler, trace, begin, recorder)
    head, reason, left_out = None, UNKNOWN, UNKNOWN
    try:
        if trace.reasons:
            head, reason, left_out = _find_reasons(scheduler, output, blocked, preempting)
    except Exception:
        # A step without its reason is better than no step.
        recorder.fault()
    changed = output.num_scheduled_tokens != trace.members
    if changed:
        trace.decodes = list(output.num_scheduled_tokens.values()).count(1)
    requests = len(output.num_scheduled_tokens) | reason << 16 | left_out << 24
    composition = (tokens, requests, running | trace.decodes << 16, waiting)
    if composition != trace.composition or not tokens:
        trace.composition = composition
        recorder.record_at(begin, _STEP, number, *composition)
    _note_head(trace, head, number, recorder)
    if changed:
        _note_members(scheduler, output, trace, recorder)
    _note_blocked(scheduler, trace, blocked, recorder)
    for identifier, items in output.scheduled_encoder_inputs.items():
        for item in items:
            recorder.record(_STEP_ITEM, number, _key_of(scheduler, identifier), item)


def _take_blocked(trace: _StepTrace) -> dict[str, int]:
    """Return the requests that were passed over for reasons of their own since the step before."""
    blocked, trace.blocked = trace.blocked, {}
    loads, trace.loads = trace.loads, []
    for request in loads:
        if request.status.name == _LOADING:
            blocked[request.request_id] = _REMOTE_KV
    return blocked


def _is_without_news(trace: _StepTrace, counts: tuple[int, int], blocked: dict[str, int]) -> bool:
    """Whether a poll found no more than the one before it: they come a thousand times a second."""
    return not any(counts) or (counts == trace.polled and blocked == trace.was_blocked)


def _find_reasons(
    scheduler: Any, output: Any, blocked: dict[str, int], preempting: bool
) -> tuple[Any, int, int]:
    """Say at which waiting request the queue was left, if at any, why, and why running ones were left out."""
    trace = _trace_of(scheduler)
    head = head_of_queue(scheduler, _passed_over(trace, blocked))
    if head is None:
        reason = NO_REASON
    elif preempting:
        reason = PREEMPTING
    else:
        own = blocked.get(head.request_id)
        reason = queue_reason(scheduler, output, head, own, trace.deferred)
    note_adapters(scheduler, reason, blocked)
    return head, reason, running_reason(scheduler, output, trace.deferred)


def _passed_over(trace: _StepTrace, blocked: Mapping[str, int]) -> Mapping[str, int]:
    """The requests with a reason of their own behind which the queue was still looked at.

    A request that the encoder refuses ends the search up to vLLM 0.32, and is passed over since.
    """
    last = trace.last_tried
    if last is None or blocked.get(last) not in _REFUSED:
        return blocked
    return {identifier: reason for identifier, reason in blocked.items() if identifier != last}


def _key_of(scheduler: Any, identifier: str) -> int:
    return getattr(scheduler.requests.get(identifier), _KEY, NONE)


def _note_head(trace: _StepTrace, head: Any, number: int, recorder: Recorder) -> None:
    key = getattr(head, _KEY, NONE)
    if key != trace.head:
        trace.head = key
        recorder.record(_HEAD, number, key)


def _note_members(scheduler: Any, output: Any, trace: _StepTrace, recorder: Recorder) -> None:
    now, before = output.num_scheduled_tokens, trace.members
    trace.members = now
    number = trace.number
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for identifier, tokens in now.items() - before.items():
        key = _key_of(scheduler, identifier)
        if key != NONE:
            recorder.record(_MEMBER, key, number, tokens, computed.get(identifier, 0))
    for identifier in before.keys() - now.keys():
        key = _key_of(scheduler, identifier)
        if key != NONE:
            recorder.record(_MEMBER, key, number)


def _note_blocked(scheduler: Any, trace: _StepTrace, now: dict[str, int], recorder: Recorder) -> None:
    before, trace.was_blocked = trace.was_blocked, now
    if now == before:
        return
    for identifier, reason in now.items() - before.items():
        recorder.record(_BLOCKED, _key_of(scheduler, identifier), trace.number, reason)
    for identifier in before.keys() - now.keys():
        key = _key_of(scheduler, identifier)
        if key != NONE:
            recorder.record(_BLOCKED, key, trace.number)


def wrap_update_from_output(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record that a step is done, and whose first token it made."""

    def update_from_output(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        mark = attribute(scheduler_output, STEP_MARK)
        if mark is None:
            return original(self, scheduler_output, *args, **kwargs)
        try:
            done = monotonic_ns()
            _, number, _, scheduled = mark
            took = done - scheduled
            recorder.record_at(done, _STEP_DONE, number, took & _U32, took >> 32)
            _trace_of(self).done = number
        except Exception:
            recorder.fault()
        result = original(self, scheduler_output, *args, **kwargs)
        try:
            _note_first_tokens(self, scheduler_output, recorder)
        except Exception:
            recorder.fault()
        return result

    return update_from_output


def _note_first_tokens(scheduler: Any, output: Any, recorder: Recorder) -> None:
    trace = _trace_of(scheduler)
    if not trace.prefilling:
        return
    for identifier in trace.prefilling.keys() & output.num_scheduled_tokens.keys():
        request = scheduler.requests.get(identifier)
        if request is not None and request.num_output_tokens:
            _note_first_token(trace, request, recorder)


def _note_first_token(trace: _StepTrace, request: Any, recorder: Recorder) -> None:
    key = trace.prefilling.pop(request.request_id, None)
    if key is not None and (request.num_output_tokens or _is_pooled(request)):
        recorder.record(_FIRST_TOKEN, key, trace.done)


def _is_pooled(request: Any) -> bool:
    """Whether a request that makes no tokens has made its only output."""
    return request.pooling_params is not None and request.status.name == "FINISHED_STOPPED"
