"""What is left of a spool is right: segments that are gone, recording that was off, records that were lost.

The real engine core runs a mixture of text and images; API server, engine and worker record into
segments of a hundred records.  What is read of a part of them must be what is read of them all.
"""

from __future__ import annotations

import random
import shutil

import pytest

from stagetrace import Recorder, partition, read_spool
from stagetrace.clock import ClockPair
from stagetrace.recorder import OFF_FILE
from stagetrace.records import NONE, RECORD_BYTES, RecordKind, StopReason
from stagetrace.segment import HEADER_BYTES, read_segment
from stagetrace.spool import segment_paths
from stagetrace.testing import MS, check_partition, summarize
from stagetrace_vllm.worker import wrap_execute_mm_encoder, wrap_execute_model

SMALL = HEADER_BYTES + 100 * RECORD_BYTES
REQUESTS = 60


class Server:
    """The engine core with a process of its own for each role, as far as recording can tell."""

    def __init__(self, driver):
        self.driver, self.engine = driver, driver.recorder
        self.engine._segment_bytes = SMALL
        self.api, self.worker = Recorder(driver.folder, SMALL), Recorder(driver.folder, SMALL)
        self.off = driver.folder / OFF_FILE
        driver.recorder = self.api
        driver._encode = wrap_execute_mm_encoder(driver._run_encoder, self.worker)
        driver._execute = wrap_execute_model(driver._run_model, self.worker)
        self._open = {}

    @property
    def recorders(self):
        """The recorders of all processes."""
        return self.api, self.engine, self.worker

    def request(self, name, **options):
        """Take a request."""
        self.driver.request(name, **options)
        number = self._open[name] = self.driver._numbers[name]
        if options["images"]:
            self.api.record(RecordKind.ITEM_BEGIN, number, 0, NONE, NONE, self.api.intern("image"))
            self.api.record(RecordKind.ITEM_END, number, 0)

    def step(self):
        """Run a step, and answer the requests that it ended."""
        self.api.look()
        self.driver.step()
        for name in self._open.keys() - self.driver.scheduler.requests.keys():
            number = self._open.pop(name)
            for kind in (RecordKind.LAST_BYTE, RecordKind.ENDED):
                self.api.record(kind, number)

    def run(self, seed=1, between=lambda step: None):
        """Run a mixture of requests to its end."""
        dice = random.Random(seed)
        step = 0
        for number in range(REQUESTS):
            images = [(5, 16, f"image-{number}")] if dice.random() < 0.3 else []
            self.request(
                f"r{number}", tokens=dice.randint(30, 300), outputs=dice.randint(1, 12), images=images
            )
            for _ in range(dice.randint(0, 5)):
                between(step)
                self.step()
                step += 1
        while self.driver.scheduler.has_requests():
            between(step)
            self.step()
            step += 1


@pytest.fixture
def make_server(drive, monkeypatch):
    """Make servers, one after the other, whose segments are opened at the time of their clock."""
    for module in ("stagetrace.recorder", "stagetrace_vllm.worker"):
        monkeypatch.setattr(f"{module}.LOOK_NS", 50 * MS)
    servers = []

    def make():
        for made in servers:
            made.driver.installation.uninstall()
        driver = drive(max_num_seqs=4)
        clock = driver.clock
        monkeypatch.setattr("stagetrace.segment.read_pair", lambda: ClockPair(clock.now, clock.now))
        servers.append(Server(driver))
        return servers[-1]

    return make


@pytest.fixture
def server(make_server):
    """A server."""
    return make_server()


@pytest.fixture
def whole(make_server):
    """What a server has to tell of the same requests when nothing is in the way."""
    server = make_server()
    server.run()
    return parts(server.driver.folder)


def parts(folder):
    """The partition of every request, by name, and all that was read."""
    data = read_spool(folder)
    found = {}
    for request in data.requests:
        check_partition(request, partition(request))
        found[request.engine_requests[0].identifier] = summarize(partition(request).completion)
    return found, data


def copy(folder, to, *gone):
    """A copy of a spool without some of its segments."""
    shutil.copytree(folder, to)
    for path in gone:
        (to / path.name).unlink()
    return to


def by_age(folder, role=""):
    """The segments of a spool, or of one process, the oldest first."""
    paths = [path for path in segment_paths(folder) if path.name.startswith(role)]
    return sorted(paths, key=lambda path: read_segment(path).header.pair.monotonic_ns)


def assert_part_of(part, whole):
    """What is left is right, what is not is counted, and all counts that must agree do."""
    (found, data), (expected, _) = part, whole
    assert {name: stages for name, stages in found.items() if stages != expected[name]} == {}
    assert [check for check in data.checks if not check.holds] == []
    assert data.set_aside["contradicted_step"] == data.set_aside["record_without_beginning"] == 0


def test_whole_spool_is_whole(server):
    """Many segments are read as one."""
    server.run()
    found, data = parts(server.driver.folder)
    assert len(found) == REQUESTS
    assert +data.set_aside == {}
    assert [check for check in data.checks if not check.holds] == []
    assert min(len(by_age(server.driver.folder, role)) for role in ("api", "engine", "worker")) >= 3


@pytest.mark.parametrize("role", ["", "api", "engine", "worker"])
def test_oldest_segments_are_gone(server, tmp_path, role):
    """Requests that began before the oldest segment are set aside, and the others are as they were."""
    server.run()
    folder = server.driver.folder
    whole = parts(folder)
    paths = by_age(folder, role)
    last = min(paths.index(path) for path in {path.name.split("-")[2]: path for path in paths}.values())
    left = []
    for gone in range(1, last + 1):
        part = parts(copy(folder, tmp_path / f"without-{gone}", *paths[:gone]))
        assert_part_of(part, whole)
        left.append(len(part[0]))
        cut = part[1].set_aside["begun_before_the_oldest_segment"]
        assert len(part[0]) + cut <= REQUESTS
        assert part[1].set_aside["request_without_engine"] == 0
        assert part[1].set_aside["engine_request_without_front_end"] == 0
    assert left == sorted(left, reverse=True)
    assert left[0] > REQUESTS // 2


