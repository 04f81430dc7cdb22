"""The partition of a request's time into stages."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.partition import partition
from stagetrace.records import JobKind
from stagetrace.stages import Horizon, Kind, Reason, Stage
from stagetrace.testing import EngineBuilder, RequestBuilder, check_partition, summarize
from stagetrace.timeline import EngineRequest, Fetch, Item, Job, RequestTimeline, Step, Steps


def text_request(builder: RequestBuilder, at: float) -> float:
    """Template and tokenizer jobs of a text request, each with a queue before it."""
    builder.job(JobKind.TEMPLATE, at, at + 1, at + 3)
    builder.job(JobKind.TOKENIZE, at + 3, at + 3, at + 4)
    return at + 4


def test_text_request_alone():
    """Every stretch of a plain streaming request has its stage, on both horizons."""
    engine = EngineBuilder()
    first = engine.step(10, 20, tokens=30)
    engine.step(21, 26)
    last = engine.step(27, 32)
    builder = RequestBuilder()
    ready = text_request(builder, 2)
    builder.engine(
        engine.steps(),
        joined=ready + 1,
        held=9,
        added=9.5,
        members=[(first, 30), (first + 1, 1)],
        first_token=first,
        freed=32.2,
        output_first=20.5,
        output_finished=32.5,
    )
    request = builder.answered(34, first_useful=22)
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.ttft) == [
        ("receive", 2),
        ("preprocess.wait", 1),
        ("preprocess", 2),
        ("preprocess", 1),
        ("handoff", 3),
        ("prefill", 11),
        ("respond", 2),
    ]
    assert summarize(parts.completion)[-3:] == [("prefill", 11), ("decode", 12), ("respond", 2)]
    assert parts.completion[-2].last_step == last


def test_arrival_during_a_step_waits_for_the_step():
    """A request held while a step runs waits with reason step, and the hand-off stays short."""
    engine = EngineBuilder()
    engine.step(0, 300, encoder=(10, 280))
    mine = engine.step(301, 312, tokens=30)
    builder = RequestBuilder(100)
    ready = text_request(builder, 101)
    builder.engine(
        engine.steps(),
        joined=ready,
        held=106,
        added=300.5,
        members=[(mine, 30)],
        first_token=mine,
        freed=312.1,
        output_first=313,
        output_finished=313,
    )
    parts = partition(builder.answered(314, first_useful=314))
    assert summarize(parts.ttft)[4:] == [
        ("handoff", 1),
        ("prefill.wait(step)", 194),
        ("prefill", 12),
        ("respond", 2),
    ]


def test_encoder_part_of_a_step_is_encode_only_for_its_own_items():
    """The encoder's part of a shared step is encode for the image's owner, decode for its neighbour."""
    engine = EngineBuilder()
    engine.step(0, 10, tokens=30)
    shared = engine.step(10, 110, tokens=201, encoder=(15, 95))
    steps = engine.steps()
    owner = RequestBuilder()
    owned = owner.engine(
        steps, joined=2, held=3, added=3, members=[(shared, 200)], first_token=shared, freed=110
    )
    owned.encoded = {shared: [0]}
    parts = partition(owner.answered(111, first_useful=111))
    assert summarize(parts.ttft)[2:] == [
        ("prefill.wait(step)", 7),
        ("prefill", 5),
        ("encode", 80),
        ("prefill", 15),
        ("respond", 1),
    ]
    neighbour = RequestBuilder()
    neighbour.engine(steps, joined=0, held=0, added=0, members=[(1, 30), (2, 1)], first_token=1, freed=110)
    parts = partition(neighbour.answered(111, first_useful=11))
    assert summarize(parts.completion)[-2:] == [("decode", 100), ("respond", 1)]


def test_refusal_by_the_encoder_is_encode_wait_only_for_the_refused():
    """Text behind a refused image waits with the image as holder, but not for its own encoding."""
    engine = EngineBuilder()
    engine.step(0, 10, tokens=30)
    refusing = engine.step(10, 20, reason=Reason.ENCODER_BUDGET, head="image")
    after = engine.step(20, 30, tokens=60)
    steps = engine.steps()
    image = RequestBuilder()
    refused = image.engine(
        steps, joined=4, held=5, added=6, members=[(after, 200)], first_token=after, freed=30
    )
    refused.identifier = "image"
    refused.blocked = [(refusing, Reason.ENCODER_BUDGET), (after, None)]
    parts = partition(image.answered(31, first_useful=31))
    assert ("encode.wait(encoder_budget)", 10) in summarize(parts.ttft)
    text = RequestBuilder()
    text.engine(steps, joined=4, held=5, added=6, members=[(after, 30)], first_token=after, freed=30)
    parts = partition(text.answered(31, first_useful=31))
    assert ("prefill.wait(encoder_budget)", 10) in summarize(parts.ttft)
    wait = next(i for i in parts.ttft if i.reason is Reason.ENCODER_BUDGET)
    assert wait.holder == "image"


def test_second_image_refused_while_running():
    """Encode, prefill, encode.wait, encode, prefill: in this order, each as often as it happened."""
    engine = EngineBuilder()
    one = engine.step(0, 100, tokens=210, encoder=(10, 90))
    without = engine.step(100, 110, tokens=1)
    two = engine.step(110, 210, tokens=210, encoder=(120, 200))
    builder = RequestBuilder()
    mine = builder.engine(
        engine.steps(),
        joined=0,
        held=0,
        added=0,
        members=[(one, 210), (without, 0), (two, 210)],
        first_token=two,
        freed=210,
    )
    mine.encoded = {one: [0], two: [1]}
    mine.blocked = [(without, Reason.ENCODER_CACHE), (two, None)]
    parts = partition(builder.answered(211, first_useful=211))
    assert summarize(parts.ttft) == [
        ("prefill", 10),
        ("encode", 80),
        ("prefill", 10),
        ("encode.wait(encoder_cache)", 10),
        ("prefill", 10),
        ("encode", 80),
        ("prefill", 10),
        ("respond", 1),
    ]


def test_items_that_a_job_loads_stand_within_it():
    """A job that loads its media itself fetches and decodes one item after the other; nothing waits within it."""
    builder = RequestBuilder()
    builder.job(JobKind.RENDER, 1, 5, 60)
    builder.item(10, 30, fetch=(12, 25), inline=True)
    builder.item(30, 34, inline=True)
    builder.job(JobKind.RENDER, 2, 61, 64)
    parts = partition(builder.answered(65))
    assert summarize(parts.completion) == [
        ("receive", 1),
        ("preprocess.wait", 4),
        ("preprocess", 5),
        ("media_decode", 2),
        ("retrieval", 13),
        ("media_decode", 5),
        ("media_decode", 4),
        ("preprocess", 26),
        ("preprocess.wait", 1),
        ("preprocess", 3),
        ("respond", 1),
    ]
    assert [i.item for i in parts.completion if i.item is not None] == [0, 0, 0, 1]


def test_items_that_the_event_loop_loads_come_before_the_jobs():
    """Where the event loop itself fetches, every item is on the path, and so is one still under way at the end."""
    builder = RequestBuilder()
    builder.item(2, 20, fetch=(2, 18), inline=True)
    builder.item(20, 24, inline=True)
    builder.job(JobKind.RENDER, 26, 27, 30)
    builder.item(28, None, fetch=(28, 29), inline=True)
    parts = partition(builder.broken_off(40))
    check_partition(builder.request, parts)
    assert summarize(parts.completion) == [
        ("receive", 2),
        ("retrieval", 16),
        ("media_decode", 2),
        ("media_decode", 4),
        ("preprocess.wait", 3),
        ("preprocess", 1),
        ("retrieval", 1),
        ("media_decode", 11),
    ]


def rounds(engine, builder, *, answered=True):
    """A request that asks the engine three times: for one answer, for two at once, and for one more."""
    numbers = [engine.step(begin, begin + 4) for begin in (10, 20, 22, 40)]
    steps = engine.steps()
    joins = ((6, 0, 14.5), (17, 1, 24.5), (17.5, 2, 26.5), (32, 3, 44.5))
    for joined, index, finished in joins:
        done = finished if answered or index < 3 else None
        builder.engine(
            steps,
            joined=joined,
            held=joined + 1,
            added=joined + 1,
            members=[(numbers[index], 5)],
            first_token=numbers[index],
            freed=done,
            output_finished=done,
            index=index,
        )


def test_rounds_through_the_engine_follow_each_other():
    """Beam search and tools ask again when all answers are there: the way leads through the last one of each round."""
    builder = RequestBuilder()
    text_request(builder, 1)
    rounds(EngineBuilder(), builder)
    builder.job(JobKind.TOKENIZE, 28, 29, 30)
    request = builder.answered(46, first_useful=46, tokens_before=None)
    parts = partition(request)
    check_partition(request, parts)
    assert parts.ttft == parts.completion
    assert summarize(parts.completion) == [
        ("receive", 1),
        ("preprocess.wait", 1),
        ("preprocess", 2),
        ("preprocess", 1),
        ("handoff", 2),
        ("prefill", 7),
        ("handoff", 4.5),
        ("prefill.wait(unknown)", 5.5),
        ("prefill", 2),
        ("preprocess.wait", 3),
        ("preprocess", 1),
        ("handoff", 3),
        ("prefill.wait(unknown)", 7),
        ("prefill", 4),
        ("respond", 2),
    ]


def test_answers_made_at_once_are_no_rounds():
    """Of several answers only the last one to finish is on the path, although another one was there long before."""
    engine = EngineBuilder()
    first, second = engine.step(10, 14), engine.step(14, 30)
    builder = RequestBuilder()
    for joined, step, done in ((2, first, 14.5), (3, second, 30.5)):
        builder.engine(
            engine.steps(),
            joined=joined,
            held=5,
            added=5,
            members=[(step, 5)],
            first_token=step,
            freed=done,
            output_finished=done,
        )
    parts = partition(builder.answered(31))
    assert summarize(parts.completion)[-4:] == [
        ("handoff", 3),
        ("prefill.wait(unknown)", 9),
        ("prefill", 16),
        ("respond", 1),
    ]


def test_request_that_broke_off_ends_where_it_still_was():
    """One answer was there, the other was not: the request ends in the stage of the one that was still at work."""
    builder = RequestBuilder()
    rounds(EngineBuilder(), builder, answered=False)
    parts = partition(builder.broken_off(42))
    check_partition(builder.request, parts)
    assert parts.completion[-1].stage is Stage.PREFILL
    assert all(i.stage is not Stage.UNATTRIBUTED for i in parts.completion)


def test_parallel_items_follow_the_last_one_ready():
    """Of two parallel images only the one that is ready last is on the path."""
    builder = RequestBuilder()
    quick = builder.item(1, 20, fetch=(2, 10))
    builder.job(JobKind.DECODE, 10, 12, 20, item=quick)
    slow = builder.item(1, 60, fetch=(3, 40))
    builder.job(JobKind.DECODE, 41, 50, 60, item=slow)
    builder.job(JobKind.PROCESS, 61, 62, 70)
    parts = partition(builder.answered(71))
    assert parts.critical_item == slow
    assert summarize(parts.completion) == [
        ("receive", 1),
        ("media_decode.wait", 2),
        ("retrieval", 37),
        ("media_decode.wait", 10),
        ("media_decode", 10),
        ("preprocess.wait", 2),
        ("preprocess", 8),
        ("respond", 1),
    ]


def test_answer_in_one_piece_has_its_decoding_before_its_first_byte():
    """Without streaming the first useful byte comes after the last step, so decode is in TTFT."""
    engine = EngineBuilder()
    engine.step(0, 10, tokens=30)
    engine.step(10, 15)
    builder = RequestBuilder()
    builder.engine(
        engine.steps(),
        joined=0,
        held=0,
        added=0,
        members=[(1, 30), (2, 1)],
        first_token=1,
        freed=15,
        output_finished=15.5,
    )
    parts = partition(builder.answered(17, first_useful=16, tokens_before=None))
    assert summarize(parts.ttft) == [("prefill", 10), ("decode", 5), ("respond", 1)]


def test_tokens_without_text_belong_to_the_time_to_the_first_useful_byte():
    """When the first two tokens make no text, the third one's step ends the engine's part of TTFT."""
    engine = EngineBuilder()
    for at in range(0, 50, 10):
        engine.step(at, at + 10, tokens=30 if at == 0 else 1)
    builder = RequestBuilder()
    builder.engine(
        engine.steps(), joined=0, held=0, added=0, members=[(1, 30), (2, 1)], first_token=1, freed=50
    )
    parts = partition(builder.answered(51, first_useful=33, tokens_before=2))
    assert summarize(parts.ttft) == [("prefill", 10), ("decode", 20), ("respond", 3)]


def test_poll_without_tokens_ends_where_the_next_step_is_scheduled():
    """A step without tokens keeps its reason until a real step is scheduled."""
    engine = EngineBuilder()
    engine.step(5, None, tokens=0, reason=Reason.UNKNOWN)
    real = engine.step(40, 50, tokens=30)
    builder = RequestBuilder()
    builder.engine(
        engine.steps(), joined=1, held=2, added=3, members=[(real, 30)], first_token=real, freed=50
    )
    parts = partition(builder.answered(51, first_useful=51))
    assert summarize(parts.ttft)[2:] == [("prefill.wait(unknown)", 38), ("prefill", 10), ("respond", 1)]


def test_missing_step_is_unattributed():
    """Time in a step whose record is missing is not guessed."""
    steps = Steps(
        "engine", [Step(1, 0, tokens=30, done=10_000_000), Step(3, 20_000_000, tokens=1, done=30_000_000)]
    )
    builder = RequestBuilder()
    builder.engine(steps, joined=0, held=0, added=0, members=[(1, 30), (2, 1)], first_token=1, freed=30)
    parts = partition(builder.answered(31, first_useful=11))
    assert ("unattributed", 10) in summarize(parts.completion)


def test_engine_without_records_is_unattributed():
    """A request whose engine left no records is unattributed from the hand-off on."""
    builder = RequestBuilder()
    ready = text_request(builder, 2)
    builder.engine(None, joined=ready)
    parts = partition(builder.answered(50, first_useful=40))
    assert summarize(parts.ttft)[-1] == ("unattributed", 34)


def test_cancelled_in_the_queue_ends_where_it_was():
    """A request that is cancelled while it waits has no respond."""
    engine = EngineBuilder()
    engine.step(0, 100, tokens=30)
    engine.step(100, 200, reason=Reason.SEATS)
    builder = RequestBuilder()
    builder.engine(engine.steps(), joined=1, held=2, added=100, freed=160)
    parts = partition(builder.broken_off(150))
    assert summarize(parts.completion) == [
        ("receive", 1),
        ("handoff", 1),
        ("prefill.wait(step)", 98),
        ("prefill.wait(seats)", 50),
    ]
    assert parts.ttft == ()


def test_given_up_after_the_last_step_was_waiting():
    """An engine that is stopped lets go of its queue when no step follows any more: until then they waited."""
    engine = EngineBuilder()
    engine.step(0, 100, tokens=30, reason=Reason.SEATS)
    builder = RequestBuilder()
    builder.engine(engine.steps(), joined=1, held=2, added=3, freed=106, output_finished=107)
    builder.answered(110)
    parts = partition(builder.request)
    check_partition(builder.request, parts)
    assert summarize(parts.completion)[2:] == [
        ("prefill.wait(step)", 98),
        ("prefill.wait(unknown)", 6),
        ("respond", 4),
    ]


def test_refused_before_the_engine_is_receive_and_respond():
    """A request that fails validation has no engine part."""
    builder = RequestBuilder()
    ready = text_request(builder, 2)
    parts = partition(builder.answered(8))
    assert summarize(parts.completion)[-1] == ("respond", 8 - ready)


# --- properties ------------------------------------------------------------------------------------

TIMES = st.integers(0, 10_000)
MAYBE = st.none() | TIMES


@st.composite
def any_steps(draw):
    """Steps with any times at all, some of them missing."""
    numbers = draw(st.lists(st.integers(1, 12), unique=True))
    return Steps("engine", [draw(any_step(number)) for number in numbers])


@st.composite
def any_step(draw, number):
    """A step with any times at all."""
    return Step(
        number,
        scheduled=draw(TIMES),
        tokens=draw(st.integers(0, 3)),
        reason=draw(st.none() | st.sampled_from(Reason)),
        done=draw(MAYBE),
        encoder_begin=draw(MAYBE),
        encoder_end=draw(MAYBE),
        encoder_device_ns=draw(MAYBE),
    )


@st.composite
def any_engine_request(draw, steps):
    """An engine's part with any times at all."""
    engine = EngineRequest("r", joined=draw(MAYBE), steps=draw(st.none() | st.just(steps)))
    engine.held, engine.added = draw(MAYBE), draw(MAYBE)
    engine.members = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 2))))
    engine.blocked = draw(st.lists(st.tuples(st.integers(1, 12), st.none() | st.sampled_from(Reason))))
    engine.encoded = draw(st.dictionaries(st.integers(1, 12), st.just([0])))
    engine.preempted = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), max_size=2))
    engine.resumed = draw(st.dictionaries(st.integers(1, 12), st.integers(0, 9)))
    engine.first_token = draw(st.none() | st.integers(1, 12))
    engine.output_first, engine.output_finished, engine.freed = draw(MAYBE), draw(MAYBE), draw(MAYBE)
    return engine


