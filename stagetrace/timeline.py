"""A request's records, joined over its processes: what ``partition`` reads.

All times are nanoseconds of the host's monotonic clock; None is unknown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

from stagetrace.gaps import NEVER
from stagetrace.records import JobKind
from stagetrace.stages import Outcome, Reason, Stage


@dataclass(slots=True)
class Job:
    """A job in a thread pool of the API server.

    Attributes:
        kind: What it does.
        item: The media item it works for, or None.
        submitted: When it was given to the pool.
        started: When a thread took it up.
        ended: When it was done, or had failed.
    """

    kind: JobKind
    item: int | None
    submitted: int
    started: int | None = None
    ended: int | None = None


@dataclass(slots=True)
class Fetch:
    """A network fetch of a media item, with its retries."""

    begin: int
    end: int | None = None
    attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Lag:
    """A stretch of time in which the event loop of an API server did not get to what was due.

    Attributes:
        process: Name of the API process.
        at: When the loop was due.
        duration: How late it was.
    """

    process: str
    at: int
    duration: int


@dataclass(slots=True)
class Item:
    """A media item of a request.

    Attributes:
        index: Its place in the request, from 0.
        begin: When its loading began.
        ready: When it was decoded, or had failed.
        fetches: Its network fetches.
        inline: Loaded where it was asked for, and not beside others in a pool: nothing of it is a wait.
        job: Number of the job that loaded it inline; None when that was the event loop.
        facts: What is known of it, by column name of the dataset's ``media`` table.
    """

    index: int
    begin: int
    ready: int | None = None
    fetches: list[Fetch] = field(default_factory=list)
    inline: bool = False
    job: int | None = None
    facts: dict[str, int | str] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """A stretch of time of which a server told itself in which stage a request was.

    Attributes:
        stage: The stage.
        begin: Since when.
        end: Until when; None when that is not recorded.
        item: The media item it is for, or None.
        process: Name of the process that recorded it.
    """

    stage: Stage
    begin: int
    end: int | None = None
    item: int | None = None
    process: str = ""


@dataclass(slots=True)
class Step:
    """One step of an engine.

    Attributes:
        number: Steps of an engine process are numbered from 1 without gaps.
        scheduled: When the scheduler began to compose it.
        done: When its output reached the scheduler, or None.
        begin: When the worker took it up, or None.
        encoder_begin: When the host began the encoder's part, or None without one.
        encoder_end: When the host ended it; None when it only launched it and the device's time is not known.
        encoder_device_ns: Time that the device took for it, or None where the host's own time counts.
        tokens: Tokens scheduled; 0 in a step that only polls.
        requests: Requests that have tokens in it.
        running: Requests that held a seat.
        waiting: Requests in the queue after scheduling.
        reason: Why those stayed out, or None.
        running_reason: Why requests with a seat have no tokens in it, or None.
        head: The engine's id of the request at the head of the queue, or None.
        encoder_items: Number of media items encoded in it.
        decodes: Requests with exactly one token in it.
        contradicted: Its members are not as many as the scheduler said.
        unseen: The worker's records of it are gone, and with them the encoder's part.
        under_way: A worker had begun it, and none after it, when the engine's records end.
    """

    number: int
    scheduled: int
    tokens: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    reason: Reason | None = None
    running_reason: Reason | None = None
    head: str | None = None
    begin: int | None = None
    done: int | None = None
    encoder_begin: int | None = None
    encoder_end: int | None = None
    encoder_device_ns: int | None = None
    encoder_items: int = 0
    decodes: int = 0
    contradicted: bool = False
    unseen: bool = False
    under_way: bool = False


class Steps:
    """The steps of one engine process, in order, with the slots that cut time.

    A step's slot reaches from the end of the step before it to its own end, so
    that the gap between two steps takes the assignment of the later one.  A
    step without tokens (a poll) ends where the next step is scheduled.  Where
    the step before is not recorded, a slot begins when its step was scheduled.

    Args:
        engine: Name of the engine's process.
        steps: Its steps, in any order.
        pauses: (time, paused) whenever the engine was paused or went on.

    Attributes:
        begins: Begin of each slot.
        ends: End of each slot, or None when it is not known.
    """

    def __init__(self, engine: str, steps: Iterable[Step], pauses: Iterable[tuple[int, bool]] = ()) -> None:
        self.engine = engine
        self._pauses = sorted(pauses)
        self.steps = sorted(steps, key=attrgetter("number"))
        self._places = {step.number: place for place, step in enumerate(self.steps)}
        self._scheduled = [step.scheduled for step in self.steps]
        self.ends = [self._end(place) for place in range(len(self.steps))]
        self.begins = [self._begin(place) for place in range(len(self.steps))]
        self._known_ends = list(accumulate((end or 0 for end in self.ends), max))
        last = len(self.steps) - 1
        if self.steps and (self.is_open(last) or self.is_under_way(last)):
            self._known_ends[-1] = NEVER

    def _end(self, place: int) -> int | None:
        step = self.steps[place]
        if step.tokens:
            return step.done
        following = self._places.get(step.number + 1)
        return None if following is None else self.steps[following].scheduled

    def _begin(self, place: int) -> int:
        step = self.steps[place]
        if step.number == 1:
            return 0
        before = self._places.get(step.number - 1)
        end = None if before is None else self.ends[before]
        return step.scheduled if end is None else end

    def is_open(self, place: int) -> bool:
        """Whether a step is a poll that none has followed yet: what it found still holds."""
        return place == len(self.steps) - 1 and not self.steps[place].tokens

    def is_under_way(self, place: int) -> bool:
        """Whether a step was being run when the records end."""
        return place == len(self.steps) - 1 and self.steps[place].under_way

    def encoder_part(self, place: int) -> tuple[int, int] | None:
        """Return begin and end of the encoder's part of a step, None when it has none or it is not known.

        The host only launches the encoder on a device, maybe while the step before still runs there.
        The part then begins with the slot, but not before its launch, lasts as long as the device took,
        and ends with the slot at the latest.
        """
        part, end = self._encoder_part(place), self.ends[place]
        return part if part is None or end is None else (min(part[0], end), min(part[1], end))

    def encoder_parts_outside(self) -> int:
        """Return the number of steps whose encoder's part does not lie within their slot."""
        return sum(map(self._is_outside, range(len(self.steps))))

    def _is_outside(self, place: int) -> bool:
        part, end = self._encoder_part(place), self.ends[place]
        return part is not None and end is not None and not self.begins[place] <= part[1] <= end

    def _encoder_part(self, place: int) -> tuple[int, int] | None:
        step = self.steps[place]
        if step.encoder_begin is None:
            return None
        if step.encoder_device_ns is not None:
            begin = max(step.encoder_begin, self.begins[place])
            return begin, begin + step.encoder_device_ns
        return None if step.encoder_end is None else (step.encoder_begin, step.encoder_end)

    def was_paused(self, begin: int, end: int) -> bool:
        """Whether the engine was paused at any time in ``[begin, end)``."""
        before = bisect_left(self._pauses, (begin, True))
        if before and self._pauses[before - 1][1]:
            return True
        return any(paused for time, paused in self._pauses[before:] if time < end)

    def place(self, number: int) -> int | None:
        """Return the place of a step by its number, or None when it is not recorded."""
        return self._places.get(number)

    def place_from(self, number: int) -> int:
        """Return the place of the first step with that number or a later one."""
        return bisect_left(self.steps, number, key=attrgetter("number"))

    def scheduled_from(self, time: int) -> int:
        """Return the place of the first step scheduled at or after a time."""
        return bisect_left(self._scheduled, time)

    def ending_after(self, time: int) -> int:
        """Return the place of the first slot that ends after a time."""
        return bisect_right(self._known_ends, time)


