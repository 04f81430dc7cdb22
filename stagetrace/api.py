"""The recording API: what a Python server calls to have its requests' stages recorded.

Without :func:`start`, or without a folder to record into, every call does
nothing.  No call raises because of what it is given, and no exception of the
server is touched: what cannot be followed is counted and told in the report.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from contextvars import Token
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, TypedDict, TypeGuard, TypeVar, Unpack, get_args

from stagetrace.attributes import CARRIER_KEY, SAMPLE_VARIABLE
from stagetrace.clock import monotonic_ns
from stagetrace.decorate import within
from stagetrace.inbound import Headers, digest, known_headers, record_headers, scheme_and_host, trace_parent
from stagetrace.recorder import Recorder
from stagetrace.recording import (
    LEFT_OUT,
    Traced,
    current,
    leave,
    open_recorder,
    process_recorder,
    request_numbers,
)
from stagetrace.records import ITEM_NUMBER_ENDS, NONE, Fact, ItemFact, Misuse, RecordKind, StageCode
from stagetrace.sampling import Sampler
from stagetrace.settings import parse_sampler, setting
from stagetrace.stages import Outcome, Stage

_log = logging.getLogger("stagetrace")

WorkStage = Literal[
    Stage.RECEIVE,
    Stage.RETRIEVAL,
    Stage.MEDIA_DECODE,
    Stage.PREPROCESS,
    Stage.HANDOFF,
    Stage.ENCODE,
    Stage.EMBEDDING_TRANSFER,
    Stage.PREFILL,
    Stage.KV_TRANSFER,
    Stage.DECODE,
    Stage.RESPOND,
]
"""Stages that a server can be in: work and transfers."""

WaitedStage = Literal[
    Stage.MEDIA_DECODE,
    Stage.PREPROCESS,
    Stage.ENCODE,
    Stage.EMBEDDING_TRANSFER,
    Stage.PREFILL,
    Stage.KV_TRANSFER,
    Stage.DECODE,
]
"""Stages that can be waited for: those that have a ``.wait``."""

ToldOutcome = Literal[Outcome.OK, Outcome.ERROR, Outcome.CANCELLED]
"""Outcomes that a server can tell of itself."""


class Facts(TypedDict, total=False):
    """Facts of a request, by column of the dataset's ``requests`` table; None is unknown."""

    external_id: str | None
    model: str | None
    phase: str | None
    label: str | None
    arm: str | None
    intended_unix_ns: int | None
    max_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    media_items: int | None
    status: int | None
    stream: bool | None


class ItemFacts(TypedDict, total=False):
    """Facts of a media item, by column of the dataset's ``media`` table; None is unknown.

    Of ``url`` only scheme and host are kept, of ``hash`` (any identifier of the content) a digest.
    """

    modality: str | None
    format: str | None
    bytes: int | None
    width: int | None
    height: int | None
    tokens: int | None
    url: str | None
    hash: str | None
    fetch_attempts: int | None
    media_cache: Literal["hit", "miss"] | None
    processor_cache: Literal["hit", "miss"] | None
    encoder_cache: Literal["hit", "miss"] | None


_Function = TypeVar("_Function", bound=Callable[..., Any])

_U32: Final = 0xFFFFFFFF
_NUMBER_END: Final = 1 << 62
_NO_CODE: Final = 0
_CARRIER_KEYS: Final = frozenset({CARRIER_KEY.encode()})
_ROLE: Final = re.compile(r"[a-z0-9_]{1,32}")
_CARRIED: Final = re.compile(r"[0-9a-f]{1,32}-[0-9]{1,10}")

_WORK: Final = {stage: int(StageCode[stage.name]) for stage in get_args(WorkStage)}
_WAIT: Final = {stage: int(StageCode[f"{stage.name}_WAIT"]) for stage in get_args(WaitedStage)}
_TEXTS: Final = {
    "external_id": Fact.EXTERNAL_ID,
    "model": Fact.MODEL,
    "phase": Fact.PHASE,
    "label": Fact.LABEL,
    "arm": Fact.ARM,
    "finish_reason": Fact.FINISH_REASON,
}
_NUMBERS: Final = {
    "intended_unix_ns": Fact.INTENDED_UNIX_NS,
    "max_tokens": Fact.MAX_TOKENS,
    "prompt_tokens": Fact.PROMPT_TOKENS,
    "cached_tokens": Fact.CACHED_TOKENS,
    "output_tokens": Fact.OUTPUT_TOKENS,
    "media_items": Fact.MEDIA_ITEMS,
    "status": Fact.STATUS,
    "stream": Fact.STREAM,
}
_ITEM_TEXTS: Final = {
    "modality": ItemFact.MODALITY,
    "format": ItemFact.FORMAT,
    "media_cache": ItemFact.MEDIA_CACHE,
    "processor_cache": ItemFact.PROCESSOR_CACHE,
    "encoder_cache": ItemFact.ENCODER_CACHE,
}
_ITEM_NUMBERS: Final = {
    "bytes": ItemFact.BYTES,
    "width": ItemFact.WIDTH,
    "height": ItemFact.HEIGHT,
    "tokens": ItemFact.TOKENS,
    "fetch_attempts": ItemFact.FETCH_ATTEMPTS,
}