@st.composite
def any_request(draw):
    """Records of a request as damage, clocks and bugs could leave them."""
    request = RequestTimeline("r", "api", received=draw(TIMES))
    request.first_useful, request.last_byte, request.ended = draw(MAYBE), draw(MAYBE), draw(MAYBE)
    request.tokens_before = draw(st.none() | st.integers(0, 4))
    kinds = st.sampled_from(JobKind)
    items = st.none() | st.integers(0, 2)
    request.jobs = draw(st.lists(st.builds(Job, kinds, items, TIMES, MAYBE, MAYBE), max_size=6))
    fetches = st.lists(st.builds(Fetch, TIMES, MAYBE), max_size=2)
    for index in range(draw(st.integers(0, 3))):
        item = st.builds(Item, st.just(index), TIMES, MAYBE, fetches, st.booleans())
        request.items[index] = draw(item)
    steps = draw(any_steps())
    request.engine_requests = draw(st.lists(any_engine_request(steps), max_size=4))
    return request


@pytest.mark.slow
@given(any_request())
@settings(max_examples=200, deadline=None)
def test_any_records_are_covered_exactly(request):
    """Whatever is recorded, the parts sum to the whole to the nanosecond and none is negative."""
    check_partition(request, partition(request))


@pytest.mark.slow
@given(any_request(), st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_order_of_records_does_not_matter(request, rng):
    """Shuffled records give the same partition."""
    shuffled = deepcopy(request)
    for many in (shuffled.jobs, *(engine.members for engine in shuffled.engine_requests)):
        rng.shuffle(many)
    shuffled.items = dict(sorted(shuffled.items.items(), key=lambda _: rng.random()))
    assert partition(shuffled) == partition(request)


@st.composite
def true_request(draw):
    """Records as a sound server leaves them: everything in order, back to back or with gaps."""
    gap = st.integers(0, 5)
    clock = 0

    def later(least: int = 0) -> int:
        nonlocal clock
        clock += least + draw(gap)
        return clock

    request = RequestTimeline("r", "api", received=0)
    for kind in draw(
        st.lists(st.sampled_from([JobKind.TEMPLATE, JobKind.TOKENIZE, JobKind.PROCESS]), min_size=1)
    ):
        request.jobs.append(Job(kind, None, later(), later(), later(1)))
    engine = EngineRequest("r", joined=later(), held=later(), added=later())
    steps, tokens = [], draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    for number, mine in enumerate([*tokens, 2], start=1):
        steps.append(Step(number, scheduled=later(), tokens=5, reason=Reason.SEATS, done=later(1)))
        engine.members.append((number, mine))
    engine.steps = Steps("engine", steps)
    engine.first_token = len(steps)
    engine.freed = engine.output_first = engine.output_finished = later()
    request.engine_requests.append(engine)
    request.tokens_before = 0
    request.first_useful = request.last_byte = request.ended = later()
    return request


@given(true_request())
@settings(max_examples=300, deadline=None)
def test_sound_records_leave_nothing_unattributed(request):
    """Complete records, back to back or with gaps, explain every nanosecond."""
    parts = partition(request)
    check_partition(request, parts)
    assert all(i.stage is not Stage.UNATTRIBUTED for i in (*parts.ttft, *parts.completion))


@given(true_request())
@settings(max_examples=200, deadline=None)
def test_back_to_back_jobs_all_survive(request):
    """Each job of the chain is an interval of its own, even where one begins as another ends."""
    parts = partition(request)
    work = [i for i in parts.completion if i.stage is Stage.PREPROCESS]
    assert [(i.begin, i.end) for i in work] == [(job.started, job.ended) for job in request.jobs]


@pytest.mark.parametrize("horizon", list(Horizon))
def test_waiting_is_the_sum_of_waits(horizon):
    """Waiting time counts the wait stages and nothing else."""
    builder = RequestBuilder()
    builder.job(JobKind.TOKENIZE, 1, 4, 6)
    request = builder.answered(10, first_useful=10, tokens_before=None)
    assert partition(request).waiting(horizon) == 3_000_000


def test_many_steps_become_one_interval():
    """A thousand decode steps in a row are one row, not a thousand."""
    rng = random.Random(1)
    steps, clock = [], 0
    for number in range(1, 1002):
        steps.append(Step(number, scheduled=clock, tokens=1, done=clock + rng.randint(1, 9)))
        clock = steps[-1].done
    request = RequestTimeline("r", "api", received=0, first_useful=clock, last_byte=clock, ended=clock)
    engine = EngineRequest("r", joined=0, steps=Steps("e", steps), held=0, added=0)
    engine.members, engine.first_token, engine.freed = [(1, 30), (2, 1)], 1, clock
    request.engine_requests.append(engine)
    stages = [(i.stage, i.first_step, i.last_step) for i in partition(request).completion]
    assert stages == [(Stage.PREFILL, 1, 1), (Stage.DECODE, 2, 1001)]


# --- recording API ----------------------------------------------------------------------------------


def test_request_of_a_server_that_tells():
    """Between two parts nothing is known; before the first one is receive, after the last one respond."""
    builder = RequestBuilder()
    builder.part(Stage.PREPROCESS, 2, 5)
    builder.part(Stage.PREFILL_WAIT, 6, 9)
    builder.part(Stage.PREFILL, 9, 20)
    builder.part(Stage.DECODE, 22, 40)
    builder.part(Stage.DECODE, 43, 50)
    request = builder.answered(60, first_useful=21)
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.ttft) == [
        ("receive", 2),
        ("preprocess", 3),
        ("unattributed", 1),
        ("prefill.wait", 3),
        ("prefill", 11),
        ("respond", 1),
    ]
    assert summarize(parts.completion)[4:] == [
        ("prefill", 11),
        ("unattributed", 2),
        ("decode", 18),
        ("unattributed", 3),
        ("decode", 7),
        ("respond", 10),
    ]


