"""Records of the recording API as they come: in any order, broken, damaged."""

from __future__ import annotations

import shutil

import pytest
from damage import DAMAGE, KIND, SMALL, TIME, altered, check_whatever_is_read, damaged, lay_out, written
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace import Recorder, Stage, partition, read_spool
from stagetrace.records import NONE, Fact, ItemFact, Misuse, RecordKind, StageCode
from stagetrace.testing import MS, check_partition

API = (
    *(RecordKind.STAGE_BEGIN, RecordKind.STAGE_END, RecordKind.ITEM_FACT, RecordKind.RESUMED),
    RecordKind.MISUSED,
)
END = None


def record(recorder, number, events):
    """Record events of parts: ``(part, milliseconds, stage or END)``."""
    for part, at, stage in events:
        time = round(at * MS)
        if stage is END:
            recorder.record_at(time, RecordKind.STAGE_END, number, part)
        else:
            code = StageCode[stage.name]
            recorder.record_at(time, RecordKind.STAGE_BEGIN, number, part, code, NONE)


def ended_request(folder, events, *, ended=100):
    """The one request of a spool, from 0 to its end, with what was set aside."""
    recorder = Recorder(folder)
    recorder.record_at(0, RecordKind.RECEIVED, 1)
    record(recorder, 1, events)
    recorder.record_at(ended * MS, RecordKind.LAST_BYTE, 1)
    recorder.record_at(ended * MS, RecordKind.ENDED, 1)
    data = read_spool(folder)
    (request,) = data.requests
    check_partition(request, partition(request))
    return request, data.set_aside


@pytest.mark.parametrize(
    ("events", "parts", "counted"),
    [
        ([(0, 5, Stage.ENCODE), (0, 9, END)], [(Stage.ENCODE, 5, 9)], {}),
        ([(0, 5, Stage.ENCODE)], [(Stage.ENCODE, 5, None)], {"stage_without_end": 1}),
        ([(0, 9, END)], [], {"stage_end_without_begin": 1}),
        (
            [(0, 9, Stage.ENCODE), (0, 5, END)],
            [(Stage.ENCODE, 9, None)],
            {"stage_end_without_begin": 1, "stage_without_end": 1},
        ),
        (
            [(0, 5, Stage.ENCODE), (0, 6, Stage.ENCODE), (0, 9, END)],
            [(Stage.ENCODE, 5, 9)],
            {"stage_begun_twice": 1},
        ),
        (
            [(0, 5, Stage.ENCODE), (0, 7, END), (0, 8, END)],
            [(Stage.ENCODE, 5, 7)],
            {"stage_end_without_begin": 1},
        ),
        (
            [(0, 5, Stage.ENCODE), (0, 7, END), (0, 8, Stage.ENCODE)],
            [(Stage.ENCODE, 5, 7)],
            {"stage_begun_twice": 1},
        ),
        (
            [(0, 5, Stage.ENCODE_WAIT), (0, 7, Stage.ENCODE), (0, 8, END)],
            [(Stage.ENCODE_WAIT, 5, 7), (Stage.ENCODE, 7, 8)],
            {},
        ),
        (
            [(0, 5, Stage.ENCODE), (0, 5, Stage.ENCODE_WAIT), (0, 5, END)],
            [(Stage.ENCODE_WAIT, 5, 5), (Stage.ENCODE, 5, 5)],
            {},
        ),
        ([(0, 100, Stage.ENCODE), (0, 101, END)], [(Stage.ENCODE, 100, 101)], {"stage_after_its_request": 1}),
    ],
)
def test_broken_parts(tmp_path, events, parts, counted):
    """Whatever is missing, doubled or in the wrong order: what is there is used, the rest is counted."""
    request, set_aside = ended_request(tmp_path / "spool", events)
    found = [(p.stage, p.begin / MS, None if p.end is None else p.end / MS) for p in request.parts]
    assert (found, set_aside) == (parts, counted)


def test_parts_of_nobody_are_counted(tmp_path):
    """Parts whose request is not known are set aside, each of them."""
    recorder = Recorder(tmp_path)
    record(recorder, 7, [(0, 1, Stage.ENCODE), (0, 2, END), (1, 1, Stage.ENCODE)])
    recorder.record(RecordKind.ITEM_FACT, 7, 0, ItemFact.WIDTH, 3)
    data = read_spool(tmp_path)
    assert (data.requests, data.set_aside) == ([], {"record_without_beginning": 3})


