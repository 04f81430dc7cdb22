"""What bounds recording: the size of the spool, the file OFF, the fuse, and a disk that has no room."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagetrace import Recorder, read_spool
from stagetrace.meter import WINDOW_NS, CostMeter
from stagetrace.recorder import FAULT_LIMIT, OFF_FILE
from stagetrace.records import RECORD_BYTES, RecordKind, StopReason
from stagetrace.room import make_room, segment_bytes
from stagetrace.segment import HEADER_BYTES, NEW_SUFFIX, Segment, read_segment
from stagetrace.spool import segment_paths

RECORDS = 64
SMALL = HEADER_BYTES + RECORDS * RECORD_BYTES
SECOND = 1_000_000_000


def fill(recorder, segments, first=0):
    """Write so many segments full, and the first record of another one."""
    for key in range(first, first + segments * RECORDS + 1):
        recorder.record(RecordKind.RECEIVED, key)


def sequences(folder):
    """The sequences of the segments that are there, by process."""
    found = {}
    for path in segment_paths(folder):
        header = read_segment(path).header
        found.setdefault(header.process, []).append(header.sequence)
    return found


def size(folder):
    """Bytes of the segments in a folder."""
    return sum(path.stat().st_size for path in segment_paths(folder))


def run(code, *arguments, **options):
    """Run code in an interpreter of its own; returns the JSON it prints."""
    head = (
        "import json, os, resource, signal, sys, time\nfrom pathlib import Path\n"
        "from stagetrace import Recorder\nfrom stagetrace.records import RecordKind\n"
        f"SMALL = {SMALL}\n"
    )
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- size -------------------------------------------------------------------------------------------


def test_oldest_segments_go_first(tmp_path):
    """A spool keeps within its size, and what was removed is counted, also by segments that are gone."""
    recorder = Recorder(tmp_path, SMALL, 4 * SMALL)
    fill(recorder, 10)
    assert sequences(tmp_path) == {recorder.process: [7, 8, 9, 10]}
    assert size(tmp_path) <= 4 * SMALL
    assert recorder.dropped == 0
    assert read_spool(tmp_path).removed == (7, 7 * SMALL)


def test_open_segment_of_a_living_process_is_never_removed(tmp_path):
    """When only open segments are left, records are dropped and counted until there is room again."""
    others = [Recorder(tmp_path, SMALL) for _ in range(3)]
    for other in others:
        other.record(RecordKind.RECEIVED, 1)
    recorder = Recorder(tmp_path, SMALL, 3 * SMALL)
    recorder.record(RecordKind.RECEIVED, 1)
    recorder.record(RecordKind.RECEIVED, 2)
    assert recorder.dropped == 2
    assert len(segment_paths(tmp_path)) == 3
    others.pop()._reset()
    recorder._retry_at = 0
    recorder.record(RecordKind.RECEIVED, 3)
    assert recorder.dropped == 2
    assert sequences(tmp_path) == {other.process: [0] for other in (*others, recorder)}
    (process,) = [p for p in read_spool(tmp_path).processes.values() if p.header.process == recorder.process]
    assert (process.header.dropped, process.gaps[0].reason) == (2, StopReason.LOST)


def test_segments_of_the_dead_are_removed(tmp_path):
    """What a killed process left is removed when it is the oldest, and what that had removed stays counted."""
    code = (
        "recorder = Recorder(Path(sys.argv[1]), SMALL, 2 * SMALL)\n"
        "for key in range(64 * 5 + 1): recorder.record(RecordKind.RECEIVED, key)\n"
        "print(json.dumps(recorder.process), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    head = "import json, os, signal, sys\nfrom pathlib import Path\nfrom stagetrace import Recorder\n"
    head += f"from stagetrace.records import RecordKind\nSMALL = {SMALL}\n"
    subprocess.run([sys.executable, "-c", head + code, tmp_path], check=False, capture_output=True)
    assert list(map(sorted, sequences(tmp_path).values())) == [[4, 5]]
    recorder = Recorder(tmp_path, SMALL, 2 * SMALL)
    fill(recorder, 1)
    assert sequences(tmp_path) == {recorder.process: [0, 1]}
    assert read_spool(tmp_path).removed == (6, 6 * SMALL)


def test_segment_is_open_in_a_living_process_and_closed_in_a_dead_one(tmp_path):
    """The lock of a segment is held as long as its writer lives, and no longer than it writes."""
    code = (
        "recorder = Recorder(Path(sys.argv[1]), SMALL)\n"
        "recorder.record(RecordKind.RECEIVED, 1)\n"
        "print('[]', flush=True)\nsys.stdin.read()"
    )
    head = "import sys\nfrom pathlib import Path\nfrom stagetrace import Recorder\n"
    head += f"from stagetrace.records import RecordKind\nSMALL = {SMALL}\n"
    with subprocess.Popen(
        [sys.executable, "-c", head + code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as living:
        living.stdout.readline()
        assert make_room(tmp_path, SMALL, SMALL) == (False, 0, 0)
        living.kill()
    assert make_room(tmp_path, SMALL, SMALL) == (True, 1, SMALL)
    assert segment_paths(tmp_path) == []


def test_forked_child_does_not_keep_its_parents_segment_open(tmp_path):
    """A child that lives on holds only what it opened itself."""
    ready, go = os.pipe()
    forked, done = os.pipe()
    parent = os.fork()
    if parent == 0:
        recorder = Recorder(tmp_path, SMALL)
        recorder.record(RecordKind.RECEIVED, 1)
        if os.fork() == 0:
            os.write(done, b"x")
            os.read(ready, 1)
        os._exit(0)
    os.waitpid(parent, 0)
    os.read(forked, 1)
    try:
        assert make_room(tmp_path, SMALL, SMALL) == (True, 1, SMALL)
    finally:
        os.write(go, b"x")


def test_writer_notices_that_its_new_segment_was_taken_for_an_old_one(tmp_path, monkeypatch):
    """A file that is removed between its making and its locking is not written into."""
    recorder = Recorder(tmp_path, SMALL)
    opened = os.open

    def open_and_lose(path, *arguments):
        descriptor = opened(path, *arguments)
        if str(path).endswith(NEW_SUFFIX) and not recorder.dropped:
            Path(path).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    recorder.record(RecordKind.RECEIVED, 1)
    assert recorder.dropped == 1
    recorder._retry_at = 0
    recorder.record(RecordKind.RECEIVED, 2)
    assert [record[1] for record in read_segment(segment_paths(tmp_path)[0])] == [2]


def test_segment_that_was_never_finished_is_removed_too(tmp_path):
    """A process that is killed while it makes a segment leaves no file for ever."""
    (tmp_path / f"api-1-abc-000000{NEW_SUFFIX}").write_bytes(bytes(SMALL))
    recorder = Recorder(tmp_path, SMALL, 3 * SMALL)
    fill(recorder, 5)
    assert len(list(tmp_path.iterdir())) == len(segment_paths(tmp_path)) == 3


def test_other_files_are_left_alone(tmp_path):
    """Only segments are counted and removed."""
    (tmp_path / "notes.txt").write_bytes(b"x" * 10 * SMALL)
    (tmp_path / "export.position.new").write_bytes(b"{}")
    recorder = Recorder(tmp_path, SMALL, 3 * SMALL)
    fill(recorder, 5)
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "export.position.new").exists()
    assert len(segment_paths(tmp_path)) == 3


def test_two_processes_make_room_at_the_same_time(tmp_path):
    """Nothing is counted twice, and nothing open is lost."""
    recorders = [Recorder(tmp_path, SMALL, 6 * SMALL) for _ in range(4)]
    threads = [threading.Thread(target=fill, args=(recorder, 20)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened = sum(recorder._sequence for recorder in recorders)
    pending = sum(recorder._segment.removed[0] for recorder in recorders if not recorder._sequence)
    assert len(segment_paths(tmp_path)) + read_spool(tmp_path).removed[0] + pending == opened


@pytest.mark.parametrize(("spool", "segment"), [(1 << 30, 4 << 20), (64 << 20, 4 << 20), (1 << 20, 1 << 16)])
def test_small_spools_have_small_segments(spool, segment):
    """Sixteen segments have room in any spool."""
    assert segment_bytes(spool) == segment


# --- OFF --------------------------------------------------------------------------------------------


def test_off_is_noticed_within_a_second_and_leaves_no_trace_of_records(tmp_path):
    """Switched off, nothing is written and nothing counts as lost; on again, the gap is told."""
    recorder = Recorder(tmp_path, SMALL)
    recorder.record(RecordKind.RECEIVED, 1)
    epoch, begin = recorder.epoch, time.monotonic_ns()
    (tmp_path / OFF_FILE).touch()
    recorder.look(begin)
    assert not recorder.stopped
    recorder.look(begin + SECOND)
    assert recorder.stopped
    fill(recorder, 3)
    recorder.record(RecordKind.RECEIVED, -1)
    assert recorder.define("a") != recorder.define("b")
    assert len(segment_paths(tmp_path)) == 1
    (tmp_path / OFF_FILE).unlink()
    recorder.look(begin + SECOND)
    assert recorder.stopped
    recorder.look(begin + 2 * SECOND)
    assert not recorder.stopped
    assert recorder.epoch > epoch
    recorder.record(RecordKind.RECEIVED, 2)
    data = read_spool(tmp_path)
    assert [request.request_id.rpartition("-")[2] for request in data.open_requests] == ["2"]
    assert data.set_aside == {"in_flight_while_recording_was_off": 1, "open_request": 1}
    assert data.dropped == 0
    (gap,) = data.processes[recorder.process].gaps
    assert (gap.begin, gap.reason) == (begin + SECOND, StopReason.OFF)
    assert gap.end >= begin


def test_off_before_the_first_record(tmp_path):
    """A process that starts switched off makes no segment."""
    (tmp_path / OFF_FILE).touch()
    recorder = Recorder(tmp_path, SMALL)
    fill(recorder, 2)
    assert segment_paths(tmp_path) == []
    assert (recorder.stopped, recorder.dropped) == (True, 0)


def test_off_is_found_when_a_segment_is_full(tmp_path):
    """Without anybody who looks, a process stops with its next segment."""
    recorder = Recorder(tmp_path, SMALL)
    fill(recorder, 0)
    (tmp_path / OFF_FILE).touch()
    fill(recorder, 5)
    assert sequences(tmp_path) == {recorder.process: [0]}
    (gap,) = read_spool(tmp_path).processes[recorder.process].gaps
    assert gap.reason is StopReason.OFF


def test_request_that_was_in_flight_when_a_dead_process_was_switched_off_is_not_lost(tmp_path):
    """What became of it was not to be recorded, so nothing is said of it."""
    code = (
        "recorder = Recorder(Path(sys.argv[1]), SMALL)\n"
        "recorder.record(RecordKind.RECEIVED, 1)\n"
        "(Path(sys.argv[1]) / 'OFF').touch()\n"
        "recorder.look(time.monotonic_ns() + 2 * 10**9)\n"
        "recorder.record(RecordKind.ENDED, 1)\n"
        "print('[]')"
    )
    run(code, tmp_path)
    data = read_spool(tmp_path)
    assert data.requests == data.open_requests == []
    assert data.set_aside == {"in_flight_while_recording_was_off": 1}


# --- fuse -------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The recorder's clock, in a list of one number."""
    now = [SECOND]
    monkeypatch.setattr("stagetrace.recorder.monotonic_ns", lambda: now[0])
    return now