_RECEIVED = int(RecordKind.RECEIVED)
_NOT_SAMPLED = int(RecordKind.NOT_SAMPLED)
_FIRST_USEFUL = int(RecordKind.FIRST_USEFUL)
_LAST_BYTE = int(RecordKind.LAST_BYTE)
_DISCONNECTED = int(RecordKind.DISCONNECTED)
_ENDED = int(RecordKind.ENDED)
_FACT_NUMBER = int(RecordKind.FACT_NUMBER)
_FACT_TEXT = int(RecordKind.FACT_TEXT)
_STAGE_BEGIN = int(RecordKind.STAGE_BEGIN)
_STAGE_END = int(RecordKind.STAGE_END)
_ITEM_FACT = int(RecordKind.ITEM_FACT)
_RESUMED = int(RecordKind.RESUMED)
_MISUSED = int(RecordKind.MISUSED)


class _Started:
    """What was asked for: which requests to record (None is all), and the process whose service is told."""

    sampler: Sampler | None = None
    process: str | None = None


def start(
    spool: str | os.PathLike[str] | None = None, service: str | None = None, role: str | None = None
) -> None:
    """Begin to record in this process; a second call changes nothing.

    Settings are those of the vLLM plug-in: ``STAGETRACE_SPOOL_MAX_BYTES`` and
    ``STAGETRACE_SAMPLE``.  A forked process goes on by itself; any other calls
    this too.

    Args:
        spool: Folder to record into, shared by all processes of a service; None takes the one that
            ``STAGETRACE_SPOOL`` names, and without it nothing is recorded.
        service: Name of the service, told of the process.
        role: What the process does: ``api`` (as without it), ``worker``, or another lower-case word.
    """
    try:
        recorder = open_recorder(spool)
        if recorder is None:
            return
        if recorder.role is None:
            recorder.role = role if role is not None and _ROLE.fullmatch(role) else "api"
        sampler = setting(SAMPLE_VARIABLE, parse_sampler, Sampler())
        _Started.sampler = None if sampler.takes_all else sampler
        if service is not None and _Started.process != recorder.process:
            _Started.process = recorder.process
            announce = partial(recorder.announce, RecordKind.PROCESS_FACT, Fact.SERVICE, str(service))
            announce()
            # The recorder of a forked process begins anew.
            os.register_at_fork(after_in_child=announce)
    except Exception as error:  # noqa: BLE001 - nothing of ours may reach the host
        _log.warning("stagetrace: could not be started as asked: %s", error)


class _Block:
    """A block of code that something is recorded of."""

    __slots__ = ()

    def __enter__(self) -> None:
        raise NotImplementedError

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.__exit__(error, value, where)


# --- requests --------------------------------------------------------------------------------------


class request(_Block):  # noqa: N801 - used as a function
    """Record one request: ``with request(headers): ...``, or ``async with``.

    It is received where the block begins and ends where the block ends, with
    its last byte.  An exception that leaves the block makes it an error with
    the name of the exception's class as code; when it was cancelled (as a task
    or a generator is) the request is cancelled.

    Args:
        headers: Headers of the request, a mapping or pairs of bytes: ``traceparent`` and the
            ``stagetrace.`` members of ``baggage`` are read, all else is left alone.
        facts: What is known of it, see :class:`Facts`.
    """

    __slots__ = ("_facts", "_headers", "_token", "_traced")

    def __init__(self, headers: Headers | None = None, facts: Facts | None = None) -> None:
        self._headers = headers
        self._facts = facts
        self._traced: Traced | None = None
        self._token: Token[Traced | None] | None = None

    def __enter__(self) -> None:
        recorder = process_recorder()
        if recorder is None:
            return
        try:
            self._traced = traced = receive(recorder, self._headers)
            self._token = current.set(traced)
            if self._facts:
                _record_facts(traced, self._facts)
        except Exception:  # noqa: BLE001 - nothing of ours may reach the host
            recorder.fault()

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        traced, token = self._traced, self._token
        if traced is None or token is None:
            return
        self._traced = self._token = None
        leave(token, traced)
        now = monotonic_ns()
        if error is None and traced.recorder is not None:
            traced.recorder.record_at(now, _LAST_BYTE, traced.number)
        end(traced, error, now)