def test_answer_at_once_is_respond_to_its_end():
    """Without a stream nothing is decoded behind the first output."""
    builder = RequestBuilder()
    builder.part(Stage.ENCODE, 1, 5)
    request = builder.answered(20, first_useful=6)
    stages = summarize(partition(request).completion)
    assert stages == [("receive", 1), ("encode", 4), ("respond", 1), ("respond", 14)]


def test_tokens_before_the_first_useful_one():
    """Decoding that the first useful output had to wait for is on the way to it, as far as the server says so."""
    builder = RequestBuilder()
    builder.request.facts["stream"] = True
    builder.part(Stage.PREFILL, 1, 5)
    for begin in (5, 7, 9):
        builder.part(Stage.DECODE, begin, begin + 2)
    request = builder.answered(20, first_useful=10, tokens_before=2)
    parts = partition(request)
    stages = summarize(parts.ttft)
    assert stages == [("receive", 1), ("prefill", 4), ("decode", 2), ("decode", 2), ("respond", 1)]


@pytest.mark.parametrize(
    ("stream", "before"),
    [
        (True, [("prefill", 11), ("respond", 10)]),
        (False, [("prefill", 11), ("decode.wait", 2), ("decode", 8)]),
    ],
)
def test_later_tokens_do_not_hold_up_the_first_one(stream, before):
    """A stream's tokens that are decoded while the first one is on its way are not on the way to it."""
    builder = RequestBuilder()
    builder.request.facts["stream"] = stream
    builder.part(Stage.PREFILL, 9, 20)
    builder.part(Stage.DECODE_WAIT, 20, 22)
    builder.part(Stage.DECODE, 22, 40)
    request = builder.answered(60, first_useful=30)
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.ttft) == [("receive", 9), *before]
    assert summarize(parts.completion)[1:] == [
        ("prefill", 11),
        ("decode.wait", 2),
        ("decode", 18),
        ("respond", 20),
    ]


