"""Which requests of a growing spool are closed: each is handed out once, as it will be read afterwards."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections import Counter

import pytest
from serving import Server

from stagetrace import Outcome, Recorder, partition, read_spool
from stagetrace.clock import monotonic_ns
from stagetrace.recorder import OFF_FILE
from stagetrace.records import MAGIC, RECORD, RECORD_BYTES, RecordKind
from stagetrace.segment import HEADER_BYTES
from stagetrace.spool import segment_paths
from stagetrace_export import window
from stagetrace_export.closed import ClosedRequests

SMALL = HEADER_BYTES + 100 * RECORD_BYTES
LARGE = HEADER_BYTES + 5000 * RECORD_BYTES

WRITER = """
import sys, time
from pathlib import Path
from stagetrace import Recorder
from stagetrace.records import RecordKind as K
recorder = Recorder(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(1, int(sys.argv[3]) + 1):
    recorder.record(K.RECEIVED, number)
    recorder.record(K.LAST_BYTE, number)
    recorder.record(K.ENDED, number)
recorder.record(K.RECEIVED, number + 1)
print("written", flush=True)
time.sleep(60)
"""


@pytest.fixture
def spool(tmp_path):
    """The folder of a spool."""
    return tmp_path / "spool"


@pytest.fixture
def killed_writer(spool):
    """A process that has recorded 300 requests and received another one, and was killed."""
    command = [sys.executable, "-c", WRITER, str(spool), str(SMALL), "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)


def told(request):
    """All that is told of a request."""
    return request.outcome, partition(request), request.facts


def handed(source, **how):
    """The requests that a poll gives, by id, with all that is told of them; committed."""
    found = {request.request_id: told(request) for request in source.poll(**how).requests}
    source.commit()
    return found


def rest(source):
    """All that a spool still gives when its processes have ended, with the number of polls."""
    found, more, polls = Counter(), True, 0
    while more:
        closed = source.poll(final=True)
        found.update(request.request_id for request in closed.requests)
        source.commit()
        more, polls = closed.more, polls + 1
    return found, polls


@pytest.mark.parametrize("segment_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("seed", range(2))
def test_live_and_afterwards_are_the_same(spool, tmp_path, seed, segment_bytes):
    """Each request is handed out once over restarts, with the intervals and facts that the finished spool gives."""
    server = Server(spool, segment_bytes, seed)
    live = {}
    with server.clocks():
        server.traffic(120)
        server.at(3000, server.traffic, 40)
        for poll in range(32):
            server.run(170 if poll < 28 else 5000)
            if poll % 5 == 0:
                source = ClosedRequests(spool, tmp_path / "position")
            found = handed(source)
            assert not found.keys() & live.keys()
            live |= found
        assert live == {request.request_id: told(request) for request in read_spool(spool).requests}
    assert len(live) == 160
    assert source.counts["open"] == source.counts["set_aside"] == source.counts["removed"] == 0


def test_what_is_held_does_not_grow(spool):
    """What is held is what is in flight, however much has been recorded, and though another engine is idle."""
    server, idle = Server(spool, LARGE), Recorder(spool)
    held = []
    with server.clocks():
        idle.record(RecordKind.STEP, 1, 1, 1)
        idle.record(RecordKind.STEP_DONE, 1)
        source = ClosedRequests(spool)
        for _ in range(6):
            server.traffic(60, spacing_ms=20)
            server.run(1500)
            handed(source)
            held.append(source._window.held_bytes)
    assert 4 * max(held) < read_spool(spool).records * RECORD_BYTES


def test_segments_that_were_exported_are_not_needed(spool, tmp_path):
    """After a restart only the segments from the position on are read; older ones may be gone."""
    server = Server(spool, SMALL)
    with server.clocks():
        server.traffic(200)
        server.run(8000)
        before = handed(ClosedRequests(spool, tmp_path / "position"))
        stored = json.loads((tmp_path / "position").read_text())["processes"]
        for path in segment_paths(spool):
            process, sequence = path.stem.split("-")[2:]
            if int(sequence) < stored[process]["segment"]:
                path.unlink()
        assert len(segment_paths(spool)) < 10
        server.traffic(20)
        server.run(30000)
        source = ClosedRequests(spool, tmp_path / "position")
        after = handed(source)
    assert len(before) == 200
    assert len(after) == 20
    assert source.counts["removed"] == 0


def test_idle_server_holds_nothing_back(spool):
    """An answered request is closed a second after its end, though no process writes any more."""
    server = Server(spool, LARGE)
    with server.clocks():
        source = ClosedRequests(spool)
        server.receive(image=True)
        server.run(50)
        assert handed(source) == {}
        server.run(1000)
        closed = source.poll()
    assert [request.outcome for request in closed.requests] == [Outcome.OK]
    assert closed.partial == 0


def test_open_step_keeps_a_cancelled_request_open(spool):
    """While the step of a request whose client left goes on, it is held back; after the grace time it is partial."""
    api, engine = Recorder(spool), Recorder(spool)
    engine.role = "engine"
    server = Server(spool, LARGE)  # its clock
    with server.clocks():
        _leave_within_a_step(server, api, engine)
        source = ClosedRequests(spool, grace_ns=3_000_000_000)
        server.run(2000)
        assert source.poll().requests == []
        server.run(2000)
        closed = source.poll()
        assert (len(closed.requests), closed.partial) == (1, 1)
        source.commit()
        engine.record(RecordKind.STEP_DONE, 1, 1)
        server.run(5000)
        assert source.poll().requests == []
        assert source.counts["partial"] == 1


def test_step_that_ends_closes_a_cancelled_request(spool):
    """Once the engine has let go of the request and that step has ended, it is closed."""
    api, engine = Recorder(spool), Recorder(spool)
    engine.role = "engine"
    server = Server(spool, LARGE)  # its clock
    with server.clocks():
        key = _leave_within_a_step(server, api, engine)
        source = ClosedRequests(spool)
        server.run(2000)
        assert source.poll().requests == []
        engine.record(RecordKind.FREED, key, engine.intern("aborted"), 0)
        assert source.poll().requests == []
        engine.record(RecordKind.STEP_DONE, 1, 2_005_000_000)
        closed = source.poll()
        assert (len(closed.requests), closed.partial) == (1, 0)
        assert partition(closed.requests[0]) == partition(read_spool(spool).requests[0])


def test_engine_that_has_not_let_go_keeps_a_request_open(spool):
    """An answered request waits for the engine to let go of it, with what is told then."""
    api, engine = Recorder(spool), Recorder(spool)
    engine.role = "engine"
    server = Server(spool, LARGE)  # its clock
    with server.clocks():
        key = _leave_within_a_step(server, api, engine, RecordKind.LAST_BYTE)
        engine.record(RecordKind.STEP_DONE, 1, 5_000_000)
        source = ClosedRequests(spool)
        server.run(2000)
        assert source.poll().requests == []
        engine.record(RecordKind.FREED, key, engine.intern("stopped"), 7)
        (request,) = source.poll().requests
    assert request.facts["output_tokens"] == 7


def test_item_under_way_keeps_a_cancelled_request_open(spool):
    """Which of a request's items was ready last is not known before all are."""
    api, server = Recorder(spool), Server(spool, LARGE)
    with server.clocks():
        api.record(RecordKind.RECEIVED, 1)
        for item in (0, 1):
            api.record(RecordKind.ITEM_BEGIN, 1, item)
        server.run(5)
        api.record(RecordKind.DISCONNECTED, 1)
        source = ClosedRequests(spool)
        server.run(2000)
        api.record(RecordKind.ITEM_END, 1, 0)
        assert source.poll().requests == []
        server.run(1000)
        api.record(RecordKind.ITEM_END, 1, 1)
        (request,) = source.poll().requests
        assert partition(request) == partition(read_spool(spool).requests[0])
        assert partition(request).critical_item == 1


def test_holder_whose_name_is_in_an_older_segment(spool):
    """Who was at the head of the queue is known, though the segment with its name does not matter any more."""
    server = Server(spool, SMALL)
    with server.clocks():
        source = ClosedRequests(spool)
        for _ in range(4):
            server.receive(tokens=400)
        server.run(20)
        server.receive(tokens=1)
        server.run(400)
        server.receive(tokens=1000)
        found = {}
        for _ in range(50):
            server.run(100)
            found |= handed(source)
        afterwards = {request.request_id: told(request) for request in read_spool(spool).requests}
    assert found == afterwards
    assert "chat-5" in {i.holder for i in list(found.values())[-1][1].completion}


def record(recorder, *numbers):
    """Record requests from their receipt to their end."""
    for number in numbers:
        for kind in (RecordKind.RECEIVED, RecordKind.LAST_BYTE, RecordKind.ENDED):
            recorder.record(kind, number)


def _leave_within_a_step(server, api, engine, end=RecordKind.DISCONNECTED):
    api.record(RecordKind.RECEIVED, 1)
    api.record(RecordKind.ENGINE_REQUEST, 1, api.define("chat"))
    key = engine.define("chat")
    engine.record(RecordKind.HELD, key, 30, 8)
    engine.record(RecordKind.ADDED, key)
    engine.record(RecordKind.STEP, 1, 30, 1, 1)
    engine.record(RecordKind.MEMBER, key, 1, 30)
    server.run(5)
    api.record(end, 1)
    if end is RecordKind.LAST_BYTE:
        api.record(RecordKind.ENDED, 1)
    return key


def test_without_commit_all_comes_again(spool, tmp_path):
    """What was handed out and not committed is handed out again, by the same source and after a restart."""
    server = Server(spool, SMALL)
    with server.clocks():
        server.traffic(50)
        server.run(5000)
        source = ClosedRequests(spool, tmp_path / "position")
        first = [request.request_id for request in source.poll().requests]
        again = [request.request_id for request in source.poll().requests]
        restarted = ClosedRequests(spool, tmp_path / "position")
        assert first == again == list(handed(restarted))
        assert len(first) == 50
        assert handed(restarted) == handed(ClosedRequests(spool, tmp_path / "position")) == {}


def test_open_request_is_handed_out_after_a_restart(spool, tmp_path):
    """A request that was in flight at the commit is closed later, by another exporter."""
    server = Server(spool, SMALL)
    with server.clocks():
        server.receive(tokens=3000)
        server.traffic(100)
        server.run(4000)
        before = handed(ClosedRequests(spool, tmp_path / "position"))
        server.run(20000)
        source = ClosedRequests(spool, tmp_path / "position")
        after = handed(source)
        afterwards = {request.request_id: told(request) for request in read_spool(spool).requests}
    assert len(before) == 100
    assert after == {name: afterwards[name] for name in afterwards.keys() - before.keys()}
    assert len(after) == 1


def test_requests_that_were_removed_are_counted(spool, tmp_path):
    """What the size of the spool pushed out before it was exported is counted, and the rest is handed out."""
    server = Server(spool, SMALL, spool_bytes=20 * SMALL)
    with server.clocks():
        server.traffic(30)
        server.run(3000)
        source = ClosedRequests(spool, tmp_path / "position")
        exported = len(handed(source))
        server.traffic(150)
        server.run(30000)
        source = ClosedRequests(spool, tmp_path / "position")
        exported += len(handed(source))
    counts = source.counts
    assert counts["removed"] > 50
    # Of some only the end was left, so that they are not among those that were received.
    assert server.sent == 180 == exported + counts["removed"] + counts["set_aside"]


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("has_next", [False, True])
def test_segments_that_are_removed_after_they_were_found(spool, monkeypatch, is_begun, has_next):
    """What is gone before it was read is counted, and what was in flight over it is set aside, never left open."""
    monkeypatch.setattr(window, "READ_BYTES", SMALL)
    source, recorder = ClosedRequests(spool), Recorder(spool, SMALL)
    recorder.record(RecordKind.RECEIVED, 1)
    record(recorder, *range(2, 21 if is_begun else 151))
    handed(source)
    record(recorder, *range(21 if is_begun else 151, 161))
    for path in segment_paths(spool)[0 if is_begun else 2 :]:
        path.unlink()
    recorder.record(RecordKind.ENDED, 1)
    if has_next:
        record(recorder, *range(161, 201))
    recorder._segment = None
    monkeypatch.setattr(window, "is_gone", lambda _: True)
    found, _ = rest(source)
    counts = source.counts
    assert counts["open"] == counts["partial"] == 0
    assert counts["set_aside"] >= 1
    assert counts["unreadable_segments"] >= 1
    assert f"{recorder.process}-1" not in found
    if has_next:
        assert counts["exported"] + counts["removed"] + counts["set_aside"] == 200


def test_what_is_held_is_read_though_it_was_removed(spool):
    """A segment that is removed after it was read is not missed."""
    server = Server(spool, SMALL, spool_bytes=20 * SMALL)
    found = {}
    with server.clocks():
        source = ClosedRequests(spool)
        server.receive(tokens=700)
        server.traffic(100)
        for _ in range(30):
            server.run(100)
            found |= handed(source)
        server.run(5000)
        found |= handed(source)
    assert read_spool(spool).removed[0] > 20
    assert len(found) == server.sent == 101
    assert source.counts["removed"] == source.counts["set_aside"] == 0


def test_requests_in_flight_for_too_long_are_given_up(spool, monkeypatch):
    """When too much would have to be held for a request, it is given up and counted, and the others go on."""
    monkeypatch.setattr(window, "HELD_BYTES", 200_000)
    server = Server(spool, SMALL)
    found = {}
    with server.clocks():
        source = ClosedRequests(spool)
        server.receive(tokens=2000)
        server.traffic(200)
        held = []
        for _ in range(20):
            server.run(400)
            found |= handed(source)
            held.append(source._window.held_bytes)
    assert len(found) == 200
    assert source.counts["given_up"] == 1
    assert source.counts["open"] == 0
    assert max(held) < 300_000


def test_backlog_is_read_in_portions(spool, monkeypatch):
    """A spool that was recorded before is read a little at a time, and each request comes once."""
    monkeypatch.setattr(window, "READ_BYTES", 12_000)
    server = Server(spool, SMALL)
    with server.clocks():
        server.traffic(100)
        server.run(30000)
        source = ClosedRequests(spool)
        found, polls = rest(source)
        whole = {request.request_id for request in read_spool(spool).requests}
    assert polls > 10
    assert found.keys() == whole
    assert set(found.values()) == {1}
    assert source.counts["partial"] == source.counts["set_aside"] == 0


def test_killed_writer(spool, tmp_path, killed_writer):
    """What a killed process had recorded is handed out, its open request as lost; nothing needs the grace time."""
    source = ClosedRequests(spool, tmp_path / "position", grace_ns=1 << 60)
    found, _ = rest(source)
    assert source.have_ended()
    assert len(found) == 301
    assert source.counts["partial"] == 0
    assert handed(ClosedRequests(spool, tmp_path / "position"), final=True) == {}


def test_process_of_another_container(spool, monkeypatch):
    """Of a process whose id says nothing, the lock of its segment tells whether it lives; its open request is lost."""
    monkeypatch.setattr("stagetrace.segment.pid_namespace", lambda: "pid:[1]")
    recorder = Recorder(spool)
    recorder.record(RecordKind.RECEIVED, 1)
    source = ClosedRequests(spool)
    assert source.poll().requests == []
    assert source.is_written()
    recorder._segment = None  # as the kernel does it for a process that ends
    (request,) = source.poll().requests
    assert request.outcome is Outcome.LOST
    assert source.have_ended()


def test_process_that_stopped_recording_may_go_on(spool, monkeypatch):
    """A process that is switched off has let go of its segment, and is not taken for one that has ended."""
    monkeypatch.setattr("stagetrace.segment.pid_namespace", lambda: "pid:[1]")
    recorder = Recorder(spool)
    recorder.record(RecordKind.RECEIVED, 1)
    (spool / OFF_FILE).touch()
    recorder.look(recorder.look_at)
    source = ClosedRequests(spool)
    assert source.poll().requests == []
    assert source.is_written()


@pytest.fixture
def before_the_reboot(spool, monkeypatch):
    """A recorder of the host's earlier boot, whose process has ended once it lets go of its segment."""
    with monkeypatch.context() as earlier:
        earlier.setattr("stagetrace.segment.clock_domain", lambda: "earlier/time:[1]")
        recorder = Recorder(spool, LARGE)
        recorder.record(RecordKind.RECEIVED, 1)
    return recorder


def test_requests_of_an_earlier_boot(spool, before_the_reboot):
    """While a server records, those of an earlier boot are handed out at once, also of its last second."""
    record(before_the_reboot, 2, 3)
    before_the_reboot._segment = None
    server = Recorder(spool)
    server.record(RecordKind.RECEIVED, 1)
    source = ClosedRequests(spool)
    closed = source.poll()
    source.commit()
    assert Counter(r.outcome for r in closed.requests) == {Outcome.OK: 2, Outcome.LOST: 1}
    assert (closed.partial, source.counts["open"], source.is_written()) == (0, 1, True)


def test_process_that_stopped_recording_and_was_rebooted(spool, before_the_reboot):
    """A process of an earlier boot has ended, also if it was switched off."""
    (spool / OFF_FILE).touch()
    before_the_reboot.look(before_the_reboot.look_at)
    source = ClosedRequests(spool)
    source.poll()
    assert source.have_ended()


def test_engine_that_is_late(spool):
    """A request is not set aside for good because the engine has not recorded it yet."""
    server = Server(spool, LARGE)
    with server.clocks():
        record(Recorder(spool, SMALL, 20 * SMALL), *range(1000))  # so that there is something to remove
        api = Recorder(spool, SMALL, 20 * SMALL)
        api.record(RecordKind.RECEIVED, 1)
        api.record(RecordKind.ENGINE_REQUEST, 1, api.define("chat"))
        source = ClosedRequests(spool)
        rest_of(source)
        assert source.counts["set_aside"] == 0
        engine = Recorder(spool, SMALL, 20 * SMALL)
        key = engine.define("chat")
        engine.record(RecordKind.HELD, key, 30, 8)
        engine.record(RecordKind.FREED, key, engine.intern("stopped"), 7)
        record(api, 1)
        server.run(2000)
        assert f"{api.process}-1" in handed(source)


def rest_of(source):
    """Poll until all that is there was read."""
    while source.poll().more:
        source.commit()
    source.commit()


def test_open_request_of_a_living_process_is_not_lost(spool):
    """A last poll leaves the open requests of a process that lives open, and counts them."""
    recorder = Recorder(spool)
    recorder.record(RecordKind.RECEIVED, 1)
    source = ClosedRequests(spool)
    assert handed(source, final=True) == {}
    assert source.is_written()
    assert source.counts["open"] == 1


def test_slot_that_is_filled_later(spool):
    """A record whose thread was stopped between taking its slot and filling it is not passed over."""
    recorder = Recorder(spool)
    recorder.record(RecordKind.RECEIVED, 1)
    slot = next(recorder._segment.offsets)
    recorder.record(RecordKind.ENDED, 1)
    source = ClosedRequests(spool)
    source.poll()
    now = monotonic_ns()
    RECORD.pack_into(recorder._segment.memory, slot, now, 1, 0, 0, 0, 0, RecordKind.LAST_BYTE, MAGIC)
    (request,) = source.poll(final=True).requests
    assert request.last_byte == now


def test_slot_that_is_never_filled(spool):
    """A slot that stays empty holds nothing back for longer than a poll."""
    recorder = Recorder(spool)
    recorder.record(RecordKind.RECEIVED, 1)
    next(recorder._segment.offsets)
    recorder.record(RecordKind.RECEIVED, 2)
    source = ClosedRequests(spool)
    assert len(source.poll().data.open_requests) == 1
    assert len(source.poll().data.open_requests) == 2


def test_slot_of_a_process_that_has_ended(spool, monkeypatch):
    """Nobody fills a slot of a process that has ended: what is behind it is read at once."""
    monkeypatch.setattr("stagetrace.segment.pid_namespace", lambda: "pid:[1]")
    recorder = Recorder(spool)
    record(recorder, 1)
    next(recorder._segment.offsets)
    record(recorder, 2)
    recorder._segment = None
    closed = ClosedRequests(spool).poll()
    assert (len(closed.requests), closed.partial, closed.more) == (2, 0, False)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"{}", b'{"format": 1, "processes": {"x": {"segment": "y"}}}']
)
def test_damaged_position(spool, tmp_path, caplog, content):
    """It is told in one line, and the export begins with the oldest request."""
    server = Server(spool, SMALL)
    with server.clocks():
        server.traffic(20)
        server.run(5000)
        position = tmp_path / "position"
        handed(ClosedRequests(spool, position))
        position.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert len(handed(ClosedRequests(spool, position))) == 20
        assert len(caplog.records) == 1
        assert str(position) in caplog.text
        assert "oldest" in caplog.text


def test_position_is_replaced_whole(spool, tmp_path):
    """Nothing but the position is left beside it."""
    Recorder(spool).record(RecordKind.RECEIVED, 1)
    source = ClosedRequests(spool, tmp_path / "position")
    source.poll()
    source.commit()
    assert [path.name for path in tmp_path.iterdir() if path != spool] == ["position"]


def test_position_follows_no_link(spool, tmp_path):
    """What somebody has put in the way of the new position is removed, and where it leads is left alone."""
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "position.new").symlink_to(tmp_path / "theirs")
    Recorder(spool).record(RecordKind.RECEIVED, 1)
    handed(ClosedRequests(spool, tmp_path / "position"))
    assert (tmp_path / "theirs").read_text() == "precious"
    assert json.loads((tmp_path / "position").read_text())["processes"]


def test_empty_spool(spool):
    """A spool that is not there yet is no error, and nobody has ended."""
    source = ClosedRequests(spool)
    assert source.poll(final=True).requests == []
    source.commit()
    assert source.is_empty()
    assert not source.have_ended()
    assert not spool.exists()