@dataclass(slots=True)
class EngineRequest:
    """A request as one engine saw it.

    Attributes:
        identifier: The engine's id of it.
        index: Which of the answers it makes, when there are several prompts or ``n > 1``.
        prompt: Which of the prompts it is for.
        joined: When the API server gave it to the engine.
        steps: The engine's steps.
        held: When the engine's input thread held it.
        added: When the scheduler held it.
        members: (step, tokens) whenever the number of its tokens in a step changed; 0 is out.
        blocked: (step, reason or None) whenever the reason changed that kept this request,
            and not the whole queue, out of steps.
        encoded: The media items encoded in a step, by step.
        preempted: (step, tokens so far) whenever it lost its seat.
        resumed: Tokens that were still known when it came back, by the step in which it had lost its seat.
        first_token: The step that made its first token, or the only output of a pooling request.
        output_first: When the API server saw its first output.
        output_finished: When the API server saw its last output.
        freed: When the scheduler let go of it.
        finish_reason: As the API server or the scheduler named it.
        aborted: The API server gave it up.
        facts: What is known of it, by column name of the dataset's ``requests`` table.
    """

    identifier: str
    index: int = 0
    prompt: int = 0
    joined: int | None = None
    steps: Steps | None = None
    held: int | None = None
    added: int | None = None
    members: list[tuple[int, int]] = field(default_factory=list)
    blocked: list[tuple[int, Reason | None]] = field(default_factory=list)
    encoded: dict[int, list[int]] = field(default_factory=dict)
    preempted: list[tuple[int, int]] = field(default_factory=list)
    resumed: dict[int, int] = field(default_factory=dict)
    first_token: int | None = None
    output_first: int | None = None
    output_finished: int | None = None
    freed: int | None = None
    finish_reason: str | None = None
    aborted: bool = False
    facts: dict[str, int] = field(default_factory=dict)

    def spans(self, steps: Steps) -> list[tuple[int, int]]:
        """Return the places of steps, first and last, of each stretch in which the request has tokens."""
        freed = len(steps.steps) if self.freed is None else steps.scheduled_from(self.freed)
        changes = sorted(self.members)
        found: list[tuple[int, int]] = []
        opened: int | None = None
        for number, tokens in changes:
            place = steps.place_from(number)
            if tokens and opened is None:
                opened = place
            elif not tokens and opened is not None:
                found.append((opened, place - 1))
                opened = None
        if opened is not None:
            found.append((opened, freed - 1))
        return [(first, last) for first, last in found if first <= last]