def test_items_that_a_server_tells_of():
    """The path leads through the item that was ready last; what is no fetch of it is the wait for its decoding."""
    builder = RequestBuilder()
    builder.part(Stage.PREPROCESS, 1, 2)
    builder.part(Stage.RETRIEVAL, 3, 10, item=0)
    builder.part(Stage.MEDIA_DECODE, 10, 12, item=0)
    builder.part(Stage.RETRIEVAL, 3, 8, item=1)
    builder.part(Stage.MEDIA_DECODE, 12, 15, item=1)
    builder.part(Stage.ENCODE, 16, 30)
    request = builder.answered(31, first_useful=31)
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.ttft) == [
        ("receive", 1),
        ("preprocess", 1),
        ("unattributed", 1),
        ("retrieval", 5),
        ("media_decode.wait", 4),
        ("media_decode", 3),
        ("unattributed", 1),
        ("encode", 14),
        ("respond", 1),
    ]
    assert [interval.item for interval in parts.ttft] == [None, None, None, 1, 1, 1, None, None, None]
    assert parts.critical_item == 1


@pytest.mark.parametrize(
    ("parts", "useful", "completion"),
    [
        ([(Stage.PREFILL, 1, 5)], 6, [("receive", 1), ("prefill", 4), ("respond", 1), ("decode", 14)]),
        ([(Stage.PREFILL, 1, 5), (Stage.DECODE, 7, 9)], 6, [("receive", 1), ("prefill", 4), ("unattributed", 2), ("decode", 2), ("respond", 11)]),
        ([(Stage.PREFILL, 1, 5)], None, [("receive", 1), ("prefill", 4), ("respond", 15)]),
        ([(Stage.PREFILL, 1, 5), (Stage.HANDOFF, 8, 9)], None, [("receive", 1), ("prefill", 4), ("unattributed", 3), ("handoff", 1), ("respond", 11)]),
        ([(Stage.PREFILL, 1, 5), (Stage.RESPOND, 18, 20)], 6, [("receive", 1), ("prefill", 4), ("unattributed", 13), ("respond", 2)]),
        ([(Stage.RECEIVE, 0, 2), (Stage.RETRIEVAL, 3, 20)], None, [("receive", 2), ("unattributed", 1), ("retrieval", 17)]),
        ([(Stage.PREFILL, 30, 40)], 6, [("receive", 6), ("decode", 14)]),
    ],
)  # fmt: skip
def test_time_between_parts(parts, useful, completion):
    """Between parts all is unattributed, behind the last one of a stream it is decode, before it respond."""
    builder = RequestBuilder()
    builder.request.facts["stream"] = True
    for part in parts:
        builder.part(*part)
    request = builder.answered(20, first_useful=useful)
    found = partition(request)
    check_partition(request, found)
    assert summarize(found.completion) == completion


