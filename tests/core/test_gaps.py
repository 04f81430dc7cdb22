"""Gaps in the records of a process: nothing is carried over them, and every reason is told."""

from __future__ import annotations

import pytest

from stagetrace import Recorder, read_spool
from stagetrace.gaps import NEVER, Cut, Gap, cut_between
from stagetrace.records import RECORD_BYTES, RecordKind, StopReason
from stagetrace.segment import HEADER_BYTES, read_segment
from stagetrace.spool import segment_paths

SMALL = HEADER_BYTES + 8 * RECORD_BYTES


def gap_of(recorder):
    """Lose records for want of room, and go on."""
    recorder._spool_bytes = 1
    while not recorder.dropped:
        recorder.record(RecordKind.HEAD, 1)
    recorder._spool_bytes, recorder._retry_at = 1 << 30, 0


def test_composition_is_not_carried_over_a_gap(tmp_path):
    """A step whose composition may have been lost does not get that of the step before."""
    engine = Recorder(tmp_path, SMALL)
    engine.record(RecordKind.STEP, 1, 5, 1, 1, 0)
    engine.record(RecordKind.STEP_DONE, 1)
    gap_of(engine)
    engine.record(RecordKind.STEP_DONE, 2)
    engine.record(RecordKind.FRAME, 3)
    engine.record(RecordKind.STEP, 3, 7, 1, 1, 0)
    engine.record(RecordKind.STEP_DONE, 3)
    engine.record(RecordKind.STEP_DONE, 4)
    data = read_spool(tmp_path)
    (steps,) = data.engines
    assert [(step.number, step.tokens) for step in steps.steps] == [(1, 5), (3, 7), (4, 7)]
    assert data.set_aside["step_without_beginning"] == 1
    assert data.dropped == 1


def test_string_whose_begin_is_gone_is_not_known(tmp_path):
    """A name of which only the end is left is not taken for a name."""
    api = Recorder(tmp_path, SMALL)
    for _ in range(7):
        api.record(RecordKind.LOOP_LAG, 0)
    number = api.define("a name of more than twenty bytes")
    api.record(RecordKind.RECEIVED, 1)
    api.record(RecordKind.ENGINE_REQUEST, 1, number)
    api.record(RecordKind.ENDED, 1)
    segment_paths(tmp_path)[0].unlink()
    data = read_spool(tmp_path)
    assert data.set_aside["text_not_recorded"] == 1
    assert len(data.requests) == 1


@pytest.mark.parametrize("kind", [RecordKind.RECEIVED, RecordKind.NOT_SAMPLED])
def test_engines_part_of_a_request_whose_name_is_gone(tmp_path, kind):
    """Where the front end's oldest segment begins between a name and its use, the engine's part is explained."""
    api, engine = Recorder(tmp_path, SMALL), Recorder(tmp_path, SMALL)
    for _ in range(6):
        api.record(RecordKind.LOOP_LAG, 0)
    api.record(kind, 1)
    number = api.define("name")
    api.record(RecordKind.ENGINE_REQUEST, 1, number)
    key = engine.define("name")
    for record in (RecordKind.HELD, RecordKind.ADDED, RecordKind.FREED):
        engine.record(record, key)
    next(path for path in segment_paths(tmp_path) if path.name.startswith("api")).unlink()
    assert read_spool(tmp_path).set_aside == {
        "begun_before_the_oldest_segment": 1,
        "engine_request_begun_before_the_oldest_segment": 1,
    }


def test_request_is_counted_once_however_many_of_its_records_are_left(tmp_path):
    """A request whose beginning is gone is one request, not as many as it has records."""
    api = Recorder(tmp_path, SMALL)
    api.record(RecordKind.RECEIVED, 1)
    for _ in range(7):
        api.record(RecordKind.LOOP_LAG, 0)
    for kind in (RecordKind.RESPONSE_STARTED, RecordKind.LAST_BYTE, RecordKind.ENDED):
        api.record(kind, 1)
    segment_paths(tmp_path)[0].unlink()
    assert read_spool(tmp_path).set_aside == {"begun_before_the_oldest_segment": 1}


def test_role_is_that_of_the_first_record_that_tells_it(tmp_path):
    """A segment that begins with a string is still its process's."""
    api = Recorder(tmp_path, SMALL)
    for number in range(8):
        api.record(RecordKind.RECEIVED, number)
    api.define("text")
    assert [read_segment(path).header.role for path in segment_paths(tmp_path)] == ["api", "api"]


@pytest.mark.parametrize(
    ("begin", "end", "cut"),
    [
        (0, 9, None),
        (0, 10, Cut.OFF),
        (12, 13, Cut.OFF),
        (20, 30, Cut.OFF),
        (21, 39, None),
        (50, 60, Cut.STOPPED),
    ],
)
def test_what_a_gap_touches(begin, end, cut):
    """A time that touches a gap is cut by it."""
    gaps = [Gap(10, 20, Cut.OFF, StopReason.OFF), Gap(40, NEVER, Cut.STOPPED, StopReason.COST)]
    assert cut_between(gaps, begin, end) is cut