def test_many_faults_at_once_blow_the_fuse(tmp_path, clock):
    """A hundred faults within ten seconds stop a process for good, and it says so."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    for _ in range(FAULT_LIMIT):
        recorder.record(RecordKind.RECEIVED, -1)
    recorder.record(RecordKind.RECEIVED, 2)
    clock[0] += 1000 * SECOND
    recorder.look()
    recorder.record(RecordKind.RECEIVED, 3)
    (segment,) = map(read_segment, segment_paths(tmp_path))
    assert [record[1] for record in segment] == [1]
    assert (segment.header.faults, recorder.dropped) == (FAULT_LIMIT, 0)
    assert (segment.header.stop, segment.header.stopped_at) == (StopReason.FAULTS, SECOND)
    assert recorder.stopped


def test_a_trickle_of_faults_does_not(tmp_path, clock):
    """Faults that come one by one are counted for ever."""
    recorder = Recorder(tmp_path)
    for _ in range(20 * FAULT_LIMIT):
        clock[0] += SECOND // 8
        recorder.fault()
    recorder.record(RecordKind.RECEIVED, 1)
    assert (recorder.faults, recorder.stopped) == (20 * FAULT_LIMIT, False)
    assert len(segment_paths(tmp_path)) == 1


def feed(meter, seconds, cost_share):
    """Steps of ten milliseconds, of which recording takes a share."""
    for step in range(1, 100 * seconds + 1):
        begin = step * SECOND // 100
        meter.step(begin, round(cost_share * 10_000_000), step)


def test_cost_is_recorded(tmp_path):
    """The process's own estimate of what recording costs is in the spool."""
    recorder = Recorder(tmp_path)
    feed(CostMeter(recorder), 60, 0.01)
    cost = read_spool(tmp_path).processes[recorder.process].cost
    assert cost.steps == pytest.approx(6000, rel=0.01)
    assert cost.busy_ns == pytest.approx(60 * SECOND, rel=0.01)
    assert cost.cost_ns / cost.busy_ns == pytest.approx(0.01, rel=0.01)
    assert not recorder.stopped


