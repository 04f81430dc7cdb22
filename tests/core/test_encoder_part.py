"""The encoder's part of a step where a device runs it: its own duration, laid where the device got to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace import Recorder, partition, read_spool
from stagetrace.records import NONE, RecordKind
from stagetrace.stages import Stage
from stagetrace.testing import EngineBuilder, RequestBuilder, check_partition, summarize
from stagetrace.timeline import EngineRequest, RequestTimeline, Step, Steps

MS = 1_000_000


def image_in(engine, step, *, freed):
    """The completion of a request whose only image is encoded in a step, and that ends with it."""
    builder = RequestBuilder()
    mine = builder.engine(
        engine.steps(), joined=0, held=0, added=0, members=[(step, 200)], first_token=step, freed=freed
    )
    mine.encoded = {step: [0]}
    request = builder.answered(freed, first_useful=freed)
    parts = partition(request)
    check_partition(request, parts)
    return summarize(parts.completion)


def test_launched_while_the_step_before_still_runs():
    """Launched at 12 while the device is busy until 50: the encoder's 30 ms begin at 50, not at 12."""
    engine = EngineBuilder()
    engine.step(0, 50, tokens=30)
    mine = engine.step(10, 100, tokens=200, encoder=(12, 14), device=30)
    assert image_in(engine, mine, freed=100) == [
        ("prefill.wait(unknown)", 50),
        ("encode", 30),
        ("prefill", 20),
    ]


def test_launched_on_an_idle_device():
    """Nothing runs before it: the encoder begins with its launch, and what comes before is not the encoder's."""
    engine = EngineBuilder()
    mine = engine.step(0, 100, tokens=200, encoder=(15, 17), device=30)
    assert image_in(engine, mine, freed=100) == [("prefill", 15), ("encode", 30), ("prefill", 55)]


def test_device_that_took_longer_than_the_step_is_cut_and_counted():
    """An encoder that overlaps the step before, as between pipeline ranks, fills its step and no more."""
    engine = EngineBuilder()
    engine.step(0, 50, tokens=30)
    mine = engine.step(10, 100, tokens=200, encoder=(12, 14), device=70)
    engine.step(60, 130, encoder=(62, 63), device=30)
    engine.step(70, 140, encoder=(72, 73), device=0)
    assert image_in(engine, mine, freed=100) == [("prefill.wait(unknown)", 50), ("encode", 50)]
    assert engine.steps().encoder_part(1) == (50 * MS, 100 * MS)
    assert engine.steps().encoder_parts_outside() == 1


def test_part_that_lies_wholly_before_its_step_is_counted():
    """By the host's clock alone the encoder's part cannot end before the step before does."""
    engine = EngineBuilder()
    engine.step(0, 50, tokens=30)
    mine = engine.step(10, 100, tokens=200, encoder=(12, 14))
    assert image_in(engine, mine, freed=100) == [("prefill.wait(unknown)", 50), ("prefill", 50)]
    assert engine.steps().encoder_parts_outside() == 1


@st.composite
def device_run(draw):
    """Two steps in flight on one device: the steps as recorded, and the truth.

    The host launches a step as soon as the one before the last is done; the device runs the
    encoders and the rest strictly one after the other; the host learns of an end some time after it.
    """
    steps, encoded, delays, starts = [], {}, [], []
    device, dones = 0, [0, 0]
    count = draw(st.integers(1, 8))
    most = draw(st.sampled_from([0, 30]))
    for number in range(1, count + 1):
        scheduled = max(dones[-2], steps[-1].scheduled if steps else 0) + draw(st.integers(1, 50))
        launched = scheduled + draw(st.integers(0, 20))
        encoder = draw(st.none() | st.integers(0, 400))
        start = max(device, launched)
        device = start + (encoder or 0) + draw(st.integers(1, 100))
        done = max(device + draw(st.integers(0, most)), dones[-1])
        step = Step(number, scheduled=scheduled, tokens=5, done=done)
        if encoder is not None:
            step.encoder_begin, step.encoder_end, step.encoder_device_ns = launched, launched + 1, encoder
            encoded[number] = [0]
        steps.append(step)
        dones.append(done)
        delays.append(done - device)
        starts.append(start)
    return steps, encoded, delays, starts


def whole_run(steps, encoded):
    """A request that is in every step and whose images are encoded in some."""
    end = steps[-1].done
    request = RequestTimeline("r", "api", received=0, first_useful=end, last_byte=end, ended=end)
    engine = EngineRequest("r", joined=0, steps=Steps("e", steps), held=0, added=0)
    engine.members, engine.first_token, engine.freed = [(1, 5)], len(steps), end
    engine.encoded = encoded
    request.engine_requests.append(engine)
    return request


@given(device_run())
@settings(max_examples=400, deadline=None)
def test_encode_is_what_the_device_took(run):
    """``encode`` is the device's time up to what the host learned late, however early the launches were."""
    steps, encoded, delays, starts = run
    request = whole_run(steps, encoded)
    parts = partition(request)
    check_partition(request, parts)
    found = {i.first_step: (i.begin, i.duration) for i in parts.completion if i.stage is Stage.ENCODE}
    late = [0, *delays]
    for number in encoded:
        took = steps[number - 1].encoder_device_ns
        begin, duration = found.get(number, (starts[number - 1], 0))
        assert took - late[number - 1] <= duration <= took
        assert starts[number - 1] <= begin <= starts[number - 1] + late[number - 1]
    assert Stage.UNATTRIBUTED not in {i.stage for i in parts.completion}