def test_parts_beside_hooks():
    """In a request that hooks saw, parts say what the server did where the hooks do not know, and nowhere else."""
    builder = RequestBuilder()
    ready = text_request(builder, 10)
    engine = EngineBuilder()
    first = engine.step(20, 30, tokens=30)
    builder.engine(
        engine.steps(), joined=ready, held=20, added=20, members=[(first, 30)], first_token=first, freed=30
    )
    request = builder.answered(40, first_useful=40)
    before = partition(request)
    builder.part(Stage.RETRIEVAL, 2, 4)
    builder.part(Stage.PREPROCESS, 6, 25)
    builder.part(Stage.RESPOND, 35, 45)
    parts = partition(request)
    check_partition(request, parts)
    assert summarize(parts.ttft)[:4] == [("receive", 2), ("retrieval", 2), ("receive", 2), ("preprocess", 4)]
    assert summarize(parts.ttft)[-2:] == [("respond", 5), ("respond", 5)]
    assert parts.ttft[4:-2] == before.ttft[1:-1]


TOLD = st.lists(
    st.tuples(
        st.sampled_from([stage for stage in Stage if stage is not Stage.UNATTRIBUTED]),
        st.integers(-2, 60),
        st.none() | st.integers(-2, 60),
        st.none() | st.integers(0, 3),
    ),
    max_size=20,
)