def receive(recorder: Recorder, headers: Headers | None) -> Traced:
    """Record that a request was received now, or that sampling leaves it out."""
    now = monotonic_ns()
    recorder.look(now)
    try:
        known = known_headers(headers) if headers else []
    except Exception:  # noqa: BLE001 - whatever was given for headers
        known = []
        recorder.record(_MISUSED, 0, Misuse.UNKNOWN_HEADERS)
    number = next(request_numbers)
    if _Started.sampler is not None and not _Started.sampler.takes(trace_parent(known)):
        recorder.record_at(now, _NOT_SAMPLED, number)
        return LEFT_OUT
    recorder.record_at(now, _RECEIVED, number)
    record_headers(recorder, number, known)
    return Traced(recorder, number)


def end(traced: Traced, error: type[BaseException] | None, now: int) -> None:
    """Record that a request ended at a time, by an exception of a class or without one."""
    recorder = traced.recorder
    if recorder is None:
        return
    traced.over = True
    if error is not None and is_cancellation(error):
        recorder.record_at(now, _DISCONNECTED, traced.number)
    elif error is not None:
        name = recorder.intern(error.__name__)
        recorder.record_at(now, _FACT_TEXT, traced.number, Fact.ERROR, name)
    recorder.record_at(now, _ENDED, traced.number)


def is_cancellation(error: type[BaseException]) -> bool:
    """Whether an exception cancels a task or a generator: these are no errors by inheritance."""
    return not issubclass(error, Exception | KeyboardInterrupt | SystemExit)


def first_output(tokens_before: int = 0) -> None:
    """Say that the first useful byte of the answer was handed to the transport; only the first call counts.

    Without it the request has no time to first output in reports.

    Args:
        tokens_before: Tokens that had to be decoded before it and made no useful output, each a ``DECODE``
            stage.  All else that is decoded before it is for later output.
    """
    traced = _current()
    if not traced.began_output:
        traced.began_output = True
        known = isinstance(tokens_before, int) and 0 <= tokens_before < NONE
        traced.record(_FIRST_USEFUL, traced.number, tokens_before if known else NONE)


def finish(
    outcome: ToldOutcome | None = None,
    *,
    code: str | None = None,
    finish_reason: str | None = None,
    **facts: Unpack[Facts],
) -> None:
    """Say how the request ends, where no exception says so, and what is known of it by now.

    Args:
        outcome: How it ends; None is an error with a code, and otherwise what the block's end says.
        code: Short code of the error, never a text that may hold what a client sent.
        finish_reason: Why the answer ended: ``stop``, ``length`` ...
        facts: See :class:`Facts`.
    """
    traced = _current()
    if traced.recorder is None:
        return
    try:
        _record_outcome(traced, traced.recorder, outcome, code)
        told: Mapping[str, object] = {**facts, "finish_reason": finish_reason}
        _record_facts(traced, told)
    except Exception:  # noqa: BLE001 - nothing of ours may reach the host
        traced.recorder.fault()


def _record_outcome(traced: Traced, recorder: Recorder, outcome: object, code: str | None) -> None:
    told = Outcome.ERROR if outcome is None and code is not None else outcome
    if told is None:
        return
    if told not in get_args(ToldOutcome) or traced.origin is not None or (code and told != Outcome.ERROR):
        _misuse(Misuse.UNKNOWN_OUTCOME)
    elif told == Outcome.ERROR:
        recorder.record(_FACT_TEXT, traced.number, Fact.ERROR, recorder.intern(str(code or "error")))
    elif told == Outcome.CANCELLED:
        recorder.record(_DISCONNECTED, traced.number)


def _record_facts(traced: Traced, facts: Mapping[str, object]) -> None:
    recorder = traced.recorder
    if recorder is None:
        return
    if not isinstance(facts, Mapping):
        _misuse(Misuse.UNKNOWN_FACT)
        return
    for name, value in facts.items():
        if value is None:
            continue
        if name in _TEXTS and isinstance(value, str):
            fact = _TEXTS[name]
            text = recorder.define(value) if fact is Fact.EXTERNAL_ID else recorder.intern(value)
            traced.record(_FACT_TEXT, traced.number, fact, text)
        elif name in _NUMBERS and _is_number(value, _NUMBER_END):
            traced.record(_FACT_NUMBER, traced.number, _NUMBERS[name], value & _U32, value >> 32)
        else:
            _misuse(Misuse.UNKNOWN_FACT)