@pytest.mark.parametrize("role", ["api", "engine", "worker"])
def test_segment_in_the_middle_is_gone(server, tmp_path, role):
    """Requests that were in flight over a missing segment are set aside, and the others are as they were."""
    server.run()
    folder = server.driver.folder
    whole = parts(folder)
    for place, path in enumerate(by_age(folder, role)[1:-1]):
        part = parts(copy(folder, tmp_path / f"without-{place}", path))
        assert_part_of(part, whole)
        assert part[1].set_aside["in_flight_over_a_missing_segment"] > 0
        assert len(part[0]) > REQUESTS // 4


def test_spool_keeps_within_its_size(whole, make_server):
    """A spool that may not grow removes its oldest segments, says so, and what is left is right."""
    server = make_server()
    limit = 9 * SMALL
    for recorder in server.recorders:
        recorder._spool_bytes = limit
    sizes = []
    server.run(between=lambda step: sizes.append(sum(p.stat().st_size for p in by_age(server.driver.folder))))
    found, data = part = parts(server.driver.folder)
    assert limit - SMALL < max(sizes) <= limit
    assert_part_of(part, whole)
    assert data.dropped == 0
    segments, size = data.removed
    assert segments * SMALL == size > 0
    assert len(by_age(server.driver.folder)) + segments == sum(r._sequence for r in server.recorders)
    assert data.set_aside["request_without_engine"] == data.set_aside["engine_request_without_front_end"] == 0
    assert 5 < len(found) < REQUESTS


def test_switched_off_and_on_again(whole, make_server):
    """Recording stops and goes on in every process; requests that were in flight are set aside by reason."""
    server = make_server()

    def switch(step):
        if step == 40:
            server.off.touch()
        elif step == 80:
            server.off.unlink()

    server.run(between=switch)
    found, data = part = parts(server.driver.folder)
    assert_part_of(part, whole)
    assert data.dropped == 0
    # The worker has nothing to record when the engine marks no steps, and need not find out.
    processes = [data.processes[recorder.process] for recorder in (server.api, server.engine)]
    gaps = [[gap for gap in process.gaps if gap.reason] for process in processes]
    assert [[gap.reason for gap in mine] for mine in gaps] == [[StopReason.OFF]] * 2
    assert min(gap.end - gap.begin for (gap,) in gaps) > 200 * MS
    off = max(gap.begin for (gap,) in gaps) + 50 * MS
    on = min(gap.end for (gap,) in gaps)
    records = [record for path in segment_paths(server.driver.folder) for record in read_segment(path)]
    timed = [record[0] for record in records if record[6] != RecordKind.DEFINE]
    assert [time for time in timed if off < time < on] == []
    assert data.set_aside["in_flight_while_recording_was_off"] > 0
    assert REQUESTS // 3 < len(found) < REQUESTS - 4
    # The first step behind the gap does not reach back over it.
    (steps,), ((gap,)) = data.engines, gaps[1]
    assert steps.begins[steps.scheduled_from(gap.end)] >= gap.end


def test_off_from_the_start(whole, make_server):
    """A server that starts switched off leaves nothing, and records from when it is switched on."""
    server = make_server()
    server.off.parent.mkdir()
    server.off.touch()
    written = []

    def switch(step):
        if step == 40:
            written.extend(segment_paths(server.driver.folder))
            server.off.unlink()

    server.run(between=switch)
    found, data = part = parts(server.driver.folder)
    assert written == []
    assert_part_of(part, whole)
    assert REQUESTS // 3 < len(found) < REQUESTS - 4
    assert data.dropped == 0


@pytest.mark.parametrize("role", ["api", "engine", "worker"])
def test_records_that_are_lost(whole, make_server, role):
    """While a process has no room, its records are counted, and requests in flight are set aside."""
    server = make_server()
    recorder = getattr(server, role)

    def limit(step):
        if step == 20:
            recorder._spool_bytes = 1
        elif step == 110:
            recorder._spool_bytes = 1 << 30

    server.run(between=limit)
    found, data = part = parts(server.driver.folder)
    assert data.dropped == recorder.dropped > 0
    (expected, _), (_, data) = whole, part
    assert {name: stages for name, stages in found.items() if stages != expected[name]} == {}
    assert data.set_aside["in_flight_while_records_were_lost"] > 0
    assert [check for check in data.checks if not check.holds] == []


def test_a_process_that_stops_itself(whole, make_server):
    """Behind a blown fuse the engine marks no step, and requests that were in flight are set aside."""
    server = make_server()

    def blow(step):
        if step == 60:
            server.engine.note_cost(60, 100 * MS, 1000 * MS)

    server.run(between=blow)
    found, data = part = parts(server.driver.folder)
    assert_part_of(part, whole)
    (gap,) = [gap for process in data.processes.values() for gap in process.gaps]
    assert gap.reason is StopReason.COST
    assert data.set_aside["in_flight_when_recording_stopped_itself"] > 0
    assert max(step.number for steps in data.engines for step in steps.steps) <= 61
    trace = server.driver.scheduler.__dict__["_stagetrace_steps"]
    assert (trace.blocked, trace.loads) == ({}, [])
    assert 5 < len(found) < REQUESTS
