"""Joining: records of three processes become the timelines of requests."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace import DataError, Outcome, Recorder, partition, read_spool
from stagetrace.records import NONE, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.segment import HEADER_BYTES
from stagetrace.spool import segment_paths
from stagetrace.stages import Reason
from stagetrace.testing import check_partition, summarize

MS = 1_000_000


class Server:
    """Three recorders as the processes of a server, with times in milliseconds."""

    def __init__(self, folder):
        self.api, self.engine, self.worker = Recorder(folder), Recorder(folder), Recorder(folder)
        self.engine.role = "engine"
        self.engine.announce(RecordKind.PROCESS_FACT, Fact.MODEL, "tiny")

    def request(self, number, identifier, at=0):
        """A text request: 1 ms to its first job, two jobs of 2 ms, 1 ms to the engine."""
        api = self.api
        api.record_at(at * MS, RecordKind.RECEIVED, number)
        for job, kind in enumerate((JobKind.TEMPLATE, JobKind.TOKENIZE)):
            begin = at + 1 + 2 * job
            api.record_at(begin * MS, RecordKind.JOB_SUBMITTED, number, job, kind, NONE)
            api.record_at(begin * MS, RecordKind.JOB_STARTED, number, job)
            api.record_at((begin + 2) * MS, RecordKind.JOB_ENDED, number, job)
        api.record_at((at + 5) * MS, RecordKind.ENGINE_REQUEST, number, api.define(identifier))
        key = self.engine.define(identifier)
        self.engine.record_at((at + 6) * MS, RecordKind.HELD, key, 30, 16, 0)
        self.engine.record_at((at + 6) * MS, RecordKind.ADDED, key)
        return key

    def step(self, number, begin, end, members=(), encodes=False, **queue):
        """A step with its members' tokens, and the worker's part of it."""
        tokens = sum(tokens for _, tokens in members) or 1
        reason, waiting = queue.get("reason", ReasonCode.NONE), queue.get("waiting", 0)
        self.engine.record_at(begin * MS, RecordKind.STEP, number, tokens, 1 | reason << 16, 1, waiting)
        for key, count in members:
            self.engine.record_at(begin * MS, RecordKind.MEMBER, key, number, count, 0)
        self.worker.record_at(begin * MS, RecordKind.STEP_BEGIN, number, self.engine.number)
        if encodes:
            self.worker.record_at((begin + 1) * MS, RecordKind.ENCODE_BEGIN, number, self.engine.number)
            self.worker.record_at((end - 1) * MS, RecordKind.ENCODE_END, number, self.engine.number)
        self.engine.record_at(end * MS, RecordKind.STEP_DONE, number, (end - begin) * MS)

    def answer(self, number, identifier, key, at):
        """The last step was done at ``at``; the bytes leave one millisecond later."""
        self.engine.record_at(at * MS, RecordKind.FIRST_TOKEN, key, 1)
        self.engine.record_at(at * MS, RecordKind.FREED, key, self.engine.intern("length_capped"), 1)
        text = self.api.define(identifier)
        self.api.record_at(at * MS, RecordKind.OUTPUT_FIRST, number, text)
        self.api.record_at(at * MS, RecordKind.OUTPUT_FINISHED, number, text, self.api.intern("length"))
        self.api.record_at(at * MS, RecordKind.RESPONSE_STARTED, number, 200, 1)
        self.api.record_at((at + 1) * MS, RecordKind.FIRST_USEFUL, number)
        self.api.record_at((at + 1) * MS, RecordKind.LAST_BYTE, number)
        self.api.record_at((at + 1) * MS, RecordKind.ENDED, number)


def test_three_processes_make_one_request(tmp_path):
    """A request is joined over API server, engine and worker, and explained whole."""
    server = Server(tmp_path)
    key = server.request(1, "chatcmpl-1-abcd")
    server.step(1, 7, 20, [(key, 30)])
    server.answer(1, "chatcmpl-1-abcd", key, 20)
    data = read_spool(tmp_path)
    (request,) = data.requests
    assert request.outcome is Outcome.OK
    assert request.facts["model"] == "tiny"
    assert request.facts["finish_reason"] == "length"
    assert request.facts["prompt_tokens"] == 30
    (engine,) = request.engine_requests
    assert engine.steps.steps[0].begin == 7 * MS
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.ttft) == [
        ("receive", 1),
        ("preprocess", 2),
        ("preprocess", 2),
        ("handoff", 1),
        ("prefill", 14),
        ("respond", 1),
    ]
    assert +data.set_aside == {}
    assert data.dropped == data.faults == 0


def test_two_engines_with_equal_step_numbers_stay_apart(tmp_path):
    """A worker's step belongs to the engine whose number travelled with it."""
    one, two = Server(tmp_path), Server(tmp_path)
    for server, begin in ((one, 10), (two, 1000)):
        key = server.request(1, f"id-{begin}", at=begin - 8)
        server.step(1, begin, begin + 5, [(key, 30)])
        server.answer(1, f"id-{begin}", key, begin + 5)
    begins = [request.engine_requests[0].steps.steps[0].begin for request in read_spool(tmp_path).requests]
    assert begins == [10 * MS, 1000 * MS]