@dataclass(slots=True)
class RequestTimeline:
    """All that is recorded of one request.

    Attributes:
        request_id: Unique name: the API process and the request's number in it.
        instance: Name of the API process.
        received: When the application was called.
        body_complete: When the last byte of the body was there.
        first_useful: When the first useful byte had been handed to the transport.
        tokens_before: Tokens before it that made nothing useful; None when all comes at once.
        choice: Which of several answers it belongs to.
        last_byte: When the last byte had been handed to the transport.
        ended: When the application returned, or learned that the client was gone.
        outcome: How it ended; None while it is open.
        jobs: Its jobs, in any order.
        items: Its media items, by index.
        engine_requests: The engine's requests made for it; more than one for several prompts and ``n > 1``,
            and one after the other where an answer takes several rounds (beam search, tools).
        parts: What the server told of its stages through the recording API, in any order.
        facts: What is known of it, by column name of the dataset's ``requests`` table.
    """

    request_id: str
    instance: str
    received: int
    body_complete: int | None = None
    first_useful: int | None = None
    tokens_before: int | None = None
    choice: int = 0
    last_byte: int | None = None
    ended: int | None = None
    outcome: Outcome | None = None
    jobs: list[Job] = field(default_factory=list)
    items: dict[int, Item] = field(default_factory=dict)
    engine_requests: list[EngineRequest] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    facts: dict[str, int | str | bool] = field(default_factory=dict)

    @property
    def is_hooked(self) -> bool:
        """Whether the hooks of a server saw what became of it, so that its own code need not tell."""
        return bool(self.jobs or self.engine_requests)
