"""The engine core: requests held, steps scheduled and done, and why the rest waits.

Everything is recorded by change: a request that has one token in every step
from its second to its last is not mentioned again in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from stagetrace.clock import monotonic_ns
from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, ReasonCode, RecordKind
from stagetrace_vllm.reading import attribute, digest
from stagetrace_vllm.reasons import (
    NO_REASON,
    PREEMPTING,
    UNKNOWN,
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
_U32: Final = 0xFFFFFFFF
_ENCODER_BUDGET = int(ReasonCode.ENCODER_BUDGET)
_ENCODER_CACHE = int(ReasonCode.ENCODER_CACHE)
_REMOTE_EMBEDDING = int(ReasonCode.REMOTE_EMBEDDING)
_STATUS_REASONS: Final = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": int(ReasonCode.GRAMMAR),
    "WAITING_FOR_REMOTE_KVS": int(ReasonCode.REMOTE_KV),
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
        "done",
        "head",
        "members",
        "number",
        "polling",
        "preempting",
        "prefilling",
        "was_blocked",
    )

    def __init__(self) -> None:
        self.number = 0
        self.done = 0
        self.decodes = 0
        self.composition: tuple[int, int, int, int] | None = None
        self.members: Mapping[str, int] = {}
        self.prefilling: dict[str, int] = {}
        # Requests with a reason of their own: in the step that is being composed, in the one before.
        self.blocked: dict[str, int] = {}
        self.was_blocked: dict[str, int] = {}
        self.preempting = False
        self.head = NONE
        self.polling = False
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
    """Note the model; watch the encoder cache manager, whose class is chosen at run time.

    ``EngineCore.__init__`` would be too late: it is what loads the plug-in.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            recorder.role = "engine"
            name = self.vllm_config.model_config.served_model_name
            recorder.announce(RecordKind.PROCESS_FACT, Fact.MODEL, name if isinstance(name, str) else name[0])
            _watch_encoder_cache(self, recorder)
        except Exception:
            recorder.fault()

    return init


def _watch_encoder_cache(scheduler: Any, recorder: Recorder) -> None:
    manager = scheduler.encoder_cache_manager
    trace = _trace_of(scheduler)
    original = manager.can_allocate

    def can_allocate(*args: Any, **kwargs: Any) -> Any:
        allowed = original(*args, **kwargs)
        if not allowed:
            try:
                request, item, budget = args[:3]
                over = request.get_num_encoder_embeds(item) > budget
                trace.can_allocate = (request.request_id, _ENCODER_BUDGET if over else _ENCODER_CACHE)
            except Exception:
                recorder.fault()
        return allowed

    manager.can_allocate = can_allocate


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
                _note_refusal(_trace_of(self), request.request_id)
        except Exception:
            recorder.fault()
        return result

    return try_schedule_encoder_inputs


def _note_refusal(trace: _StepTrace, identifier: str) -> None:
    said_no, trace.can_allocate = trace.can_allocate, None
    if said_no is not None and said_no[0] == identifier:
        trace.blocked[identifier] = said_no[1]


def wrap_handle_blocked_waiting_request(
    original: Callable[..., Any], recorder: Recorder
) -> Callable[..., Any]:
    """Notice that the scheduler looked at a request, found it not ready, and passed it over.

    Its status alone would not do: it stays as it was while nobody looks, as when all seats are taken.
    """

    def handle_blocked_waiting_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        ready = original(self, request, *args, **kwargs)
        if not ready:
            try:
                reason = _STATUS_REASONS.get(request.status.name, UNKNOWN)
                _trace_of(self).blocked[request.request_id] = reason
            except Exception:
                recorder.fault()
        return ready

    return handle_blocked_waiting_request


def wrap_ec_transfer_pending(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Notice when a request waits for an embedding from another server."""

    def ec_transfer_pending(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        pending = original(self, request, *args, **kwargs)
        if pending:
            try:
                _trace_of(self).blocked[request.request_id] = _REMOTE_EMBEDDING
            except Exception:
                recorder.fault()
        return pending

    return ec_transfer_pending


def wrap_schedule(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record a step: its composition, the queue, and why the queue was left."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = monotonic_ns()
        try:
            # Set outside of a step by a reset of the prefix cache, it would be said of this one.
            _trace_of(self).preempting = False
        except Exception:
            recorder.fault()
        output = original(self, *args, **kwargs)
        try:
            _note_step(self, output, begin, bool(args and args[0]), recorder)
        except Exception:
            recorder.fault()
        return output

    return schedule


def _note_step(scheduler: Any, output: Any, begin: int, throttled: bool, recorder: Recorder) -> None:
    trace = _trace_of(scheduler)
    blocked, trace.blocked = trace.blocked, {}
    preempting, trace.preempting = trace.preempting, False
    tokens = output.total_num_scheduled_tokens
    running, waiting = scheduler.get_request_counts()
    if not tokens and (trace.polling or not (running or waiting)):
        # Polls of a blocked queue come a thousand times a second: only the first one is a step.
        return
    trace.polling = not tokens
    number = trace.number = trace.number + 1
    encodes = bool(output.scheduled_encoder_inputs)
    setattr(output, STEP_MARK, (recorder.number, number, encodes, begin))
    head, reason, left_out = None, UNKNOWN, UNKNOWN
    try:
        left_out = running_reason(scheduler, output)
        head = head_of_queue(scheduler, blocked) if waiting else None
        if head is None:
            reason = NO_REASON
        elif preempting:
            reason = PREEMPTING
        else:
            reason = queue_reason(scheduler, output, head, blocked.get(head.request_id), throttled)
        note_adapters(scheduler, reason, blocked)
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
    if key is not None and request.num_output_tokens:
        recorder.record(_FIRST_TOKEN, key, trace.done)
