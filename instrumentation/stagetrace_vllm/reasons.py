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

_SEARCHED: Final = 16
"""So many requests at the head of a queue are looked at; a queue may hold thousands."""


def note_adapters(scheduler: Any, reason: int, blocked: dict[str, int]) -> None:
    """Add requests that were passed over for their adapter, where the queue was not left before them."""
    if scheduler.lora_config is None or reason in {_SEATS, _TOKENS, _PAUSED, PREEMPTING}:
        return
    for request in islice(scheduler.deferred_waiting, _SEARCHED):
        if request.lora_request is not None and request.status.name in {"WAITING", "PREEMPTED"}:
            blocked.setdefault(request.request_id, _LORA)


def head_of_queue(scheduler: Any, blocked: Mapping[str, int]) -> Any:
    """Return the request at which the queue was left: the first that was not passed over, or None."""
    queue = scheduler.kv_holding_waiting or scheduler.waiting
    head = queue.peek_request() if queue else None
    if head is None or _are_seats_taken(scheduler) or not _is_passed_over(scheduler, head, blocked):
        return head
    if not isinstance(queue, deque):
        return None  # a priority queue is copied whole to be looked through
    behind = islice(queue, 1, _SEARCHED)
    return next((request for request in behind if not _is_passed_over(scheduler, request, blocked)), None)


def _is_passed_over(scheduler: Any, request: Any, blocked: Mapping[str, int]) -> bool:
    adapter = scheduler.lora_config is not None and request.lora_request is not None
    return request in scheduler.deferred_waiting and (adapter or request.request_id in blocked)


def queue_reason(scheduler: Any, output: Any, head: Any, own: int | None, throttled: bool) -> int:
    """Say why the queue was left where it was; seats first, because they stay taken."""
    if scheduler.pause_state.name != "UNPAUSED":
        return _PAUSED
    if _are_seats_taken(scheduler):
        return _SEATS
    if _is_exhausted(scheduler, output) or _must_fit_whole(scheduler, output, head):
        return _TOKENS
    if own is not None:
        return own
    if throttled:
        return _DEFERRED
    return _KV if _lacks_blocks(scheduler, head) else UNKNOWN


def running_reason(scheduler: Any, output: Any) -> int:
    """Say why running requests were left out of a step."""
    if len(output.num_scheduled_tokens) >= len(scheduler.running):
        return NO_REASON
    return _TOKENS if _is_exhausted(scheduler, output) else UNKNOWN


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
