"""Joining: records of three processes become the timelines of requests."""

from __future__ import annotations

import os

import pytest

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


@pytest.mark.parametrize("later", [False, True])
def test_engine_that_dies_in_a_step(tmp_path, later):
    """Its last step holds until the client is told; not so when the worker began later ones that are not recorded."""
    server = Server(tmp_path)
    seated, _ = server.request(1, "seated"), server.request(2, "queued")
    server.step(1, 6, 10, [(seated, 30)], reason=ReasonCode.SEATS, waiting=1)
    server.engine.record_at(10 * MS, RecordKind.FIRST_TOKEN, seated, 1)
    server.step(2, 10, 20, [(seated, 1)], reason=ReasonCode.SEATS, waiting=1)
    for number in (3, 4) if later else (3,):
        server.worker.record_at((8 * number - 3) * MS, RecordKind.STEP_BEGIN, number, server.engine.number)
    code = server.api.intern("engine_dead")
    for number in (1, 2):
        server.api.record_at(30 * MS, RecordKind.FACT_TEXT, number, Fact.ERROR, code)
        server.api.record_at(30 * MS, RecordKind.RESPONSE_STARTED, number, 500)
        server.api.record_at(31 * MS, RecordKind.LAST_BYTE, number)
        server.api.record_at(31 * MS, RecordKind.ENDED, number)
    data = read_spool(tmp_path)
    assert [check for check in data.checks if not check.holds] == []
    assert data.set_aside == ({"worker_step_without_engine": 2} if later else {})
    ends = [summarize(partition(request).completion)[3:] for request in data.requests]
    if later:
        assert ends == [
            [("handoff", 1), ("prefill", 4), ("decode", 10), ("unattributed", 11)],
            [("handoff", 1), ("prefill.wait(seats)", 14), ("unattributed", 11)],
        ]
    else:
        assert ends == [
            [("handoff", 1), ("prefill", 4), ("decode", 21)],
            [("handoff", 1), ("prefill.wait(seats)", 25)],
        ]


@pytest.mark.parametrize(
    ("reason", "told"),
    [("length", (Outcome.OK, None)), ("abort", (Outcome.ERROR, "engine_abort"))],
)
def test_answer_that_the_engine_broke_off_is_an_error(tmp_path, reason, told):
    """It is handed out as a whole one, and only its finish reason says that it is not."""
    server = Server(tmp_path)
    key = server.request(1, "one")
    server.step(1, 6, 10, [(key, 30)])
    server.answer(1, "one", key, 10)
    text = server.api.define("one")
    server.api.record_at(11 * MS, RecordKind.OUTPUT_FINISHED, 1, text, server.api.intern(reason))
    (request,) = read_spool(tmp_path).requests
    assert (request.outcome, request.facts.get("error_code")) == told
    check_partition(request, partition(request))


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
        (None, 1, Outcome.LOST, None),
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


def record(folder, *records):
    """Record of a request, with times in milliseconds; returns it as it is read."""
    api = Recorder(folder)
    for at, kind, *fields in records:
        api.record_at(at * MS, kind, 1, *fields)
    (request,) = read_spool(folder).requests
    return request


def test_request_ends_when_its_client_leaves(tmp_path):
    """What the server does with it later is no part of it: not a job that goes on, and not an error."""
    request = record(
        tmp_path,
        (0, RecordKind.RECEIVED),
        (1, RecordKind.ITEM_BEGIN, 0, NONE, NONE),
        (1, RecordKind.JOB_SUBMITTED, 0, JobKind.DECODE, 0),
        (2, RecordKind.JOB_STARTED, 0),
        (5, RecordKind.DISCONNECTED),
        (6, RecordKind.ITEM_END, 0, 1),
        (6, RecordKind.FACT_TEXT, Fact.ERROR, NONE),
        (7, RecordKind.ENDED, 2),
        (9, RecordKind.JOB_ENDED, 0),
    )
    assert (request.outcome, request.facts, request.ended) == (Outcome.CANCELLED, {}, 5 * MS)
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.completion) == [("receive", 1), ("media_decode.wait", 1), ("media_decode", 3)]


@pytest.mark.parametrize("leaves", [0, 4])
def test_first_error_is_the_code(tmp_path, leaves):
    """Of two errors the first one is the cause, also when the client leaves because of it or just before."""
    api = Recorder(tmp_path)
    api.record_at(0, RecordKind.RECEIVED, 1)
    for at, code in ((1, "engine_dead"), (2, "EngineDeadError")):
        api.record_at(at * MS, RecordKind.FACT_TEXT, 1, Fact.ERROR, api.define(code))
    api.record_at(leaves * MS, RecordKind.DISCONNECTED, 1)
    api.record_at(5 * MS, RecordKind.ENDED, 1)
    (request,) = read_spool(tmp_path).requests
    told = (Outcome.ERROR, "engine_dead") if leaves else (Outcome.CANCELLED, None)
    assert (request.outcome, request.facts.get("error_code")) == told


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


def test_item_whose_fetch_failed_is_ready_then(tmp_path):
    """It was given up in its fetch, and not in a wait behind it."""
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
    assert request.items[0].ready == 5 * MS
    assert summarize(partition(request).completion)[-2:] == [("retrieval", 4), ("respond", 1)]