# --- from records ----------------------------------------------------------------------------------


class Server:
    """An API server, an engine and its workers, whose device is busy with step 1 until 50 ms."""

    def __init__(self, folder, ranks=1):
        self.folder = folder
        self.api, self.engine = Recorder(folder), Recorder(folder)
        self.ranks = [Recorder(folder) for _ in range(ranks)]
        self.key = self.engine.define("image")
        self.api.record_at(0, RecordKind.RECEIVED, 1)
        self.api.record_at(0, RecordKind.ENGINE_REQUEST, 1, self.api.define("image"))
        self.engine.record_at(9 * MS, RecordKind.HELD, self.key, 200, 1, 1)
        self.engine.record_at(9 * MS, RecordKind.ADDED, self.key)
        self.step(1, 1, 50, requests=0)
        self.step(2, 10, 100, requests=1)
        self.engine.record_at(10 * MS, RecordKind.MEMBER, self.key, 2, 200)
        self.engine.record_at(10 * MS, RecordKind.STEP_ITEM, 2, self.key, 0)
        self.engine.record_at(100 * MS, RecordKind.FIRST_TOKEN, self.key, 2)

    def step(self, number, scheduled, done, requests):
        """A step that holds so many of the requests that are recorded here."""
        self.engine.record_at(scheduled * MS, RecordKind.STEP, number, 200, requests, requests, 0)
        took = (done - scheduled) * MS
        self.engine.record_at(done * MS, RecordKind.STEP_DONE, number, took, 0)

    def encode(self, rank, launched, took_ns=None):
        """A worker launches the encoder, and learns later how long its device took."""
        worker, engine = self.ranks[rank], self.engine.number
        worker.record_at(launched * MS, RecordKind.STEP_BEGIN, 2, engine)
        worker.record_at(launched * MS, RecordKind.ENCODE_BEGIN, 2, engine, 1)
        worker.record_at((launched + 1) * MS, RecordKind.ENCODE_END, 2, engine)
        if took_ns is not None:
            low, high = took_ns & NONE, took_ns >> 32
            worker.record_at(150 * MS, RecordKind.ENCODE_DEVICE, 2, engine, low, high)

    def read(self):
        """End the request and read everything back."""
        self.engine.record_at(100 * MS, RecordKind.FREED, self.key, self.engine.intern("stopped"), 1)
        text = self.api.define("image")
        self.api.record_at(101 * MS, RecordKind.OUTPUT_FIRST, 1, text)
        self.api.record_at(101 * MS, RecordKind.OUTPUT_FINISHED, 1, text, self.api.intern("stop"))
        for kind in (RecordKind.FIRST_USEFUL, RecordKind.LAST_BYTE, RecordKind.ENDED):
            self.api.record_at(102 * MS, kind, 1)
        return read_spool(self.folder)


def encode_of(data):
    """Milliseconds of ``encode`` of the only request."""
    (request,) = data.requests
    parts = partition(request)
    check_partition(request, parts)
    return [duration for stage, duration in summarize(parts.completion) if stage == "encode"]


def test_duration_comes_later_than_its_step(tmp_path):
    """A duration that was read after the step was done belongs to that step."""
    server = Server(tmp_path)
    server.encode(0, 12, 30 * MS)
    data = server.read()
    assert encode_of(data) == [30]
    assert data.set_aside == {}
    assert all(check.holds for check in data.checks)


def test_of_several_ranks_the_longest_counts(tmp_path):
    """Tensor parallel ranks encode side by side: the step goes on when the slowest is done."""
    server = Server(tmp_path, ranks=3)
    for rank, took in enumerate((20, 35, 30)):
        server.encode(rank, 12 + rank, took * MS)
    assert encode_of(server.read()) == [35]


def test_without_the_duration_the_launch_is_not_taken_for_the_encoder(tmp_path):
    """Where a duration is missing there is no encode, and it is counted; the item still counts as encoded."""
    server = Server(tmp_path)
    server.encode(0, 60)
    data = server.read()
    assert encode_of(data) == []
    assert data.set_aside == {"encoder_part_without_device_time": 1}
    assert all(check.holds for check in data.checks)


def test_duration_longer_than_its_step_is_counted(tmp_path):
    """What does not fit into the step is cut off and said, also when another process recorded it."""
    server = Server(tmp_path)
    server.encode(0, 12, 60 * MS)
    data = server.read()
    assert encode_of(data) == [50]
    assert data.set_aside == {"encoder_part_outside_its_step": 1}


@pytest.mark.parametrize(("took_ns", "known"), [(5 << 32, 5 << 32), (1 << 62, None)])
def test_large_durations(tmp_path, took_ns, known):
    """A duration may have more than 32 bits; one that no host has lived through is damage, and counted."""
    server = Server(tmp_path)
    server.encode(0, 12, took_ns)
    data = server.read()
    assert data.engines[0].steps[1].encoder_device_ns == known
    assert data.set_aside["unknown_value"] == (known is None)