def test_head_of_the_queue_holds_until_it_changes(tmp_path):
    """The head of the queue is recorded by change and known in every step."""
    server = Server(tmp_path)
    first = server.request(1, "first")
    head = server.request(2, "head")
    server.step(1, 7, 10, [(first, 30)], reason=ReasonCode.SEATS, waiting=1)
    server.engine.record_at(7 * MS, RecordKind.HEAD, 1, head)
    server.step(2, 10, 12, reason=ReasonCode.SEATS, waiting=1)
    server.step(3, 12, 14)
    (steps,) = read_spool(tmp_path).engines
    assert [step.head for step in steps.steps] == ["head", "head", None]
    assert [step.reason for step in steps.steps] == [Reason.SEATS, Reason.SEATS, None]


def test_steps_composed_alike_are_recorded_once(tmp_path):
    """A step composed like the one before has no record of its composition, and is known all the same."""
    server = Server(tmp_path)
    key = server.request(1, "id")
    server.step(1, 7, 10, [(key, 30)], reason=ReasonCode.SEATS, waiting=1)
    for number, end in ((2, 13), (3, 16)):
        server.engine.record_at(end * MS, RecordKind.STEP_DONE, number, 2 * MS)
    server.engine.record_at(20 * MS, RecordKind.STEP_DONE, 5, MS)
    data = read_spool(tmp_path)
    (steps,) = data.engines
    known = [
        (step.number, step.scheduled // MS, step.done // MS, step.tokens, step.reason) for step in steps.steps
    ]
    assert known == [(1, 7, 10, 30, "seats"), (2, 11, 13, 30, "seats"), (3, 14, 16, 30, "seats")]
    assert data.set_aside["step_without_beginning"] == 1


def test_request_of_a_dead_server_is_lost(tmp_path):
    """A request without an end is open while its server lives, and lost when it does not."""
    server = Server(tmp_path)
    server.request(1, "open")
    data = read_spool(tmp_path)
    assert data.requests == []
    assert data.set_aside["open_request"] == 1
    child = os.fork()
    if child == 0:
        server.request(2, "lost")
        os._exit(0)
    os.waitpid(child, 0)
    assert [request.outcome for request in read_spool(tmp_path).requests] == [Outcome.LOST]


@pytest.mark.parametrize(
    ("status", "ended", "outcome", "code"),
    [
        (400, 0, Outcome.ERROR, "http_400"),
        (None, 1, Outcome.CANCELLED, None),
        (None, 2, Outcome.ERROR, "application_error"),
    ],
)
def test_outcomes(tmp_path, status, ended, outcome, code):
    """How a request ended is told from its status and from how the application returned."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    if status is not None:
        recorder.record(RecordKind.RESPONSE_STARTED, 1, status)
        recorder.record(RecordKind.LAST_BYTE, 1)
    recorder.record(RecordKind.ENDED, 1, ended)
    (request,) = read_spool(tmp_path).requests
    assert (request.outcome, request.facts.get("error_code")) == (outcome, code)


def test_item_is_ready_when_it_is_decoded(tmp_path):
    """What a busy event loop takes to learn of it is the wait of the next job."""
    api = Recorder(tmp_path)
    for at, kind, *fields in (
        (0, RecordKind.RECEIVED),
        (1, RecordKind.ITEM_BEGIN, 0, NONE, NONE),
        (1, RecordKind.JOB_SUBMITTED, 0, JobKind.DECODE, 0),
        (2, RecordKind.JOB_STARTED, 0),
        (7, RecordKind.JOB_ENDED, 0),
        (30, RecordKind.ITEM_END, 0),
        (30, RecordKind.JOB_SUBMITTED, 1, JobKind.TEMPLATE, NONE),
        (31, RecordKind.JOB_STARTED, 1),
        (33, RecordKind.JOB_ENDED, 1),
        (33, RecordKind.LAST_BYTE),
        (33, RecordKind.ENDED),
    ):
        api.record_at(at * MS, kind, 1, *fields)
    (request,) = read_spool(tmp_path).requests
    assert request.items[0].ready == 7 * MS
    assert summarize(partition(request).completion) == [
        ("receive", 1),
        ("media_decode.wait", 1),
        ("media_decode", 5),
        ("preprocess.wait", 24),
        ("preprocess", 2),
    ]


def test_item_that_was_never_decoded_is_ready_when_it_failed(tmp_path):
    """A failed fetch ends its item when the item ends."""
    api = Recorder(tmp_path)
    for at, kind, *fields in (
        (0, RecordKind.RECEIVED),
        (1, RecordKind.ITEM_BEGIN, 0, NONE, NONE),
        (1, RecordKind.FETCH_BEGIN, 0),
        (5, RecordKind.FETCH_END, 0, 1, 1),
        (6, RecordKind.ITEM_END, 0, 1),
        (6, RecordKind.LAST_BYTE),
        (6, RecordKind.ENDED),
    ):
        api.record_at(at * MS, kind, 1, *fields)
    (request,) = read_spool(tmp_path).requests
    assert request.items[0].ready == 6 * MS


def test_lags_of_the_event_loop_are_collected(tmp_path):
    """Lags of all API servers stand in order of time, with their process."""
    one, other = Recorder(tmp_path), Recorder(tmp_path)
    one.record_at(9 * MS, RecordKind.LOOP_LAG, 0, 5, 1)
    other.record_at(3 * MS, RecordKind.LOOP_LAG, 0, 2 * MS)
    lags = [(lag.process, lag.at, lag.duration) for lag in read_spool(tmp_path).lags]
    assert lags == [(other.process, 3 * MS, 2 * MS), (one.process, 9 * MS, 5 + (1 << 32))]


def test_what_cannot_be_used_is_counted_by_reason(tmp_path):
    """Broken segments, unknown kinds and records without their beginning are set aside, not dropped."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.LAST_BYTE, 7)
    recorder.record(999, 1)
    (tmp_path / "broken.stagetrace").write_bytes(b"\1" * HEADER_BYTES)
    set_aside = read_spool(tmp_path).set_aside
    assert set_aside == {"record_without_beginning": 1, "unknown_record": 1, "unreadable_segment": 1}


def test_text_defined_in_a_lost_segment_is_counted(tmp_path):
    """An id whose definition is gone costs its join, visibly."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    recorder.record(RecordKind.ENGINE_REQUEST, 1, 4711)
    recorder.record(RecordKind.ENDED, 1)
    assert read_spool(tmp_path).set_aside["text_not_recorded"] == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 2), st.integers(0, 255)), min_size=1, max_size=40
    )
)
@settings(max_examples=150, deadline=None)
def test_damaged_records_never_break_the_reader(tmp_path_factory, damage):
    """Whatever bytes stand in the records, a spool is read and every partition is whole."""
    folder = tmp_path_factory.mktemp("spool")
    server = Server(folder)
    for number in (1, 2):
        key = server.request(number, f"id-{number}", at=30 * number)
        begin = 30 * number + 7
        server.step(number, begin, begin + 12, [(key, 30)], encodes=True)
        server.answer(number, f"id-{number}", key, begin + 12)
    for path in segment_paths(folder):
        content = bytearray(path.read_bytes())
        written = len(content.rstrip(b"\0")) - HEADER_BYTES
        for place, only, value in damage:
            if only == place % 3:
                content[HEADER_BYTES + place % written] = value
        path.write_bytes(content)
    data = read_spool(folder)
    for request in (*data.requests, *data.open_requests):
        check_partition(request, partition(request))


def test_contradicted_step_is_unattributed(tmp_path):
    """A step whose members are not as many as the scheduler said is marked, and its time is not guessed."""
    server = Server(tmp_path)
    key = server.request(1, "id")
    server.step(1, 7, 20, [(key, 30)])
    server.engine.record_at(20 * MS, RecordKind.STEP, 2, 5, 3, 3, 0)
    server.engine.record_at(20 * MS, RecordKind.MEMBER, key, 2, 1, 0)
    server.engine.record_at(30 * MS, RecordKind.STEP_DONE, 2, 10 * MS)
    server.answer(1, "id", key, 30)
    data = read_spool(tmp_path)
    assert data.set_aside["contradicted_step"] == 1
    assert [check.name for check in data.checks if not check.holds] == [
        "requests in steps, summed over steps"
    ]
    assert ("unattributed", 10) in summarize(partition(data.requests[0]).completion)


def test_sound_records_reconcile(tmp_path):
    """Counts by different witnesses agree where nothing is missing."""
    server = Server(tmp_path)
    for number in (1, 2):
        key = server.request(number, f"id-{number}", at=30 * number)
        server.step(number, 30 * number + 7, 30 * number + 19, [(key, 30)])
        server.answer(number, f"id-{number}", key, 30 * number + 19)
    data = read_spool(tmp_path)
    assert len(data.checks) == 5
    assert [check for check in data.checks if not check.holds] == []


def test_empty_folder_is_one_clear_line(tmp_path):
    """A folder without segments says so, with a hint."""
    with pytest.raises(DataError, match=r"no segments here \(hint: STAGETRACE_SPOOL"):
        read_spool(tmp_path)
    assert segment_paths(tmp_path) == []