def test_cost_above_the_limit_blows_the_fuse(tmp_path):
    """A process that spends too much of its time on recording stops, after one window, and says why."""
    recorder = Recorder(tmp_path)
    feed(CostMeter(recorder), 60, 0.06)
    assert recorder.stopped
    process = read_spool(tmp_path).processes[recorder.process]
    assert process.gaps[0].reason is StopReason.COST
    assert process.cost.busy_ns == pytest.approx(WINDOW_NS, rel=0.01)


def test_idle_time_does_not_hide_the_cost(tmp_path):
    """An engine that is idle most of the time is not thereby allowed to be slow."""
    recorder = Recorder(tmp_path)
    meter = CostMeter(recorder)
    for step in range(1, 100):
        meter.step(step * 60 * SECOND, SECOND // 10, step)
    assert recorder.stopped


# --- disk -------------------------------------------------------------------------------------------

WRITE = """
folder = Path(sys.argv[1])
recorder = Recorder(folder, SMALL)
slowest = 0.0
for key in range(1000):
    begin = time.perf_counter()
    recorder.record(RecordKind.RECEIVED, key)
    recorder.define("text")
    slowest = max(slowest, time.perf_counter() - begin)
print(json.dumps([recorder.dropped, recorder.faults, slowest]))
"""


def test_file_size_limit_of_the_process(tmp_path):
    """A limit on file sizes is an error of opening: counted, no signal, no exception, nothing left behind."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL - 1, SMALL - 1))\n"
    dropped, faults, slowest = run(limit + WRITE, tmp_path)
    assert (dropped, faults) == (2000, 0)
    assert slowest < 0.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/stagetrace", "/dev/null/spool"])
def test_folder_that_cannot_be(folder):
    """A folder that cannot be made costs the records, and nothing else."""
    assert run(WRITE, folder)[:2] == [2000, 0]


def test_folder_that_disappears(tmp_path):
    """Where the folder is removed under a server, the mapped segment goes on, and the next one makes it anew."""
    folder = tmp_path / "spool"
    recorder = Recorder(folder, SMALL)
    fill(recorder, 0)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    fill(recorder, 1, first=1)
    assert recorder.dropped == 0
    assert sequences(folder) == {recorder.process: [1]}


@contextmanager
def disk(folder, options):
    """A file system of its own, if one can be mounted here."""
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    command = [str(mount), "-t", "tmpfs", "-o", options, "none", str(folder)]
    if mount is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run([str(umount), str(folder)], check=True)


def test_read_only_disk(tmp_path):
    """A disk that may not be written costs the records, and nothing else."""
    with disk(tmp_path / "disk", "ro,size=1m") as folder:
        assert run(WRITE, folder)[:2] == [2000, 0]


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_read_only_folder(tmp_path):
    """A folder that may not be written costs the records, and nothing else."""
    tmp_path.chmod(0o555)
    assert run(WRITE, tmp_path)[:2] == [2000, 0]
    tmp_path.chmod(0o755)


def test_full_disk(tmp_path):
    """A disk with room for three segments takes three; the rest is counted, and a second later tried again."""
    with disk(tmp_path / "disk", f"size={3 * SMALL + 4096}") as folder:
        dropped, faults, slowest = run(WRITE, folder)
        kept = [len(list(read_segment(path))) for path in segment_paths(folder)]
        assert kept == [RECORDS] * 3
        assert (dropped, faults) == (2000 - 3 * RECORDS, 0)
        assert slowest < 0.5
        assert read_spool(folder).dropped == dropped


def test_new_segment_is_whole_or_not_there(tmp_path, monkeypatch):
    """When allocating fails, the file is taken away again."""

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    recorder = Recorder(tmp_path, SMALL)
    recorder.record(RecordKind.RECEIVED, 1)
    assert (recorder.dropped, list(tmp_path.iterdir())) == (1, [])


def test_sink_takes_records_for_ever():
    """A segment that keeps nothing never ends, so that nobody has to ask."""
    sink = Segment.sink()
    assert {next(sink.offsets) for _ in range(1000)} == {HEADER_BYTES}
    sink.count(1, 2)