@given(TOLD, st.none() | st.integers(0, 50), st.integers(0, 50), st.booleans())
@settings(max_examples=300, deadline=None)
def test_whatever_a_server_tells(parts, useful, ended, hooked):
    """Any set of parts is covered exactly on both horizons, beside hooks or without."""
    builder = RequestBuilder()
    if hooked:
        text_request(builder, 3)
    for stage, begin, end, item in parts:
        builder.part(stage, begin, end, item=item)
    request = builder.answered(ended, first_useful=None if useful is None else min(useful, ended))
    found = partition(request)
    check_partition(request, found)
    assert found.critical_item is None or found.critical_item in request.items


@given(
    st.lists(
        st.tuples(st.sampled_from([s for s in Stage if s.kind in {Kind.WORK, Kind.WAIT}]), st.integers(1, 9)),
        min_size=1,
    ),
    st.data(),
)
def test_parts_back_to_back_leave_nothing_unattributed(parts, data):
    """Parts that follow each other without a gap are the partition, to the nanosecond."""
    builder = RequestBuilder()
    at, told = 1, [("receive", 1)]
    for stage, took in parts:
        builder.part(stage, at, at + took)
        told.append((stage.value, took))
        at += took
    useful = data.draw(st.integers(1, at))
    request = builder.answered(at + 1, first_useful=useful)
    found = partition(request)
    check_partition(request, found)
    assert all(interval.stage is not Stage.UNATTRIBUTED for interval in (*found.ttft, *found.completion))
    assert summarize(found.completion)[: len(told)] == told
