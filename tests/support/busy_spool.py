"""A spool as a busy server leaves it: written by real recorders, with every kind of end and several reasons to wait."""

from __future__ import annotations

import random
from typing import NamedTuple

from stagetrace import Recorder
from stagetrace.clock import monotonic_ns
from stagetrace.records import NONE, RECORD_BYTES, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.segment import HEADER_BYTES

MS = 1_000_000
SEATS = 2
NOT_SAMPLED = 3
FAULTS = 2


class Busy(NamedTuple):
    """A server that is still there: its recorders, and how many records it lost."""

    recorders: tuple[Recorder, ...]
    lost: int


def write_spool(folder, requests=60, seed=1):
    """Write ``requests`` requests, a third with an image, of which one has not ended."""
    chance = random.Random(seed)
    api, engine, worker = Recorder(folder), Recorder(folder), Recorder(folder)
    engine.role = "engine"
    now = monotonic_ns() - (60 + requests) * 1000 * MS
    arrivals = []
    for number in range(requests):
        now += chance.randrange(5, 40) * MS
        arrivals.append(_front_end(api, engine, number, now, chance))
    _serve(api, engine, worker, sorted(arrivals), requests)
    for number in range(requests, requests + NOT_SAMPLED):
        api.record(RecordKind.NOT_SAMPLED, number)
    for _ in range(FAULTS):
        engine.fault()
    full = _lose(folder)
    return Busy((api, engine, worker, full), full.dropped)


def _front_end(api, engine, number, at, chance):
    """Record a request up to the hand-off; return when the engine holds it, its number, key and length."""
    image, tokens = number % 3 == 0, chance.choice([4, 300])
    api.record_at(at, RecordKind.RECEIVED, number)
    api.record_at(at, RecordKind.FACT_NUMBER, number, Fact.MAX_TOKENS, tokens, 0)
    api.record_at(at, RecordKind.FACT_TEXT, number, Fact.LABEL, api.intern(f"client's own words {number}"))
    if image:
        api.record_at(
            at + MS, RecordKind.ITEM_BEGIN, number, 0, api.intern("http"), NONE, api.intern("image")
        )
        api.record_at(at + MS, RecordKind.FETCH_BEGIN, number, 0)
        at += chance.randrange(2, 30) * MS
        api.record_at(at, RecordKind.FETCH_END, number, 0, 1)
    for job, kind in enumerate([JobKind.DECODE] * image + [JobKind.TEMPLATE, JobKind.TOKENIZE]):
        item = 0 if kind is JobKind.DECODE else NONE
        api.record_at(at, RecordKind.JOB_SUBMITTED, number, job, kind, item)
        api.record_at(at + chance.randrange(3) * MS, RecordKind.JOB_STARTED, number, job)
        at += chance.randrange(3, 9) * MS
        api.record_at(at, RecordKind.JOB_ENDED, number, job)
        if item == 0:
            api.record_at(at, RecordKind.MEDIA_DECODED, number, 0, 5000, 64 << 16 | 48, api.intern("png"))
            api.record_at(at, RecordKind.ITEM_END, number, 0)
    identifier = f"chatcmpl-{number:08x}"
    api.record_at(at, RecordKind.ENGINE_REQUEST, number, api.define(identifier))
    key = engine.define(identifier)
    engine.record_at(at + MS, RecordKind.HELD, key, 50, tokens, int(image))
    engine.record_at(at + MS, RecordKind.ADDED, key)
    return at + MS, number, key, min(tokens, 6), image


def _serve(api, engine, worker, arrivals, requests):
    """Run the engine, two seats, first come first served, until everybody is served."""
    step, at, running, waiting = 0, arrivals[0][0], {}, list(arrivals)
    while waiting or running:
        step += 1
        at = max(at, waiting[0][0]) if not running else at
        queue = [arrival for arrival in waiting if arrival[0] <= at]
        seated = queue[: SEATS - len(running)]
        took = (10 + 15 * sum(image for *_, image in seated)) * MS
        waiting = [arrival for arrival in waiting if arrival not in seated]
        left = len(queue) - len(seated)
        reasons = ReasonCode.SEATS << 16 if left else 0
        members = len(running) + len(seated)
        tokens = len(running) + 50 * len(seated)
        engine.record_at(
            at, RecordKind.STEP, step, tokens, members | reasons, members | len(running) << 16, left
        )
        for _, number, key, length, image in seated:
            running[key] = [number, length, 0, key]
            engine.record_at(at, RecordKind.MEMBER, key, step, 50, 0)
            if image:
                engine.record_at(at, RecordKind.STEP_ITEM, step, key, 0)
        for key, (_, _, made, _) in running.items():
            if made == 1:
                engine.record_at(at, RecordKind.MEMBER, key, step, 1, 50)
        worker.record_at(at + MS, RecordKind.STEP_BEGIN, step, engine.number)
        if any(image for *_, image in seated):
            worker.record_at(at + MS, RecordKind.ENCODE_BEGIN, step, engine.number)
            worker.record_at(at + took - 5 * MS, RecordKind.ENCODE_END, step, engine.number)
        at += took
        engine.record_at(at, RecordKind.STEP_DONE, step, took)
        for served in running.values():
            served[2] += 1
            _deliver(api, engine, served, step, at, requests)
        running = {key: served for key, served in running.items() if served[2] < served[1]}


def _deliver(api, engine, served, step, at, requests):  # noqa: PLR0917 - records of two processes
    number, length, made, key = served
    if made == 1:
        engine.record_at(at, RecordKind.FIRST_TOKEN, key, step)
        if number % 10 != 7:
            api.record_at(at, RecordKind.RESPONSE_STARTED, number, 200, 1)
            api.record_at(at + MS, RecordKind.FIRST_USEFUL, number)
    if number % 10 == 8 and made == 2:
        api.record_at(at, RecordKind.DISCONNECTED, number)
        api.record_at(at, RecordKind.ENDED, number, 1)
    if made < length:
        return
    engine.record_at(at, RecordKind.FREED, key, engine.intern("length_capped"), made)
    if number % 10 == 7:
        api.record_at(at, RecordKind.RESPONSE_STARTED, number, 500 + number % 3, 0)
    if number == requests - 1 or number % 10 == 8:
        return
    api.record_at(at + 2 * MS, RecordKind.LAST_BYTE, number)
    api.record_at(at + 2 * MS, RecordKind.ENDED, number)


def _lose(folder):
    """Lose records of one more process for want of room."""
    recorder = Recorder(folder, HEADER_BYTES + 8 * RECORD_BYTES, spool_bytes=1 << 30)
    recorder.record(RecordKind.LOOP_LAG, 0)
    recorder._spool_bytes = 1
    while recorder.dropped < 4:
        recorder._retry_at = 0
        recorder.record(RecordKind.LOOP_LAG, 0)
    return recorder
