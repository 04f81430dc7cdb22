"""The records of one process, sorted into what they are about."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Final

from stagetrace.clock import clock_domain, pid_namespace
from stagetrace.gaps import Cut, Gap, gap_before, gap_behind
from stagetrace.records import (
    ITEM_NUMBER_ENDS,
    NONE,
    RECORD,
    Fact,
    ItemFact,
    JobKind,
    Misuse,
    ReasonCode,
    RecordKind,
    StageCode,
)
from stagetrace.segment import Record, SegmentData, SegmentHeader
from stagetrace.stages import Outcome, Reason, Stage
from stagetrace.timeline import EngineRequest, Fetch, Item, Job, Lag, RequestTimeline, Step
from stagetrace.told import Event, add_item, parts_of

_REASONS: Final[dict[int, Reason]] = {
    int(code): Reason(code.name.lower()) for code in ReasonCode if code is not ReasonCode.NONE
}
_TEXT_COLUMNS: Final = {
    Fact.TRACEPARENT: "traceparent",
    Fact.EXTERNAL_ID: "external_id",
    Fact.PHASE: "phase",
    Fact.LABEL: "label",
    Fact.ARM: "arm",
    Fact.ERROR: "error_code",
    Fact.PATH: "path",
    Fact.MODEL: "model",
    Fact.FINISH_REASON: "finish_reason",
}
_FIRST_COUNTS: Final = frozenset({"error_code", "external_id", "traceparent"})
"""Facts whose first word counts: the first error is the cause of those behind it, later ids are of parts."""

_NUMBER_COLUMNS: Final = {
    Fact.INTENDED_UNIX_NS: "intended_unix_ns",
    Fact.MAX_TOKENS: "max_tokens",
    Fact.PROMPT_TOKENS: "prompt_tokens",
    Fact.CACHED_TOKENS: "cached_tokens",
    Fact.OUTPUT_TOKENS: "output_tokens",
    Fact.MEDIA_ITEMS: "media_items",
    Fact.STATUS: "status",
}
_PROCESS_FACTS: Final = {Fact.MODEL: "model", Fact.VERSION: "version", Fact.SERVICE: "service"}
_CANCELLED: Final = 1
_COST_HIGH: Final = 1000
"""Upper half of what the longest window, in microseconds, may have cost in nanoseconds."""

_AGE_NS: Final = 1 << 61
"""No host has been up for so long; later times are damage, and their differences would not fit."""


@dataclass(slots=True)
class WorkerStep:
    """A step as a worker ran it."""

    begin: int | None = None
    encoder_begin: int | None = None
    encoder_end: int | None = None
    encoder_deferred: bool = False
    encoder_device_ns: int | None = None


@dataclass(slots=True)
class Media:
    """A media item as the engine knows it: identifier, embeddings, last prompt position."""

    identifier: str | None
    embeddings: int
    last_position: int


@dataclass(slots=True)
class Cost:
    """What recording has cost the busy thread of a process, by its own estimate.

    Attributes:
        steps: Steps in which it was measured.
        cost_ns: Time that recording took in them.
        busy_ns: Time of the steps, recording included.
    """

    steps: int = 0
    cost_ns: int = 0
    busy_ns: int = 0


class ProcessRecords:
    """The records of one process, sorted into what they are about.

    What is in flight when the records break off is set aside: requests are
    counted by reason, and the engine's requests are kept as ``others`` that
    take part in steps, of whom nothing more is said.

    Args:
        segments: The segments of the process.
        set_aside: Counter of what could not be used, by reason; added to.
    """

    def __init__(self, segments: Sequence[SegmentData], set_aside: Counter[str]) -> None:
        segments = sorted(segments, key=lambda data: data.header.sequence)
        self.header = segments[-1].header
        self.roles = {data.header.role for data in segments}
        self.removed_segments = sum(data.header.removed_segments for data in segments)
        self.removed_bytes = sum(data.header.removed_bytes for data in segments)
        self.pairs = [data.header.pair for data in segments]
        self.opened = self.pairs[0].monotonic_ns
        self.gaps: list[Gap] = []
        self.others: list[EngineRequest] = []
        self.unjoined: set[str] = set()
        self.nameless = 0
        self.not_sampled: set[int] = set()
        self.cost = Cost()
        self.records = 0
        self.received = 0
        self.requests: dict[int, RequestTimeline] = {}
        self.joins: list[tuple[RequestTimeline, EngineRequest]] = []
        self.outputs: dict[str, list[tuple[int, int, str | None]]] = defaultdict(list)
        self.engine_requests: dict[int, EngineRequest] = {}
        self.engine_media: dict[int, dict[int, Media]] = defaultdict(dict)
        self.steps: dict[int, Step] = {}
        self.worker_steps: dict[tuple[int, int], WorkerStep] = defaultdict(WorkerStep)
        self.pauses: list[tuple[int, bool]] = []
        self.facts: dict[str, str] = {}
        self.lags: list[Lag] = []
        self.hooks_off: list[str] = []
        self.resumed: dict[int, RequestTimeline] = {}
        self.cut_requests: set[int] = set()
        self._jobs: dict[tuple[int, int], Job] = {}
        self._events: dict[tuple[int, int], list[Event]] = defaultdict(list)
        self._told_items: dict[int, dict[int, Item]] = defaultdict(dict)
        self._left: set[int] = set()
        self._cancelled: set[int] = set()
        self._raised: set[int] = set()
        self._heads: list[tuple[int, int]] = []
        self._done: dict[int, tuple[int, int]] = {}
        self._encoder_items: Counter[int] = Counter()
        self._last = 0
        self._partly: dict[int, EngineRequest] = {}
        self._framed = True
        self._headless: set[int] = set()
        self._last_steps: set[int] = set()
        self._set_aside = set_aside
        self._texts = _read_texts(segments)
        self._read(segments)
        self._finish()

    def _text(self, number: int) -> str | None:
        return self._texts.get(number)

    def _read(self, segments: Iterable[SegmentData]) -> None:
        previous: SegmentHeader | None = None
        for data in segments:
            self._cut_at(gap_before(data.header, previous, self._last))
            previous = data.header
            self.records += len(data.body) // RECORD.size
            # By time, because a record of one thread may stand before an earlier one of another.
            records = (r for r in data if r[6] != RecordKind.DEFINE and self._is_of_this_age(r))
            for record in sorted(records, key=itemgetter(0)):
                self._last = record[0]
                handler = _HANDLERS.get(record[6])
                if handler is None:
                    self._set_aside["unknown_record"] += 1
                    continue
                try:
                    handler(self, record)
                except KeyError:
                    self._note_unknown(record[1], record[6])
                except (ValueError, IndexError):
                    self._set_aside["unknown_value"] += 1
        self._cut_at(gap_behind(self.header))

    def _cut_at(self, gap: Gap | None) -> None:
        """Let go of all that is in flight: what became of it is not recorded."""
        if gap is None:
            return
        self.gaps.append(gap)
        self.leave_out({r.request_id: gap.cut for r in self.requests.values() if r.ended is None})
        gone = {key for key, engine in self.engine_requests.items() if engine.freed is None}
        for engine in (*map(self.engine_requests.pop, gone), *self._partly.values()):
            engine.freed = gap.begin if engine.freed is None else engine.freed
            self.others.append(engine)
        self._partly.clear()
        self._framed = False
        self._last_steps.add(max((*self.steps, *self._done), default=0))
        # What was recorded of a step that was being run may not be all of it.
        self._headless |= self.steps.keys() - self._done.keys()
        for number in self._headless & self.steps.keys():
            del self.steps[number]
        self.pauses.append((gap.end, False))

    def leave_open(self, number: int) -> None:
        """Note that a worker had begun a step, and none after it, when the records end.

        The step is not recorded when it was composed like the one before and the engine did not see its end.
        """
        step, before = self.steps.get(number), self.steps.get(number - 1)
        if step is None and before is not None and number - 1 not in self._last_steps:
            done = before.done
            if done is not None:
                step = self.steps[number] = replace(before, number=number, scheduled=done, done=None)
                step.encoder_items = self._encoder_items[number]
        if step is not None:
            step.under_way = step.done is None

    def leave_out(self, cuts: Mapping[str, Cut]) -> None:
        """Set requests aside by their id; the engine's parts of them are then nobody's, and not missed."""
        for number in [number for number, request in self.requests.items() if request.request_id in cuts]:
            self._set_aside[cuts[self.requests.pop(number).request_id]] += 1
            self.cut_requests.add(number)
        self.received -= len(cuts)
        self.unjoined.update(
            engine.identifier for request, engine in self.joins if request.request_id in cuts
        )
        self.joins = [join for join in self.joins if join[0].request_id not in cuts]

    def _note_unknown(self, number: int, kind: int) -> None:
        of_request = RecordKind.RECEIVED <= kind < RecordKind.HELD and number not in self.requests
        if not (self.gaps and of_request):
            self._set_aside["record_without_beginning"] += 1
        elif number not in self.cut_requests:
            self.cut_requests.add(number)
            self._set_aside[self.gaps[-1].cut] += 1

    def _engine(self, key: int) -> EngineRequest:
        """Return a request of the engine; behind a gap, one whose beginning is not there."""
        found = self.engine_requests.get(key) or self._partly.get(key)
        if found is None:
            if not self.gaps:
                raise KeyError(key)
            found = self._partly[key] = EngineRequest(self._text(key) or "")
        return found

    def _is_of_this_age(self, record: Record) -> bool:
        if 0 <= record[0] < _AGE_NS:
            return True
        self._set_aside["impossible_time"] += 1
        return False

    def _finish(self) -> None:
        self.leave_out({r.request_id: Cut.IMPOSSIBLE for r in self.requests.values() if _is_impossible(r)})
        for number, request in self.requests.items():
            request.outcome = self._outcome(number, request)
        self._finish_told()
        self.others += self._partly.values()
        self._finish_steps()

    def _finish_told(self) -> None:
        """Add what the process told through the recording API to the requests that it is about."""
        for (number, _), events in self._events.items():
            owner = self._owner(number)
            if owner is None:
                self._note_unknown(number, RecordKind.STAGE_BEGIN)
            else:
                owner.parts += parts_of(events, self.header.process, self._set_aside)
        joined = {request.request_id for request, _ in self.joins}
        for number, items in self._told_items.items():
            owner = self._owner(number)
            if owner is None:
                continue
            hooked = owner.is_hooked or owner.request_id in joined
            for item in items.values():
                if not hooked:
                    add_item(owner, item.index, item.begin).facts.update(item.facts)
                elif item.index in owner.items:
                    owner.items[item.index].facts = item.facts | owner.items[item.index].facts
                else:
                    self._set_aside["item_beside_those_of_the_hooks"] += 1

    def _owner(self, number: int) -> RequestTimeline | None:
        """Return the request that a number stands for, received here or resumed."""
        return self.requests.get(number) or self.resumed.get(number)

    def _finish_steps(self) -> None:
        """Complete the steps that were not recorded because they were composed like the one before."""
        heads = dict(self._heads)
        head: str | None = None
        for number in sorted(self.steps.keys() | self._done.keys()):
            done, scheduled = self._done.get(number, (None, 0))
            step = self.steps.get(number)
            if step is None:
                before = self.steps.get(number - 1)
                if before is None or before.number in self._last_steps:
                    self._set_aside["step_without_beginning"] += 1
                    continue
                step = self.steps[number] = replace(before, number=number, scheduled=scheduled)
            step.done = done
            step.encoder_items = self._encoder_items[number]
            if number in heads:
                head = self._text(heads[number])
            step.head = head if step.waiting else None
        self._set_aside["step_without_beginning"] += len(self._headless - self._done.keys())

    def _outcome(self, number: int, request: RequestTimeline) -> Outcome | None:
        if request.ended is None:
            return Outcome.LOST if is_gone(self.header) else None
        if "error_code" in request.facts:
            return Outcome.ERROR
        if number in self._left:
            return Outcome.CANCELLED
        if number in self._cancelled:
            return Outcome.LOST
        status = request.facts.get("status")
        if isinstance(status, int) and status >= 400:  # noqa: PLR2004 - HTTP
            request.facts["error_code"] = f"http_{status}"
        elif number in self._raised:
            request.facts["error_code"] = "application_error"
        elif request.last_byte is None:
            request.facts["error_code"] = "no_response"
        return Outcome.ERROR if "error_code" in request.facts else Outcome.OK

    # --- API server ---

    def _on_received(self, record: Record) -> None:
        time, key = record[0], record[1]
        self.received += 1
        name = f"{self.header.process}-{key}"
        self.requests[key] = RequestTimeline(name, self.header.process, received=time)

    def _on_not_sampled(self, record: Record) -> None:
        self.not_sampled.add(record[1])

    def _on_body_complete(self, record: Record) -> None:
        self.requests[record[1]].body_complete = record[0]

    def _on_response_started(self, record: Record) -> None:
        facts = self.requests[record[1]].facts
        facts["status"] = record[2]
        if record[3] or "stream" not in facts:
            # A server may have told already that it streams otherwise than by events.
            facts["stream"] = bool(record[3])

    def _on_first_useful(self, record: Record) -> None:
        request = self._known(record[1])
        if record[1] in self._left or request.first_useful is not None:
            return
        request.first_useful = record[0]
        request.tokens_before = None if record[2] == NONE else record[2]
        request.choice = record[3]

    def _on_last_byte(self, record: Record) -> None:
        request = self.requests[record[1]]
        if record[1] not in self._left:
            request.last_byte = record[0]

    def _on_disconnected(self, record: Record) -> None:
        request = self.requests[record[1]]
        if request.last_byte is None and request.ended is None:
            # Here it ends; what the server still does with it is clearing up.
            request.ended = record[0]
            self._left.add(record[1])

    def _on_ended(self, record: Record) -> None:
        if record[1] in self._left:
            return
        request = self.requests[record[1]]
        request.ended = record[0]
        if record[2] == _CANCELLED and request.last_byte is None:
            self._cancelled.add(record[1])
        elif record[2]:
            self._raised.add(record[1])

    def _on_fact_number(self, record: Record) -> None:
        _, key, fact, low, high, *_ = record
        value = low | high << 32
        if value >= _AGE_NS << 1:
            raise ValueError(value)
        facts = self._known(key).facts
        if fact == Fact.STREAM:
            facts["stream"] = bool(value)
        else:
            facts[_NUMBER_COLUMNS[Fact(fact)]] = value

    def _on_fact_text(self, record: Record) -> None:
        _, key, fact, number, *_ = record
        text, column = self._text(number), _TEXT_COLUMNS[Fact(fact)]
        if column == "error_code" and key in self._left:
            return
        if text is None:
            return
        facts = self._known(key).facts
        if column not in _FIRST_COUNTS or column not in facts:
            facts[column] = text

    def _on_item_begin(self, record: Record) -> None:
        time, key, index, scheme, host, modality, *_ = record
        item = self.requests[key].items[index] = Item(index, begin=time)
        for column, number in (("scheme", scheme), ("host", host), ("modality", modality)):
            text = self._text(number)
            if text is not None:
                item.facts[column] = text

    def _on_item_end(self, record: Record) -> None:
        item = self.requests[record[1]].items[record[2]]
        if item.ready is None:
            item.ready = record[0]

    def _on_fetch_begin(self, record: Record) -> None:
        self.requests[record[1]].items[record[2]].fetches.append(Fetch(begin=record[0]))

    def _on_fetch_end(self, record: Record) -> None:
        item = self.requests[record[1]].items[record[2]]
        item.fetches[-1].end = record[0]
        item.fetches[-1].attempts = record[3]
        item.facts["fetch_attempts"] = record[3]
        if record[4] and item.ready is None:
            item.ready = record[0]

    def _on_job_submitted(self, record: Record) -> None:
        time, key, number, kind, item, *_ = record
        job = Job(JobKind(kind), None if item == NONE else item, submitted=time)
        self._jobs[key, number] = job
        self.requests[key].jobs.append(job)

    def _on_job_started(self, record: Record) -> None:
        self._jobs[record[1], record[2]].started = record[0]

    def _on_job_ended(self, record: Record) -> None:
        time, key, number, *_ = record
        job = self._jobs[key, number]
        job.ended = time
        if job.kind is JobKind.DECODE and job.item is not None:
            # The event loop learns of it later, and that is the wait of the next job.
            self.requests[key].items[job.item].ready = time

    def _on_media_decoded(self, record: Record) -> None:
        _, key, index, size, width_height, form, *_ = record
        facts = self.requests[key].items[index].facts
        facts["bytes"] = size
        if width_height:
            facts["width"], facts["height"] = width_height >> 16, width_height & 0xFFFF
        text = self._text(form)
        if text is not None:
            facts["format"] = text

    def _on_processor_cache(self, record: Record) -> None:
        item = self.requests[record[1]].items.get(record[2])
        if item is not None:
            item.facts["processor_cache"] = "hit" if record[3] else "miss"

    def _on_media_cached(self, record: Record) -> None:
        self.requests[record[1]].items[record[2]].facts["media_cache"] = "hit"

    def _on_item_inline(self, record: Record) -> None:
        item = self.requests[record[1]].items[record[2]]
        item.inline = True
        item.job = None if record[3] == NONE else record[3]

    def _on_loop_lag(self, record: Record) -> None:
        time, _, low, high, *_ = record
        self.lags.append(Lag(self.header.process, time, _duration(low, high)))

    def _on_engine_request(self, record: Record) -> None:
        number, identifier = record[1], self._text(record[2])
        begun = number in self.requests or number in self.not_sampled
        if identifier is None:
            self.nameless += not begun
            self._set_aside["text_not_recorded"] += begun
        elif number not in self.requests and (begun or self.gaps):
            self.unjoined.add(identifier)
        if number in self.not_sampled:
            return
        request = self.requests[number]
        if identifier is not None:
            engine = EngineRequest(identifier, joined=record[0], index=record[3], prompt=record[4])
            self.joins.append((request, engine))

    def _on_output_first(self, record: Record) -> None:
        self._note_output(record, None)

    def _on_output_finished(self, record: Record) -> None:
        self._note_output(record, self._text(record[3]))

    def _on_aborted(self, record: Record) -> None:
        self._note_output(record, None)

    def _note_output(self, record: Record, reason: str | None) -> None:
        identifier = self._text(record[2])
        if identifier is not None:
            self.outputs[identifier].append((record[6], record[0], reason))

    # --- recording API ---

    def _known(self, number: int) -> RequestTimeline:
        """Return the request that a number stands for, received here or resumed.

        Raises:
            KeyError: There is none.
        """
        found = self._owner(number)
        if found is None:
            raise KeyError(number)
        return found

    def _on_resumed(self, record: Record) -> None:
        name = self._text(record[2])
        if name is None:
            self._set_aside["text_not_recorded"] += 1
        else:
            self.resumed[record[1]] = RequestTimeline(name, self.header.process, received=record[0])

    def _on_stage_begin(self, record: Record) -> None:
        time, key, part, stage, item, *_ = record
        named = Stage[StageCode(stage).name]
        self._events[key, part].append((time, named, None if item == NONE else item))

    def _on_stage_end(self, record: Record) -> None:
        self._events[record[1], record[2]].append((record[0], None, None))

    def _on_item_fact(self, record: Record) -> None:
        time, key, index, code, low, high, *_ = record
        fact = ItemFact(code)
        self._known(key)
        item = self._told_items[key].setdefault(index, Item(index, begin=time))
        end = ITEM_NUMBER_ENDS.get(fact)
        value = self._text(low) if end is None else low | high << 32
        if isinstance(value, int) and end is not None and value >= end:
            raise ValueError(value)
        if value is not None:
            item.facts[fact.name.lower()] = value

    def _on_misused(self, record: Record) -> None:
        self._set_aside[Misuse(record[2]).name.lower()] += 1

    # --- engine ---

    def _on_held(self, record: Record) -> None:
        time, key, prompt_tokens, _, media_items, *_ = record
        identifier = self._text(key)
        if identifier is None:
            # Behind a gap it was defined before or within it.
            self._set_aside["text_not_recorded"] += not self.gaps
            return
        request = self.engine_requests[key] = EngineRequest(identifier, held=time)
        request.facts = {"prompt_tokens": prompt_tokens, "media_items": media_items}

    def _on_engine_item(self, record: Record) -> None:
        _, key, index, identifier, embeddings, position, *_ = record
        self.engine_media[key][index] = Media(self._text(identifier), embeddings, position)

    def _on_added(self, record: Record) -> None:
        self._engine(record[1]).added = record[0]

    def _on_frame(self, _record: Record) -> None:
        self._framed = True

    def _on_alive(self, record: Record) -> None:
        time, key, seated, *_ = record
        known = key in self.engine_requests or key in self._partly
        if not known and self.gaps and not seated:
            self._engine(key).added = time

    def _on_step(self, record: Record) -> None:
        time, number, tokens, packed, running, waiting, *_ = record
        if not self._framed:
            self._headless.add(number)
            return
        self.steps[number] = Step(
            number,
            scheduled=time,
            tokens=tokens,
            requests=packed & 0xFFFF,
            running=running & 0xFFFF,
            decodes=running >> 16,
            waiting=waiting,
            reason=_REASONS.get(packed >> 16 & 0xFF),
            running_reason=_REASONS.get(packed >> 24),
        )

    def _on_head(self, record: Record) -> None:
        self._heads.append((record[1], record[2]))

    def _on_member(self, record: Record) -> None:
        _, key, step, tokens, computed, *_ = record
        request = self._engine(key)
        if tokens and "cached_tokens" not in request.facts:
            request.facts["cached_tokens"] = computed
        if not request.members or request.members[-1][1] != tokens:
            request.members.append((step, tokens))
        if request.preempted and tokens and request.preempted[-1][0] not in request.resumed:
            request.resumed[request.preempted[-1][0]] = computed

    def _on_step_item(self, record: Record) -> None:
        _, step, key, item, *_ = record
        self._engine(key).encoded.setdefault(step, []).append(item)
        self._encoder_items[step] += 1

    def _on_blocked(self, record: Record) -> None:
        _, key, step, reason, *_ = record
        self._engine(key).blocked.append((step, _REASONS.get(reason)))

    def _on_preempted(self, record: Record) -> None:
        self._engine(record[1]).preempted.append((record[2], record[3]))

    def _on_step_done(self, record: Record) -> None:
        time, number, low, high, *_ = record
        self._done[number] = (time, time - _duration(low, high))

    def _on_first_token(self, record: Record) -> None:
        self._engine(record[1]).first_token = record[2]

    def _on_freed(self, record: Record) -> None:
        time, key, status, output_tokens, *_ = record
        request = self._engine(key)
        request.freed = time
        request.finish_reason = self._text(status)
        request.facts["output_tokens"] = output_tokens

    def _on_pause(self, record: Record) -> None:
        self.pauses.append((record[0], bool(record[2])))

    # --- worker and process ---

    def _on_step_begin(self, record: Record) -> None:
        self.worker_steps[record[2], record[1]].begin = record[0]

    def _on_encode_begin(self, record: Record) -> None:
        step = self.worker_steps[record[2], record[1]]
        step.encoder_begin = record[0]
        step.encoder_deferred = bool(record[3])

    def _on_encode_end(self, record: Record) -> None:
        self.worker_steps[record[2], record[1]].encoder_end = record[0]

    def _on_encode_device(self, record: Record) -> None:
        _, number, engine, low, high, *_ = record
        self.worker_steps[engine, number].encoder_device_ns = _duration(low, high)

    def _on_process_fact(self, record: Record) -> None:
        text = self._text(record[3])
        if text is not None:
            self.facts[_PROCESS_FACTS[Fact(record[2])]] = text

    def _on_own_cost(self, record: Record) -> None:
        _, _, steps, low, high, busy_us, *_ = record
        if high > _COST_HIGH:
            raise ValueError(high)
        self.cost.steps += steps
        self.cost.cost_ns += low | high << 32
        self.cost.busy_ns += busy_us * 1000

    def _on_hook_off(self, record: Record) -> None:
        name = self._text(record[3])
        if name is not None and name not in self.hooks_off:
            self.hooks_off.append(name)


_HANDLERS: Final[dict[int, Callable[[ProcessRecords, Record], None]]] = {
    int(kind): getattr(ProcessRecords, f"_on_{kind.name.lower()}")
    for kind in RecordKind
    if hasattr(ProcessRecords, f"_on_{kind.name.lower()}")
}


def _duration(low: int, high: int) -> int:
    """Put the halves of a duration together.

    Raises:
        ValueError: No host has been up for so long.
    """
    duration = low | high << 32
    if duration >= _AGE_NS:
        raise ValueError(duration)
    return duration


def _is_impossible(request: RequestTimeline) -> bool:
    """Whether something of a request was recorded as earlier than its receipt."""
    times = (request.body_complete, request.first_useful, request.last_byte, request.ended)
    items = ((item.begin, item.ready) for item in request.items.values())
    return any(time is not None and time < request.received for time in (*times, *chain(*items)))


def _read_texts(segments: Iterable[SegmentData]) -> dict[int, str]:
    parts: dict[int, dict[int, bytes]] = defaultdict(dict)
    for data in segments:
        for number, part, length, content in data.texts():
            parts[number][part] = content[:length]
    return {
        number: b"".join(found[part] for part in sorted(found)).decode("utf-8", "replace")
        for number, found in parts.items()
        if max(found) < len(found)  # else the begin of it is gone
    }


def is_gone(header: SegmentHeader) -> bool:
    """Whether a process has certainly ended; of another host, container or boot that cannot be told."""
    is_here = (header.clock, header.pid_namespace) == (clock_domain(), pid_namespace())
    return is_here and header.pid > 0 and has_died(header.pid)


def has_died(pid: int) -> bool:
    """Whether no process of this container has that id, or only one that has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and nobody has asked yet how, as in a container without an init."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["Z"]
