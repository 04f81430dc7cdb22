"""Why the scheduler left requests out of a step, read from its state right after it composed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from stagetrace.records import ReasonCode

NO_REASON = int(ReasonCode.NONE)
PREEMPTING = int(ReasonCode.PREEMPTING)
UNKNOWN = int(ReasonCode.UNKNOWN)
_SEATS = int(ReasonCode.SEATS)
_TOKENS = int(ReasonCode.TOKENS)
_KV = int(ReasonCode.KV)
_LORA = int(ReasonCode.LORA)
_PAUSED = int(ReasonCode.PAUSED)
_DEFERRED = int(ReasonCode.DEFERRED)

READS: Final = (
    "deferred_waiting",
    "kv_holding_waiting",
    "lora_config",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "num_waiting_for_streaming_input",
    "pause_state",
    "prefill_capacity_bound",
)
"""Attributes of the scheduler without which no reason is told; vLLM has them all since 0.31."""

_SEARCHED: Final = 16
"""So many requests at the head of a queue are looked at; a queue may hold thousands."""


def are_prefills_deferred(scheduler: Any, throttled: bool) -> bool:
    """Whether the step that is about to be composed puts prefills off; its composition forgets why."""
    if not throttled and not _is_before_cadence(scheduler):
        return False
    decoding = any(not request.is_prefill_chunk for request in scheduler.running)
    return decoding and not scheduler.prefill_capacity_bound


def _is_before_cadence(scheduler: Any) -> bool:
    """Whether the last step with prefills is too short ago; a setting of engines alone since 0.33."""
    interval: int = getattr(scheduler, "local_prefill_interval", 1)
    return interval > 1 and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval


def note_adapters(scheduler: Any, reason: int, blocked: dict[str, int]) -> None:
    """Add requests that were passed over for their adapter, where the queue was not left before them."""
    if scheduler.lora_config is None or reason in {_SEATS, _TOKENS, _PAUSED, PREEMPTING}:
        return
    for request in islice(scheduler.deferred_waiting, _SEARCHED):
        if request.lora_request is not None and request.status.name in {"WAITING", "PREEMPTED"}:
            blocked.setdefault(request.request_id, _LORA)


def head_of_queue(scheduler: Any, blocked: Mapping[str, int]) -> Any:
    """Return the request at which the queue was left: the first that was not passed over, or None."""
    queues = [queue for queue in (scheduler.kv_holding_waiting, scheduler.waiting) if queue]
    if queues and _are_seats_taken(scheduler):
        return queues[0].peek_request()
    for queue in queues:
        # A priority queue is copied whole to be looked through: only its head is looked at.
        first = islice(queue, _SEARCHED) if isinstance(queue, deque) else (queue.peek_request(),)
        for request in first:
            if not _is_passed_over(scheduler, request, blocked):
                return request
    return None


def _is_passed_over(scheduler: Any, request: Any, blocked: Mapping[str, int]) -> bool:
    adapter = scheduler.lora_config is not None and request.lora_request is not None
    return request in scheduler.deferred_waiting and (adapter or request.request_id in blocked)


def queue_reason(scheduler: Any, output: Any, head: Any, own: int | None, deferred: bool) -> int:
    """Say why the queue was left where it was; seats first, because they stay taken."""
    if scheduler.pause_state.name != "UNPAUSED":
        return _PAUSED
    if _are_seats_taken(scheduler):
        return _SEATS
    if _is_exhausted(scheduler, output) or _must_fit_whole(scheduler, output, head):
        return _TOKENS
    if own is not None:
        return own
    if deferred:
        return _DEFERRED
    return _KV if _lacks_blocks(scheduler, head) else UNKNOWN


def running_reason(scheduler: Any, output: Any, deferred: bool) -> int:
    """Say why running requests were left out of a step."""
    if len(output.num_scheduled_tokens) >= len(scheduler.running):
        return NO_REASON
    if _is_exhausted(scheduler, output):
        return _TOKENS
    return _DEFERRED if deferred else UNKNOWN


def _are_seats_taken(scheduler: Any) -> bool:
    seated = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    return bool(seated >= scheduler.max_num_active_reqs)


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