def facts(**known: Unpack[Facts]) -> None:
    """Tell facts of the current request, as soon as they are known.

    Args:
        known: See :class:`Facts`.
    """
    traced = _current()
    if traced.recorder is None:
        return
    try:
        _record_facts(traced, known)
    except Exception:  # noqa: BLE001 - nothing of ours may reach the host
        traced.recorder.fault()


def item(index: int, **facts: Unpack[ItemFacts]) -> None:
    """Tell facts of a media item of the current request.

    Args:
        index: Its place in the request, from 0, as in ``stage(..., item=index)``.
        facts: See :class:`ItemFacts`.
    """
    traced = _current()
    if traced.recorder is None:
        return
    try:
        place = _place(index)
        if place != NONE:
            _record_item(traced, traced.recorder, place, facts)
    except Exception:  # noqa: BLE001 - nothing of ours may reach the host
        traced.recorder.fault()


def _record_item(traced: Traced, recorder: Recorder, index: int, facts: Mapping[str, object]) -> None:
    for name, value in facts.items():
        if value is None:
            continue
        if name == "url" and isinstance(value, str):
            scheme, host = scheme_and_host(value)
            _record_item_text(traced, recorder, index, ItemFact.SCHEME, scheme)
            _record_item_text(traced, recorder, index, ItemFact.HOST, host)
        elif name == "hash" and isinstance(value, str):
            traced.record(_ITEM_FACT, traced.number, index, ItemFact.HASH, recorder.define(digest(value)))
        elif name in _ITEM_TEXTS and isinstance(value, str):
            _record_item_text(traced, recorder, index, _ITEM_TEXTS[name], value)
        elif name in _ITEM_NUMBERS and _is_number(value, ITEM_NUMBER_ENDS[_ITEM_NUMBERS[name]]):
            traced.record(_ITEM_FACT, traced.number, index, _ITEM_NUMBERS[name], value & _U32, value >> 32)
        else:
            _misuse(Misuse.UNKNOWN_FACT)


def _record_item_text(traced: Traced, recorder: Recorder, index: int, fact: ItemFact, text: str) -> None:
    if text:
        traced.record(_ITEM_FACT, traced.number, index, fact, recorder.intern(text))


# --- stages ----------------------------------------------------------------------------------------


class stage(_Block):  # noqa: N801 - used as a function
    """Record that the current request is in a stage: ``with stage(Stage.ENCODE): ...``, or ``async with``.

    Also a decorator of functions, coroutine functions, generators and
    asynchronous generators; a generator is in the stage from its first item
    until it ends.  Make a new one for each block.

    Args:
        stage: Work or a transfer.
        item: The media item it is for, by its place in the request; items load beside each other.
    """

    __slots__ = ("_code", "_item", "_part", "_traced")

    def __init__(self, stage: WorkStage, item: int | None = None) -> None:
        try:
            self._code = _WORK[stage]
        except (KeyError, TypeError):
            self._code = _NO_CODE
        self._item = NONE if item is None else _place(item)

    def __enter__(self) -> None:
        self._traced = traced = current.get()
        if traced is None or traced.over or not self._code:
            self._traced = None
            _count_in_vain(self._code)
            return
        self._part = part = next(traced.parts)
        traced.record(_STAGE_BEGIN, traced.number, part, self._code, self._item)

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        traced = self._traced
        if traced is not None:
            traced.record(_STAGE_END, traced.number, self._part)

    def __call__(self, function: _Function) -> _Function:
        """Record every call of a function, or what it makes, as this stage."""
        return within(self._again, function)

    def _again(self) -> stage:
        again = object.__new__(stage)
        again._code, again._item = self._code, self._item
        return again


def _count_in_vain(code: int) -> None:
    """Count a stage that cannot be recorded: nobody's, or one that there is not."""
    if process_recorder() is not None:
        _misuse(Misuse.CALL_OUTSIDE_A_REQUEST if code else Misuse.UNKNOWN_STAGE)


class Ticket:
    """A wait of a request for a stage; made by :func:`wait`.

    It knows its request, so it may be worked on in another thread or task.
    """

    __slots__ = ("_item", "_part", "_traced", "_work")

    def __init__(self, traced: Traced, waiting: int, work: int, item: int) -> None:
        self._traced = traced
        self._work = work
        self._item = item
        self._part: int | None = next(traced.parts)
        traced.record(_STAGE_BEGIN, traced.number, self._part, waiting, item)

    def work(self) -> Work:
        """End the wait where the block begins: ``with ticket.work(): ...``, or ``async with``.

        The block is the stage's work, and what is recorded in it belongs to the request, in whatever
        thread it runs.
        """
        return Work(self._traced, self._take_part, self._work, self._item)

    def cancel(self) -> None:
        """End a wait that no work follows; nothing happens when work has begun."""
        part, self._part = self._part, None
        if part is not None:
            self._traced.record(_STAGE_END, self._traced.number, part)

    def _take_part(self) -> int:
        """Return the part that waits, for the first work, and a new one for work that nothing waited for."""
        part, self._part = self._part, None
        return next(self._traced.parts) if part is None else part