class SeveralPrompts:
    """A request of several prompts; images, and the steps that encode them, by prompt."""

    def __init__(self, folder):
        self.api, self.engine = Recorder(folder), Recorder(folder)
        self.engine.role = "engine"
        self.api.record_at(0, RecordKind.RECEIVED, 1)
        self.step = 0

    def image(self, index, job):
        """An image that a job loaded by itself."""
        text = self.api.define("image")
        self.api.record_at(1, RecordKind.ITEM_BEGIN, 1, index, NONE, NONE, text)
        self.api.record_at(1, RecordKind.ITEM_INLINE, 1, index, job)
        self.api.record_at(2, RecordKind.ITEM_END, 1, index)

    def answer(self, choice, prompt, images, encoded=(), *, tokens=8):
        """An answer to a prompt of ten tokens and some images."""
        self.api.record_at(5, RecordKind.ENGINE_REQUEST, 1, self.api.define(f"id-{choice}"), choice, prompt)
        key = self.engine.define(f"id-{choice}")
        self.engine.record_at(6, RecordKind.HELD, key, 10, 16, len(images))
        for index, image in enumerate(images):
            name = self.engine.define(image)
            self.engine.record_at(6, RecordKind.ENGINE_ITEM, key, index, name, 100 + len(image), 9)
        self.step += 1
        at = 10 * self.step
        self.engine.record_at(at, RecordKind.STEP, self.step, 10, 1, 1)
        self.engine.record_at(at, RecordKind.MEMBER, key, self.step, 10, 2)
        for index in encoded:
            self.engine.record_at(at, RecordKind.STEP_ITEM, self.step, key, index)
        self.engine.record_at(at + 1, RecordKind.FIRST_TOKEN, key, self.step)
        self.engine.record_at(at + 1, RecordKind.FREED, key, self.engine.intern("stopped"), tokens)

    def read(self, folder):
        """The request, and what was set aside of it."""
        self.api.record_at(99, RecordKind.LAST_BYTE, 1)
        self.api.record_at(99, RecordKind.ENDED, 1)
        data = read_spool(folder)
        (request,) = data.requests
        return request, data.set_aside


def test_prompts_add_up_and_answers_to_one_share_it(tmp_path):
    """Tokens of a prompt count once, however many answers it gets; the answers' own tokens all count."""
    server = SeveralPrompts(tmp_path)
    for choice in range(6):
        server.answer(choice, choice // 2, [], tokens=choice)
    request, _ = server.read(tmp_path)
    assert [(engine.index, engine.prompt) for engine in request.engine_requests] == [
        (choice, choice // 2) for choice in range(6)
    ]
    facts = request.facts
    assert (facts["prompt_tokens"], facts["cached_tokens"], facts["output_tokens"]) == (30, 6, 15)


def test_sum_with_an_unknown_part_is_unknown(tmp_path):
    """An answer that the engine had not let go of leaves the number of output tokens open."""
    server = SeveralPrompts(tmp_path)
    server.answer(0, 0, [])
    server.api.record_at(5, RecordKind.ENGINE_REQUEST, 1, server.api.define("lost"), 1, 1)
    request, set_aside = server.read(tmp_path)
    assert not {"prompt_tokens", "output_tokens"} & request.facts.keys()
    assert set_aside["request_without_engine"] == 1


def test_items_of_several_prompts_are_told_apart(tmp_path):
    """Items belong to prompts in the order of the jobs that loaded them, whichever began first."""
    server = SeveralPrompts(tmp_path)
    server.image(0, job=2)
    server.image(1, job=0)
    server.image(2, job=2)
    server.answer(2, 2, ["ccc", "dddd"], encoded=[1])
    server.answer(0, 0, ["a"], encoded=[0])
    server.answer(1, 1, [])
    request, set_aside = server.read(tmp_path)
    known = {index: (item.facts["hash"], item.facts["tokens"]) for index, item in request.items.items()}
    assert known == {0: ("ccc", 103), 1: ("a", 101), 2: ("dddd", 104)}
    assert [request.items[index].facts["encoder_cache"] for index in range(3)] == ["hit", "miss", "miss"]
    assert [request.items[index].job for index in range(3)] == [2, 0, 2]
    assert all(item.inline for item in request.items.values())
    assert +set_aside == {}


@pytest.mark.parametrize("first_encodes", [True, False])
def test_item_is_missed_when_any_answer_had_it_encoded(tmp_path, first_encodes):
    """Of two answers to one prompt only one has its image encoded, and the cache did not hold it before."""
    server = SeveralPrompts(tmp_path)
    server.image(0, job=NONE)
    server.answer(0, 0, ["a"], encoded=[0] if first_encodes else [])
    server.answer(1, 0, ["a"], encoded=[] if first_encodes else [0])
    request, _ = server.read(tmp_path)
    assert request.items[0].facts["encoder_cache"] == "miss"
    assert request.facts["media_items"] == 1
    assert request.items[0].job is None


def test_items_that_do_not_match_are_counted_once(tmp_path):
    """A prompt with an item that was never loaded (the client named it) leaves all of them untold."""
    server = SeveralPrompts(tmp_path)
    server.image(0, job=0)
    server.answer(0, 0, ["a"])
    server.answer(1, 1, ["named"])
    request, set_aside = server.read(tmp_path)
    assert "hash" not in request.items[0].facts
    assert set_aside == {"request_whose_media_items_cannot_be_told_apart": 1}


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