def test_codes_that_are_not_known_are_counted(tmp_path):
    """A later version may know more stages, facts and reasons than this one."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    recorder.record(RecordKind.STAGE_BEGIN, 1, 0, 999)
    recorder.record(RecordKind.ITEM_FACT, 1, 0, 999)
    recorder.record(RecordKind.MISUSED, 0, 999)
    recorder.record(RecordKind.MISUSED, 0, Misuse.UNKNOWN_FACT)
    assert read_spool(tmp_path).set_aside == {"unknown_value": 3, "unknown_fact": 1, "open_request": 1}


def test_every_stage_has_a_code():
    """Whatever stage there is but the one that is none can be recorded."""
    assert {code.name for code in StageCode} == {stage.name for stage in Stage} - {"UNATTRIBUTED"}


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.integers(0, 60),
        st.sampled_from([END, *(s for s in Stage if s != "unattributed")]),
    ),
    max_size=24,
)


@pytest.mark.slow
@given(EVENTS, st.integers(0, 60), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_order_of_records_does_not_matter(tmp_path_factory, events, ended, order):
    """Any events are read, cover the request exactly, and mean the same in any order."""
    folder = tmp_path_factory.mktemp("spool")
    shuffled = events.copy()
    order.shuffle(shuffled)
    found = [
        ended_request(folder / name, some, ended=ended) for name, some in (("a", events), ("b", shuffled))
    ]
    (one, counted), (other, counted_too) = found
    assert counted == counted_too
    assert partition(one) == partition(other)
    shutil.rmtree(folder)


class Scene:
    """A front end and a worker that tell of requests of 40 ms each through the API's records."""

    def __init__(self, folder):
        self.front, self.worker = Recorder(folder, SMALL), Recorder(folder, SMALL)

    def request(self, number):
        """Two images are fetched beside each other, one is encoded by the worker, and the answer is streamed."""
        begin, front = number * 40, self.front
        name = f"{front.process}-{number}"

        def at(after):
            return round((begin + after) * MS)

        front.record_at(at(0), RecordKind.RECEIVED, number)
        front.record_at(at(0), RecordKind.FACT_NUMBER, number, Fact.STREAM, 1)
        for item in range(2):
            code = StageCode.RETRIEVAL
            front.record_at(at(1), RecordKind.STAGE_BEGIN, number, item, code, item)
            front.record_at(at(2), RecordKind.ITEM_FACT, number, item, ItemFact.FORMAT, front.intern("png"))
            front.record_at(at(2), RecordKind.ITEM_FACT, number, item, ItemFact.BYTES, 1000)
            front.record_at(at(5 + item), RecordKind.STAGE_END, number, item)
        front.record_at(at(7), RecordKind.STAGE_BEGIN, number, 2, StageCode.ENCODE_WAIT, 0)
        self.worker.record_at(at(8), RecordKind.RESUMED, number + 100, self.worker.define(name))
        self.worker.record_at(at(9), RecordKind.STAGE_BEGIN, number + 100, 0, StageCode.ENCODE, NONE)
        self.worker.record_at(at(12), RecordKind.STAGE_END, number + 100, 0)
        self.worker.record_at(at(12), RecordKind.MISUSED, 0, Misuse.UNKNOWN_FACT)
        front.record_at(at(13), RecordKind.STAGE_END, number, 2)
        front.record_at(at(20), RecordKind.FIRST_USEFUL, number, NONE)
        front.record_at(at(30), RecordKind.LAST_BYTE, number)
        front.record_at(at(31), RecordKind.ENDED, number)


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """The segments of a scene of eight requests."""
    folder = tmp_path_factory.mktemp("scene")
    scene = Scene(folder)
    for number in range(1, 9):
        scene.request(number)
    data = read_spool(folder)
    assert [len(request.parts) for request in data.requests] == [4] * 8
    assert data.set_aside == {"unknown_fact": 8}
    return written(folder)


@pytest.mark.slow
@given(DAMAGE)
@settings(max_examples=100, deadline=None)
def test_damaged_files_are_read(tmp_path_factory, contents, damage):
    """Whatever happens to the files of a spool, it is read, and what is read of it is possible."""
    folder = tmp_path_factory.mktemp("damaged")
    lay_out(folder / "spool", damaged(contents, damage))
    check_whatever_is_read(folder / "spool", folder / "dataset")
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", API, ids=lambda kind: kind.name)
def test_no_field_breaks_the_reader(tmp_path, contents, kind):
    """Every field of the API's records may hold the largest number, and one of them may have come too early."""
    assert altered(contents, kind, KIND, 0) != contents
    largest = [(1 << 61) - 1, *[NONE] * 5, 0xFFFF]
    changes = [(field, value, slice(None)) for field, value in enumerate(largest)]
    for change in (*changes, (TIME, 1, slice(2, 3))):
        lay_out(tmp_path / "spool", altered(contents, kind, *change))
        check_whatever_is_read(tmp_path / "spool", tmp_path / "dataset")


def test_process_of_another_clock_is_counted(tmp_path, monkeypatch):
    """What another host recorded of a request is set aside: its times cannot be laid beside ours."""
    front, worker = Recorder(tmp_path), Recorder(tmp_path)
    front.record(RecordKind.RECEIVED, 1)
    monkeypatch.setattr("stagetrace.segment.clock_domain", lambda: "another boot/another namespace")
    worker.record(RecordKind.RESUMED, 1, worker.define(f"{front.process}-1"))
    record(worker, 1, [(0, 1, Stage.ENCODE), (0, 2, END)])
    front.record(RecordKind.LAST_BYTE, 1)
    front.record(RecordKind.ENDED, 1)
    data = read_spool(tmp_path)
    assert data.set_aside == {"resumed_request_of_another_clock": 1}
    assert data.requests[0].parts == []
