"""The engine core: requests held, steps scheduled and done, and why the rest waits.

Everything is recorded by change: a request that has one token in every step
from its second to its last is not mentioned again in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from stagetrace.clock import monotonic_ns
from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, ReasonCode, RecordKind
from stagetrace_vllm.reading import attribute, digest

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
_SEARCHED: Final = 16
"""So many requests at the head of a queue are looked at; a queue may hold thousands."""
_U32: Final = 0xFFFFFFFF
_NO_REASON = int(ReasonCode.NONE)
_SEATS = int(ReasonCode.SEATS)
_TOKENS = int(ReasonCode.TOKENS)
_KV = int(ReasonCode.KV)
_ENCODER_BUDGET = int(ReasonCode.ENCODER_BUDGET)
_ENCODER_CACHE = int(ReasonCode.ENCODER_CACHE)
_REMOTE_EMBEDDING = int(ReasonCode.REMOTE_EMBEDDING)
_LORA = int(ReasonCode.LORA)
_PREEMPTING = int(ReasonCode.PREEMPTING)
_PAUSED = int(ReasonCode.PAUSED)
_DEFERRED = int(ReasonCode.DEFERRED)
_UNKNOWN = int(ReasonCode.UNKNOWN)
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
                reason = _STATUS_REASONS.get(request.status.name, _UNKNOWN)
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
        trace = attribute(self, "__dict__")
        if trace is not None and (remembered := trace.get(_TRACE)) is not None:
            remembered.preempting = False
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
    head, reason, left_out = None, _UNKNOWN, _UNKNOWN
    try:
        left_out = _running_reason(scheduler, output)
        head = _head(scheduler, blocked) if waiting else None
        if head is None:
            reason = _NO_REASON
        elif preempting:
            reason = _PREEMPTING
        else:
            reason = _queue_reason(scheduler, output, head, blocked.get(head.request_id), throttled)
        _note_adapters(scheduler, reason, blocked)
    except Exception:
        # A step without its reason is better than no step.
        recorder.fault()
    if output.num_scheduled_tokens != trace.members:
        trace.decodes = list(output.num_scheduled_tokens.values()).count(1)
    requests = len(output.num_scheduled_tokens) | reason << 16 | left_out << 24
    composition = (tokens, requests, running | trace.decodes << 16, waiting)
    if composition != trace.composition or not tokens:
        trace.composition = composition
        recorder.record_at(begin, _STEP, number, *composition)
    _note_head(trace, head, number, recorder)
    _note_members(scheduler, output, trace, recorder)
    _note_blocked(scheduler, trace, blocked, recorder)
    for identifier, items in output.scheduled_encoder_inputs.items():
        for item in items:
            recorder.record(_STEP_ITEM, number, _key_of(scheduler, identifier), item)


def _key_of(scheduler: Any, identifier: str) -> int:
    return getattr(scheduler.requests.get(identifier), _KEY, NONE)


def _note_adapters(scheduler: Any, reason: int, blocked: dict[str, int]) -> None:
    """Add requests that were passed over for their adapter, where the queue was not left before them."""
    if scheduler.lora_config is None or reason in {_SEATS, _TOKENS, _PAUSED, _PREEMPTING}:
        return
    for request in islice(scheduler.deferred_waiting, _SEARCHED):
        if request.lora_request is not None and request.status.name in {"WAITING", "PREEMPTED"}:
            blocked.setdefault(request.request_id, _LORA)


def _head(scheduler: Any, blocked: Mapping[str, int]) -> Any:
    """Return the request at which the queue was left: the first that was not passed over, or None."""
    queue = scheduler.kv_holding_waiting or scheduler.waiting
    head = queue.peek_request() if queue else None
    if head is None or not _is_passed_over(scheduler, head, blocked):
        return head
    if not isinstance(queue, deque):
        return None  # a priority queue is copied whole to be looked through
    behind = islice(queue, 1, _SEARCHED)
    return next((request for request in behind if not _is_passed_over(scheduler, request, blocked)), None)


def _is_passed_over(scheduler: Any, request: Any, blocked: Mapping[str, int]) -> bool:
    adapter = scheduler.lora_config is not None and request.lora_request is not None
    return request in scheduler.deferred_waiting and (adapter or request.request_id in blocked)


def _queue_reason(scheduler: Any, output: Any, head: Any, own: int | None, throttled: bool) -> int:
    """Say why the queue was left where it was; seats first, because they stay taken."""
    if scheduler.pause_state.name != "UNPAUSED":
        return _PAUSED
    seated = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    if seated >= scheduler.max_num_active_reqs:
        return _SEATS
    if _is_exhausted(scheduler, output) or _must_fit_whole(scheduler, output, head):
        return _TOKENS
    if own is not None:
        return own
    if throttled:
        return _DEFERRED
    return _KV if _lacks_blocks(scheduler, head) else _UNKNOWN


def _running_reason(scheduler: Any, output: Any) -> int:
    """Say why running requests were left out of a step."""
    if len(output.num_scheduled_tokens) >= len(scheduler.running):
        return _NO_REASON
    return _TOKENS if _is_exhausted(scheduler, output) else _UNKNOWN


def _must_fit_whole(scheduler: Any, output: Any, head: Any) -> bool:
    """Whether a prompt that may not be chunked is larger than what is left of the token budget."""
    if scheduler.scheduler_config.enable_chunked_prefill:
        return False
    left = scheduler.max_num_scheduled_tokens - output.total_num_scheduled_tokens
    return bool(head.num_tokens > left)


def _is_exhausted(scheduler: Any, output: Any) -> bool:
    return bool(output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens)


def _lacks_blocks(scheduler: Any, request: Any) -> bool:
    """Whether a request's tokens need more blocks than are free: what must be so if KV refused it."""
    manager = scheduler.kv_cache_manager
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    needed = -(-request.num_tokens // scheduler.block_size) * groups + manager.watermark_blocks
    return bool(needed > manager.block_pool.get_num_free_blocks())


def _note_head(trace: _StepTrace, head: Any, number: int, recorder: Recorder) -> None:
    key = getattr(head, _KEY, NONE)
    if key != trace.head:
        trace.head = key
        recorder.record(_HEAD, number, key)


def _note_members(scheduler: Any, output: Any, trace: _StepTrace, recorder: Recorder) -> None:
    now, before = output.num_scheduled_tokens, trace.members
    if now == before:
        return
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
    for identifier in trace.prefilling.keys() & output.num_scheduled_tokens.keys():
        request = scheduler.requests.get(identifier)
        if request is not None and request.num_output_tokens:
            _note_first_token(trace, request, recorder)


def _note_first_token(trace: _StepTrace, request: Any, recorder: Recorder) -> None:
    key = trace.prefilling.pop(request.request_id, None)
    if key is not None and request.num_output_tokens:
        recorder.record(_FIRST_TOKEN, key, trace.done)