class Work(_Block):
    """The work that a ticket waited for; made by :meth:`Ticket.work`."""

    __slots__ = ("_code", "_item", "_part", "_take_part", "_token", "_traced")

    def __init__(self, traced: Traced, take_part: Callable[[], int], code: int, item: int) -> None:
        self._traced = traced
        self._take_part = take_part
        self._code = code
        self._item = item

    def __enter__(self) -> None:
        traced = self._traced
        self._part = part = self._take_part()
        traced.record(_STAGE_BEGIN, traced.number, part, self._code, self._item)
        self._token = current.set(traced)

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self._traced.record(_STAGE_END, self._traced.number, self._part)
        leave(self._token, self._traced)


def wait(stage: WaitedStage, item: int | None = None) -> Ticket:
    """Record that the current request waits for a stage from now on.

    Args:
        stage: What it waits for.
        item: The media item it is for, by its place in the request.

    Returns:
        A ticket, to be worked on or cancelled.
    """
    traced = current.get()
    try:
        waiting, work = _WAIT[stage], _WORK[stage]
    except (KeyError, TypeError):
        waiting = work = _NO_CODE
    if traced is None or traced.over or not work:
        _count_in_vain(work)
        traced = LEFT_OUT
    return Ticket(traced, waiting, work, NONE if item is None else _place(item))


# --- other processes -------------------------------------------------------------------------------


def carrier() -> dict[str, str]:
    """Return what another process needs to record stages of the current request.

    It holds an id and nothing else, may travel as headers, and is empty when
    nothing of the request is recorded.
    """
    traced = current.get()
    name = "" if traced is None or traced.over else traced.request_id
    return {CARRIER_KEY: name} if name else {}


class resume(_Block):  # noqa: N801 - used as a function
    """Record stages of a request that another process received: ``with resume(carrier): ...``.

    Stages, items and facts that are recorded in the block belong to that
    request; how it ends is told where it was received.  Take carriers from
    your own processes only.

    Args:
        carrier: What :func:`carrier` returned there, or headers that hold it; an empty one is of a request
            that is not recorded.
    """

    __slots__ = ("_carrier", "_token", "_traced")

    def __init__(self, carrier: Headers) -> None:
        self._carrier = carrier
        self._traced: Traced | None = None
        self._token: Token[Traced | None] | None = None

    def __enter__(self) -> None:
        recorder = process_recorder()
        if recorder is None:
            return
        try:
            recorder.look()
            self._traced = _resumed(recorder, self._carrier)
            self._token = current.set(self._traced)
        except Exception:  # noqa: BLE001 - nothing of ours may reach the host
            recorder.fault()

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        token, self._token = self._token, None
        if token is not None:
            leave(token, self._traced)


def _resumed(recorder: Recorder, carrier: Headers) -> Traced:
    try:
        found = [value for _, value in known_headers(carrier, _CARRIER_KEYS)]
    except Exception:  # noqa: BLE001 - whatever was given for a carrier
        found = [b"-"]
    if not found:
        return LEFT_OUT
    name = found[0].decode("ascii", "replace")
    if _CARRIED.fullmatch(name) is None:
        _misuse(Misuse.UNKNOWN_CARRIER)
        return LEFT_OUT
    traced = Traced(recorder, next(request_numbers), name)
    recorder.record(_RESUMED, traced.number, recorder.define(name))
    return traced


# --- what all share --------------------------------------------------------------------------------


def _current() -> Traced:
    """Return the current request, or the one that stands for nobody's."""
    traced = current.get()
    if traced is None or traced.over:
        _misuse(Misuse.CALL_OUTSIDE_A_REQUEST)
        return LEFT_OUT
    return traced


def _is_number(value: object, end: int) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < end


def _place(index: object) -> int:
    if isinstance(index, int) and 0 <= index < NONE:
        return index
    _misuse(Misuse.UNKNOWN_ITEM)
    return NONE


def _misuse(what: Misuse) -> None:
    """Count a call that cannot be followed, if this process records."""
    recorder = process_recorder()
    if recorder is not None:
        recorder.record(_MISUSED, 0, what)
