"""The records of one process, sorted into what they are about."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

from stagetrace.clock import clock_domain, pid_namespace
from stagetrace.records import NONE, RECORD, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.segment import Record, SegmentData, SegmentHeader
from stagetrace.stages import Outcome, Reason
from stagetrace.timeline import EngineRequest, Fetch, Item, Job, Lag, RequestTimeline, Step

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
}
_NUMBER_COLUMNS: Final = {Fact.INTENDED_UNIX_NS: "intended_unix_ns", Fact.MAX_TOKENS: "max_tokens"}
_PROCESS_FACTS: Final = {Fact.MODEL: "model"}
_CANCELLED: Final = 1
_AGE_NS: Final = 1 << 61
"""No host has been up for so long; later times are damage, and their differences would not fit."""


@dataclass(slots=True)
class WorkerStep:
    """A step as a worker ran it."""

    begin: int | None = None
    encoder_begin: int | None = None
    encoder_end: int | None = None


@dataclass(slots=True)
class Media:
    """A media item as the engine knows it: identifier, embeddings, last prompt position."""

    identifier: str | None
    embeddings: int
    last_position: int


class ProcessRecords:
    """The records of one process, sorted into what they are about.

    Args:
        segments: The segments of the process.
        set_aside: Counter of what could not be used, by reason; added to.
    """

    def __init__(self, segments: Sequence[SegmentData], set_aside: Counter[str]) -> None:
        segments = sorted(segments, key=lambda data: data.header.sequence)
        self.header = segments[-1].header
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
        self._jobs: dict[tuple[int, int], Job] = {}
        self._cancelled: set[int] = set()
        self._raised: set[int] = set()
        self._heads: list[tuple[int, int]] = []
        self._done: dict[int, tuple[int, int]] = {}
        self._encoder_items: Counter[int] = Counter()
        self._set_aside = set_aside
        self._texts = _read_texts(segments)
        self._read(segments)
        self._finish()

    def _text(self, number: int) -> str | None:
        return self._texts.get(number)

    def _read(self, segments: Iterable[SegmentData]) -> None:
        for data in segments:
            self.records += len(data.body) // RECORD.size
            # By time, because a record of one thread may stand before an earlier one of another.
            records = (r for r in data if r[6] != RecordKind.DEFINE and self._is_of_this_age(r))
            for record in sorted(records, key=itemgetter(0)):
                handler = _HANDLERS.get(record[6])
                if handler is None:
                    self._set_aside["unknown_record"] += 1
                    continue
                try:
                    handler(self, record)
                except KeyError:
                    self._set_aside["record_without_beginning"] += 1
                except (ValueError, IndexError):
                    self._set_aside["unknown_value"] += 1

    def _is_of_this_age(self, record: Record) -> bool:
        if 0 <= record[0] < _AGE_NS:
            return True
        self._set_aside["impossible_time"] += 1
        return False

    def _finish(self) -> None:
        for number, request in self.requests.items():
            request.outcome = self._outcome(number, request)
        self._finish_steps()

    def _finish_steps(self) -> None:
        """Complete the steps that were not recorded because they were composed like the one before."""
        heads = dict(self._heads)
        head: str | None = None
        for number in sorted(self.steps.keys() | self._done.keys()):
            done, scheduled = self._done.get(number, (None, 0))
            step = self.steps.get(number)
            if step is None:
                before = self.steps.get(number - 1)
                if before is None:
                    self._set_aside["step_without_beginning"] += 1
                    continue
                step = self.steps[number] = replace(before, number=number, scheduled=scheduled)
            step.done = done
            step.encoder_items = self._encoder_items[number]
            if number in heads:
                found = self.engine_requests.get(heads[number])
                head = None if found is None else found.identifier
            step.head = head if step.waiting else None

    def _outcome(self, number: int, request: RequestTimeline) -> Outcome | None:
        if request.ended is None:
            return Outcome.LOST if _is_gone(self.header) else None
        status = request.facts.get("status")
        if "error_code" not in request.facts:
            if isinstance(status, int) and status >= 400:  # noqa: PLR2004 - HTTP
                request.facts["error_code"] = f"http_{status}"
            elif number in self._raised:
                request.facts["error_code"] = "application_error"
        if number in self._cancelled:
            return Outcome.CANCELLED
        if "error_code" in request.facts:
            return Outcome.ERROR
        if request.last_byte is None:
            request.facts["error_code"] = "no_response"
            return Outcome.ERROR
        return Outcome.OK

    # --- API server ---

    def _on_received(self, record: Record) -> None:
        time, key = record[0], record[1]
        self.received += 1
        name = f"{self.header.process}-{key}"
        self.requests[key] = RequestTimeline(name, self.header.process, received=time)

    def _on_body_complete(self, record: Record) -> None:
        self.requests[record[1]].body_complete = record[0]

    def _on_response_started(self, record: Record) -> None:
        facts = self.requests[record[1]].facts
        facts["status"] = record[2]
        facts["stream"] = bool(record[3])

    def _on_first_useful(self, record: Record) -> None:
        request = self.requests[record[1]]
        request.first_useful = record[0]
        request.tokens_before = None if record[2] == NONE else record[2]
        request.choice = record[3]

    def _on_last_byte(self, record: Record) -> None:
        self.requests[record[1]].last_byte = record[0]

    def _on_disconnected(self, record: Record) -> None:
        if self.requests[record[1]].last_byte is None:
            self._cancelled.add(record[1])

    def _on_ended(self, record: Record) -> None:
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
        self.requests[key].facts[_NUMBER_COLUMNS[Fact(fact)]] = value

    def _on_fact_text(self, record: Record) -> None:
        _, key, fact, number, *_ = record
        text = self._text(number)
        if text is not None:
            self.requests[key].facts[_TEXT_COLUMNS[Fact(fact)]] = text

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

    def _on_loop_lag(self, record: Record) -> None:
        time, _, low, high, *_ = record
        self.lags.append(Lag(self.header.process, time, low | high << 32))

    def _on_engine_request(self, record: Record) -> None:
        request = self.requests[record[1]]
        identifier = self._text(record[2])
        if identifier is None:
            self._set_aside["text_not_recorded"] += 1
            return
        self.joins.append((request, EngineRequest(identifier, joined=record[0], index=record[3])))

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

    # --- engine ---

    def _on_held(self, record: Record) -> None:
        time, key, prompt_tokens, _, media_items, *_ = record
        identifier = self._text(key)
        if identifier is None:
            self._set_aside["text_not_recorded"] += 1
            return
        request = self.engine_requests[key] = EngineRequest(identifier, held=time)
        request.facts = {"prompt_tokens": prompt_tokens, "media_items": media_items}

    def _on_engine_item(self, record: Record) -> None:
        _, key, index, identifier, embeddings, position, *_ = record
        self.engine_media[key][index] = Media(self._text(identifier), embeddings, position)

    def _on_added(self, record: Record) -> None:
        self.engine_requests[record[1]].added = record[0]

    def _on_step(self, record: Record) -> None:
        time, number, tokens, packed, running, waiting, *_ = record
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
        request = self.engine_requests[key]
        if tokens and "cached_tokens" not in request.facts:
            request.facts["cached_tokens"] = computed
        request.members.append((step, tokens))
        if request.preempted and tokens and request.preempted[-1][0] not in request.resumed:
            request.resumed[request.preempted[-1][0]] = computed

    def _on_step_item(self, record: Record) -> None:
        _, step, key, item, *_ = record
        self.engine_requests[key].encoded.setdefault(step, []).append(item)
        self._encoder_items[step] += 1

    def _on_blocked(self, record: Record) -> None:
        _, key, step, reason, *_ = record
        self.engine_requests[key].blocked.append((step, _REASONS.get(reason)))

    def _on_preempted(self, record: Record) -> None:
        self.engine_requests[record[1]].preempted.append((record[2], record[3]))

    def _on_step_done(self, record: Record) -> None:
        time, number, low, high, *_ = record
        self._done[number] = (time, time - (low | high << 32))

    def _on_first_token(self, record: Record) -> None:
        self.engine_requests[record[1]].first_token = record[2]

    def _on_freed(self, record: Record) -> None:
        time, key, status, output_tokens, *_ = record
        request = self.engine_requests[key]
        request.freed = time
        request.finish_reason = self._text(status)
        request.facts["output_tokens"] = output_tokens

    def _on_pause(self, record: Record) -> None:
        self.pauses.append((record[0], bool(record[2])))

    # --- worker and process ---

    def _on_step_begin(self, record: Record) -> None:
        self.worker_steps[record[2], record[1]].begin = record[0]

    def _on_encode_begin(self, record: Record) -> None:
        self.worker_steps[record[2], record[1]].encoder_begin = record[0]

    def _on_encode_end(self, record: Record) -> None:
        self.worker_steps[record[2], record[1]].encoder_end = record[0]

    def _on_process_fact(self, record: Record) -> None:
        text = self._text(record[3])
        if text is not None:
            self.facts[_PROCESS_FACTS[Fact(record[2])]] = text

    def _on_hook_off(self, record: Record) -> None:
        name = self._text(record[3])
        if name is not None and name not in self.hooks_off:
            self.hooks_off.append(name)


_HANDLERS: Final[dict[int, Callable[[ProcessRecords, Record], None]]] = {
    int(kind): getattr(ProcessRecords, f"_on_{kind.name.lower()}")
    for kind in RecordKind
    if hasattr(ProcessRecords, f"_on_{kind.name.lower()}")
}


def _read_texts(segments: Iterable[SegmentData]) -> dict[int, str]:
    parts: dict[int, dict[int, bytes]] = defaultdict(dict)
    for data in segments:
        for number, part, length, content in data.texts():
            parts[number][part] = content[:length]
    return {
        number: b"".join(found[part] for part in sorted(found)).decode("utf-8", "replace")
        for number, found in parts.items()
    }


def _is_gone(header: SegmentHeader) -> bool:
    """Whether a process has certainly ended; of another host, container or boot that cannot be told."""
    if (header.clock, header.pid_namespace) != (clock_domain(), pid_namespace()) or header.pid <= 0:
        return False
    try:
        os.kill(header.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
