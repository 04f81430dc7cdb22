"""A server in virtual time: what its processes would record while it serves, in the order in which they write it.

Requests arrive, wait for a seat, have images encoded, are answered in steps; some clients leave, and some
requests take long.  Steps that are composed like the one before are not recorded, as in a real engine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from contextlib import contextmanager

import pytest

from stagetrace import Recorder
from stagetrace.clock import ClockPair
from stagetrace.records import NONE, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.testing import MS

K = RecordKind
SEATS = 4


class _Request:
    def __init__(self, number, tokens, image, leaves):
        self.number, self.left, self.image, self.leaves = number, tokens, image, leaves
        self.key = None
        self.generated = 0
        self.aborted = False


class Server:
    """An API server, an engine and a worker that record in virtual time.

    Args:
        folder: The spool.
        segment_bytes: Size of a segment.
        seed: Of the traffic.
        spool_bytes: Size that the spool may reach.

    Attributes:
        now: The virtual monotonic clock, nanoseconds.
        sent: Requests so far.
    """

    def __init__(self, folder, segment_bytes, seed=0, spool_bytes=1 << 30):
        self.now, self.sent = 1000 * MS, 0
        self._random = random.Random(seed)
        self.api, self.engine, self.worker = (Recorder(folder, segment_bytes, spool_bytes) for _ in range(3))
        self.engine.role = "engine"
        self._events, self._order = [], itertools.count()
        self._waiting, self._running, self._step, self._busy = [], [], 0, False
        self._composition, self._members, self._head, self._epoch = None, {}, None, None

    @contextmanager
    def clocks(self):
        """Let recorders and readers read the virtual clock."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stagetrace.segment.read_pair", lambda: ClockPair(10**18 + self.now, self.now))
            patch.setattr("stagetrace.recorder.monotonic_ns", lambda: self.now)
            patch.setattr("stagetrace_export.window.monotonic_ns", lambda: self.now)
            yield

    def at(self, after_ms, action, *arguments):
        """Do something so many milliseconds from now."""
        when = self.now + round(after_ms * MS)
        heapq.heappush(self._events, (when, next(self._order), action, arguments))

    def run(self, milliseconds):
        """Let virtual time go on."""
        end = self.now + round(milliseconds * MS)
        while self._events and self._events[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        self.now = end

    def traffic(self, count, spacing_ms=15.0):
        """Have requests arrive at random from now on."""
        after = 0.0
        for _ in range(count):
            after += self._random.expovariate(1 / spacing_ms)
            tokens = self._random.choice([1, 3, 8, 20, 60])
            leaves = self._random.random() < 0.1
            self.at(after, self.receive, tokens, self._random.random() < 0.4, leaves)

    # --- API server ---

    def receive(self, tokens=4, image=False, leaves=False):
        """Receive a request."""
        self.sent += 1
        request = _Request(self.sent, tokens, image, leaves)
        api, number = self.api, self.sent
        api.record(K.RECEIVED, number)
        api.record(K.FACT_TEXT, number, Fact.PHASE, api.intern("load"))
        api.record(K.BODY_COMPLETE, number, 100)
        if image:
            api.record(K.ITEM_BEGIN, number, 0, api.intern("http"), api.intern("host"), api.intern("image"))
            api.record(K.JOB_SUBMITTED, number, 0, JobKind.DECODE, 0)
            api.record(K.JOB_STARTED, number, 0)
        self.at(2.0 if image else 0.5, self._hand_off, request)
        if leaves:
            self.at(self._random.uniform(1, 40), self._leave, request)

    def _hand_off(self, request):
        if request.aborted:
            return
        api, number = self.api, request.number
        if request.image:
            api.record(K.JOB_ENDED, number, 0)
        request.name = f"chat-{number}"
        request.text = api.define(request.name)
        api.record(K.ENGINE_REQUEST, number, request.text)
        self.at(0.3, self._hold, request)

    def _leave(self, request):
        if request.left > 0:
            self.api.record(K.DISCONNECTED, request.number)
            request.aborted = True
            self.api.record(K.ENDED, request.number, 1)

    def _answer(self, request, last):
        api, number = self.api, request.number
        if request.aborted:
            return
        if request.generated == 1:
            api.record(K.OUTPUT_FIRST, number, request.text)
            api.record(K.RESPONSE_STARTED, number, 200, 1)
            api.record(K.FIRST_USEFUL, number)
        if last:
            api.record(K.OUTPUT_FINISHED, number, request.text, api.intern("length"))
            api.record(K.LAST_BYTE, number)
            api.record(K.ENDED, number)

    # --- engine and worker ---

    def _hold(self, request):
        engine = self.engine
        request.key = engine.define(request.name)
        engine.record(K.HELD, request.key, 30, request.left, int(request.image))
        if request.image:
            engine.record(K.ENGINE_ITEM, request.key, 0, engine.intern("hash"), 20, 25)
        engine.record(K.ADDED, request.key)
        self._waiting.append(request)
        if not self._busy:
            self._schedule()

    def _schedule(self):
        for gone in [r for r in self._running + self._waiting if r.aborted]:
            (self._running if gone in self._running else self._waiting).remove(gone)
            self.engine.record(K.FREED, gone.key, self.engine.intern("aborted"), gone.generated)
        while self._waiting and len(self._running) < SEATS:
            self._running.append(self._waiting.pop(0))
        self._busy = bool(self._running)
        if self._busy:
            self._step += 1
            self.at(0.2, self._compose, self.now)

    def _compose(self, begin):
        engine, number = self.engine, self._step
        engine.look(self.now)
        members = {r.key: 1 if r.generated else 30 for r in self._running}
        tokens, decodes = sum(members.values()), list(members.values()).count(1)
        reason = ReasonCode.SEATS if self._waiting else ReasonCode.NONE
        composition = (tokens, len(members) | reason << 16, len(members) | decodes << 16, len(self._waiting))
        if self._epoch != engine.epoch:
            self._epoch = engine.epoch
            self._composition, self._members, self._head = None, {}, -1
            engine.record_at(begin, K.FRAME, number)
            engine.record_at(begin, K.PAUSE, 0, 0)
            for request in self._running + self._waiting:
                engine.record_at(begin, K.ALIVE, request.key, request in self._running)
        if composition != self._composition:
            self._composition = composition
            engine.record_at(begin, K.STEP, number, *composition)
        head = self._waiting[0].key if self._waiting else NONE
        if head != self._head:
            self._head = head
            engine.record(K.HEAD, number, head)
        for key, amount in members.items() - self._members.items():
            engine.record(K.MEMBER, key, number, amount)
        for key in self._members.keys() - members.keys():
            engine.record(K.MEMBER, key, number)
        self._members = members
        encoding = [r for r in self._running if r.image and not r.generated]
        for request in encoding:
            engine.record(K.STEP_ITEM, number, request.key, 0)
        self.at(0.1, self.worker.record, K.STEP_BEGIN, number, engine.number)
        if encoding:
            self.at(0.2, self.worker.record, K.ENCODE_BEGIN, number, engine.number)
            self.at(2.5, self.worker.record, K.ENCODE_END, number, engine.number)
        self.at(4.0 if encoding else 1.5, self._done, begin, list(self._running))

    def _done(self, begin, members):
        engine, number = self.engine, self._step
        engine.record(K.STEP_DONE, number, self.now - begin)
        for request in members:
            request.generated += 1
            request.left -= 1
            if request.generated == 1:
                engine.record(K.FIRST_TOKEN, request.key, number)
            if not request.left:
                self._running.remove(request)
                engine.record(K.FREED, request.key, engine.intern("stopped"), request.generated)
            self.at(0.3, self._answer, request, not request.left)
        self._schedule()
