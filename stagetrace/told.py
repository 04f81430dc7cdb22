"""What servers told through the recording API: the parts of requests, also those of other processes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from stagetrace.gaps import NEVER, Cut, cut_between
from stagetrace.stages import Kind, Outcome, Stage
from stagetrace.timeline import Item, Part, RequestTimeline

if TYPE_CHECKING:
    from stagetrace.process_records import ProcessRecords

Event = tuple[int, Stage | None, int | None]
"""Time, the stage that begins then or None for an end, and the media item."""

_LOADING: Final = frozenset({Stage.RETRIEVAL, Stage.MEDIA_DECODE_WAIT, Stage.MEDIA_DECODE})


def parts_of(events: Iterable[Event], process: str, set_aside: Counter[str]) -> Iterator[Part]:
    """Make the parts that were recorded under one number, whatever the order of the records.

    A begin of another stage ends the one before: so does work that was waited for.

    Args:
        events: Begins and ends.
        process: Name of the process that recorded them.
        set_aside: Counter of what could not be used, by reason; added to.
    """
    part: Part | None = None
    over = False
    for time, stage, item in sorted(events, key=_in_order):
        if stage is None:
            set_aside["stage_end_without_begin"] += part is None
            over = over or part is not None
        elif over or (part is not None and part.stage is stage):
            set_aside["stage_begun_twice"] += 1
            continue
        if part is not None:
            part.end = time
            yield part
        part = None if stage is None else Part(stage, time, item=item, process=process)
    if part is not None:
        yield part


def _in_order(event: Event) -> tuple[int, int, str, int]:
    """Order events of one part: at the same time a wait, then the work, then the end."""
    time, stage, item = event
    if stage is None:
        return time, 2, "", 0
    return time, int(stage.kind is not Kind.WAIT), stage, -1 if item is None else item


def join_resumed(readers: Sequence[ProcessRecords], set_aside: Counter[str]) -> None:
    """Add what processes recorded of requests that others received, where they share a clock.

    A request is set aside when a process that worked for it did not record all of the time.
    """
    known = {
        request.request_id: (reader, request) for reader in readers for request in reader.requests.values()
    }
    counted = {f"{reader.header.process}-{number}" for reader in readers for number in reader.cut_requests}
    for reader in readers:
        for resumed in reader.resumed.values():
            if resumed.request_id in counted:
                continue
            if resumed.request_id not in known:
                set_aside["resumed_request_without_beginning"] += 1
                continue
            owner, request = known[resumed.request_id]
            cut = cut_between(reader.gaps, resumed.received, _end(request))
            if owner.header.clock != reader.header.clock:
                set_aside["resumed_request_of_another_clock"] += 1
            elif cut is not None:
                _leave_out(owner, request, cut)
                counted.add(request.request_id)
            else:
                _merge(request, resumed)


def _leave_out(owner: ProcessRecords, request: RequestTimeline, cut: Cut) -> None:
    owner.leave_out({request.request_id: cut})


def _end(request: RequestTimeline) -> int:
    return NEVER if request.ended is None else request.ended


def _merge(request: RequestTimeline, resumed: RequestTimeline) -> None:
    request.parts += resumed.parts
    request.facts = resumed.facts | request.facts
    if resumed.first_useful is not None:
        request.first_useful = min(resumed.first_useful, request.first_useful or resumed.first_useful)
    if not request.is_hooked:
        for item in resumed.items.values():
            add_item(request, item.index, item.begin).facts.update(item.facts)


def add_item(request: RequestTimeline, index: int, begin: int) -> Item:
    """Return a media item of a request that is known from a time on, from its receipt at the earliest."""
    begin = max(begin, request.received)
    item = request.items.setdefault(index, Item(index, begin))
    item.begin = min(item.begin, begin)
    return item


def complete(requests: Iterable[RequestTimeline], set_aside: Counter[str]) -> None:
    """Find out from the parts of requests when their items were ready, and count what cannot be so."""
    for request in requests:
        end = _end(request)
        set_aside["stage_after_its_request"] += sum(part.begin >= end for part in request.parts)
        if request.outcome is Outcome.OK:
            set_aside["stage_without_end"] += sum(part.end is None for part in request.parts)
        if request.parts and not request.is_hooked:
            _complete_items(request)


def _complete_items(request: RequestTimeline) -> None:
    """Find out when items were ready: when they were loaded, or without a loading when their parts ended."""
    parts: dict[int, list[Part]] = defaultdict(list)
    for part in request.parts:
        if part.item is not None:
            parts[part.item].append(part)
    for index, mine in parts.items():
        item = add_item(request, index, min(part.begin for part in mine))
        loading = [part for part in mine if part.stage in _LOADING] or mine
        ends = [part.end for part in loading if part.end is not None]
        if len(ends) == len(loading):
            item.ready = max(*ends, item.begin)
