"""Damage to processes, files and clocks: what is left is read, what is not is told, and nothing is invented."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from damage import (
    DAMAGE,
    KIND,
    SMALL,
    TIME,
    Scene,
    altered,
    check_whatever_is_read,
    damaged,
    lay_out,
    written,
)
from hypothesis import given, settings

from stagetrace import Outcome, partition, read_spool
from stagetrace.records import NONE, RecordKind
from stagetrace.segment import HEADER_BYTES, read_segment
from stagetrace.spool import segment_paths
from stagetrace.testing import summarize

duckdb = pytest.importorskip("duckdb", reason="reads datasets")

HEAD = f"""
import json, mmap, multiprocessing, os, signal, sys, threading
from pathlib import Path
from stagetrace import Recorder
from stagetrace.records import RecordKind
SMALL = {SMALL}
"""


def start(folder, code, **options):
    """Start a script of its own, with a spool folder as argument."""
    script = folder.parent / f"script-{len(list(folder.parent.iterdir()))}.py"
    script.write_text(HEAD + code)
    return subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, **options)


def keys_by_pid(folder):
    """The keys of all records, by the process that wrote them."""
    found = {}
    for data in sorted(map(read_segment, segment_paths(folder)), key=lambda data: data.header.sequence):
        assert data.torn == 0
        found.setdefault(data.header.pid, []).extend(record[1] for record in data)
    return found


def play(folder, jumps=None):
    """Make a spool of eight requests in many small segments; the wall clock may jump before a request."""
    scene = Scene(folder)
    with scene.clocks():
        for number in range(1, 9):
            scene.wall += (jumps or {}).get(number, 0)
            scene.request(number)
    return folder


@pytest.fixture
def spool(tmp_path):
    """A spool of eight requests."""
    return play(tmp_path / "spool")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Gives the contents of such a spool."""
    contents = written(play(tmp_path_factory.mktemp("sound")))
    return lambda: contents


def sums(stages):
    """Milliseconds in each stage."""
    total = Counter()
    for stage, milliseconds in stages:
        total[stage] += milliseconds
    return total


def parts(data):
    """The parts of every request."""
    return {request.request_id: summarize(partition(request).completion) for request in data.requests}


def test_scene_is_sound(spool):
    """What is damaged here is whole before."""
    data = read_spool(spool)
    assert len(data.requests) == 8
    assert len(segment_paths(spool)) > 6
    assert (data.set_aside, data.dropped, data.faults) == ({}, 0, 0)
    assert [check for check in data.checks if not check.holds] == []
    first, *others = parts(data).values()
    assert first == [
        *[("receive", 1), ("retrieval", 1), ("media_decode.wait", 0.5), ("media_decode", 0.5)],
        *[("preprocess.wait", 0.5), ("preprocess", 1.5), ("handoff", 1), ("encode.wait(encoder_cache)", 2)],
        *[("prefill", 0.2), ("encode", 1.8), ("prefill", 2), ("decode", 4), ("respond", 1.5)],
    ]
    assert others == [first] * 7


# --- processes --------------------------------------------------------------------------------------

FORKS = """
recorder = Recorder(Path(sys.argv[1]), SMALL)
COUNT = 1000

def work(first):
    for key in range(first, first + COUNT):
        recorder.record(RecordKind.RECEIVED, key)
    os.write(1, f"[{os.getpid()}, {first}]\\n".encode())

def child(first, generations):
    work(first)
    if generations:
        below = multiprocessing.get_context("fork").Process(
            target=child, args=(first + 100_000, generations - 1))
        below.start()
        below.join()

if __name__ == "__main__":
    recorder.record(RecordKind.RECEIVED, 0)
    done = threading.Event()
    busy = threading.Thread(target=lambda: [recorder.record(RecordKind.RECEIVED, 7) for _ in iter(done.is_set, True)])
    busy.start()
    fork, spawn = (multiprocessing.get_context(name) for name in ("fork", "spawn"))
    children = [fork.Process(target=child, args=(10_000 * n, 1)) for n in range(1, 5)]
    children += [spawn.Process(target=child, args=(10_000 * n, 1)) for n in range(5, 7)]
    for each in children:
        each.start()
    for each in children:
        each.join()
    done.set()
    busy.join()
"""


def test_forked_and_spawned_children(tmp_path, tell):
    """Children and grandchildren, forked while a thread records or spawned, record apart from each other, all whole."""
    with start(tmp_path / "spool", FORKS) as parent:
        out, _ = parent.communicate(timeout=120)
    assert parent.returncode == 0
    told = dict(map(json.loads, out.splitlines()))
    found = keys_by_pid(tmp_path / "spool")
    assert set(found.pop(parent.pid)) == {0, 7}
    assert found == {child: list(range(first, first + 1000)) for child, first in told.items()}
    assert len(found) == 12
    data = read_spool(tmp_path / "spool")
    assert len(data.processes) == 13
    assert len({process.header.number for process in data.processes.values()}) == 13
    assert (data.dropped, data.faults, set(data.set_aside)) == (0, 0, set())
    tell(
        "8 forked and 4 spawned children and grandchildren",
        "nothing of 12,000 records",
        "13 processes, each whole",
    )


KILLED = """
counter = mmap.mmap(os.open(sys.argv[1] + ".count", os.O_RDWR), 8)
recorder = Recorder(Path(sys.argv[1]), SMALL)
key = 0
while True:
    recorder.record(RecordKind.RECEIVED, key)
    if not key:
        print("begun", flush=True)
    key += 1
    counter[:] = key.to_bytes(8, "little")
"""


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path, tell):
    """Every record that was written before the kill is read, also when segments are being opened all the time."""
    dice, records = random.Random(7), 0
    for number in range(10):
        folder = tmp_path / f"spool-{number}"
        count = tmp_path / f"spool-{number}.count"
        count.write_bytes(bytes(8))
        with start(folder, KILLED) as writer:
            writer.stdout.readline()
            time.sleep(0.05 * dice.random())
            writer.kill()
        written_before = int.from_bytes(count.read_bytes(), "little")
        data = read_spool(folder)
        # One more may be there: the one between which and its count the process was killed.
        assert data.records - written_before in {0, 1}
        assert data.open_requests == []
        assert {request.outcome for request in data.requests} <= {Outcome.LOST}
        assert len(data.requests) == data.records
        assert set(data.set_aside) <= {"torn_record", "unreadable_segment"}
        records += written_before
    assert records > 10_000
    tell(
        "`kill -9` of a writer at ten random moments",
        f"nothing of {records:,} records",
        "all its open requests as lost",
    )


def test_requests_of_a_zombie_are_lost(tmp_path):
    """A killed process that nobody has waited for, as in a container without an init, is dead all the same."""
    code = "recorder = Recorder(Path(sys.argv[1]))\nrecorder.record(RecordKind.RECEIVED, 1)\nprint('', flush=True)\nsys.stdin.read()"
    with start(tmp_path / "spool", code, stdin=subprocess.PIPE) as writer:
        writer.stdout.readline()
        assert len(read_spool(tmp_path / "spool").open_requests) == 1
        os.kill(writer.pid, signal.SIGKILL)
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        data = read_spool(tmp_path / "spool")
        assert [request.outcome for request in data.requests] == [Outcome.LOST]
        assert data.open_requests == []


# --- files ------------------------------------------------------------------------------------------

NOT_IN_THE_SCENE = {
    *(RecordKind.DISCONNECTED, RecordKind.ABORTED, RecordKind.MEDIA_CACHED, RecordKind.ITEM_INLINE),
    *(RecordKind.NOT_SAMPLED, RecordKind.PREEMPTED, RecordKind.ALIVE, RecordKind.ENCODE_DEVICE),
    *(RecordKind.STAGE_BEGIN, RecordKind.STAGE_END, RecordKind.ITEM_FACT, RecordKind.RESUMED),
    RecordKind.MISUSED,
}


@pytest.mark.slow
@given(DAMAGE)
@settings(max_examples=80, deadline=None)
def test_damaged_files_are_read(tmp_path_factory, sound, damage):
    """Whatever happens to the files of a spool, it is read, and what is read of it is possible."""
    folder = tmp_path_factory.mktemp("damaged")
    lay_out(folder / "spool", damaged(sound(), damage))
    check_whatever_is_read(folder / "spool", folder / "dataset")
    shutil.rmtree(folder)


LARGEST = [(1 << 61) - 1, *[NONE] * 5, 0xFFFF]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in RecordKind if kind not in NOT_IN_THE_SCENE], ids=lambda kind: kind.name
)
def test_no_field_breaks_the_reader(tmp_path, sound, kind):
    """Every field of a kind of records may hold the largest number, and one of them may have come too early."""
    contents = sound()
    assert altered(contents, kind, KIND, 0) != contents
    changes = [(field, largest, slice(None)) for field, largest in enumerate(LARGEST)]
    for change in (*changes, (TIME, 1, slice(2, 3))):
        lay_out(tmp_path / "spool", altered(contents, kind, *change))
        check_whatever_is_read(tmp_path / "spool", tmp_path / "dataset")


def test_copies_are_not_read_twice(spool, tell):
    """Older and newer copies of segments beside them change nothing, and are counted."""
    before = read_spool(spool)
    paths = segment_paths(spool)
    for path in paths:
        shutil.copy(path, spool / f"copy-{path.name}")
    (spool / f"old-{paths[0].name}").write_bytes(paths[0].read_bytes()[: HEADER_BYTES + 64])
    after = read_spool(spool)
    assert after.set_aside == {"doubled_segment": len(paths) + 1}
    assert parts(after) == parts(before)
    assert after.checks == before.checks
    tell("copies of segments beside them", "nothing", f"{len(paths) + 1} `doubled_segment`")


def test_what_is_no_segment_is_counted(spool, tell):
    """Empty files, random bytes, folders and links that lead nowhere are counted, and the others are read."""
    before = read_spool(spool)
    (spool / "empty.stagetrace").touch()
    (spool / "random.stagetrace").write_bytes(random.Random(3).randbytes(100_000))
    (spool / "zeros.stagetrace").write_bytes(bytes(SMALL))
    (spool / "folder.stagetrace").mkdir()
    (spool / "link.stagetrace").symlink_to("/nowhere")
    after = read_spool(spool)
    assert after.set_aside == {"unreadable_segment": 5}
    assert parts(after) == parts(before)
    tell(
        "files that are empty or random, a folder, a dangling link",
        "nothing of the others",
        "5 `unreadable_segment`",
    )


def test_segment_that_may_not_be_read(spool, tell):
    """A segment of mode 000 is counted, and the requests in flight over it are set aside."""
    for path in (spool, *segment_paths(spool)):
        path.chmod(0o755)
    engine = [path for path in segment_paths(spool) if path.name.startswith("engine")]
    engine[1].chmod(0o000)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(spool)
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)  # root may read everything
            data = read_spool(Path())
            os.write(sender, json.dumps([data.set_aside, len(data.requests)]).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as told:
        set_aside, requests = json.loads(told.read())
    os.waitpid(child, 0)
    assert set_aside["unreadable_segment"] == 1
    assert set_aside["in_flight_over_a_missing_segment"] == 8 - requests > 0
    tell(
        "a segment of mode 000",
        f"{8 - requests} requests in flight over it",
        f"1 `unreadable_segment`, {8 - requests} `in_flight_over_a_missing_segment`",
    )


@pytest.mark.parametrize("role", ["api", "engine", "worker"])
def test_lost_segment(spool, tell, role):
    """A segment that is gone costs the requests in flight over it; they are counted, and the others stay whole."""
    whole = parts(read_spool(spool))
    paths = [path for path in segment_paths(spool) if path.name.startswith(role)]
    paths[len(paths) // 2 if len(paths) > 1 else 0].unlink()
    data = check_whatever_is_read(spool, spool.parent / "dataset")
    left = parts(data)
    if len(paths) > 1:
        assert sum(data.set_aside.values()) >= 8 - len(left) > 0
        for name, stages in left.items():
            assert set(sums(stages) - sums(whole[name])) <= {"unattributed"}
    else:
        assert not all(check.holds for check in data.checks)
    told = ", ".join(f"{count} `{reason}`" for reason, count in data.set_aside.items())
    told = told or "; ".join(f"NOT: {check.name}" for check in data.checks if not check.holds)
    tell(f"a segment of the {role} is gone", f"{8 - len(left)} of 8 requests", told)


# --- clocks -----------------------------------------------------------------------------------------

HOUR = 3600 * 10**9


def test_wall_clock_that_jumps(tmp_path, tell):
    """A wall clock that is set while a server runs moves nothing on its host, and the report says by how much."""
    found = {}
    for name, jumps in (("steady", {}), ("jumping", {3: HOUR, 7: -2 * HOUR})):
        play(tmp_path / name, jumps)
        dataset = tmp_path / f"{name}-dataset"
        data = check_whatever_is_read(tmp_path / name, dataset)
        # Receipts and steps by the wall clock, from the first receipt on.
        read = "SELECT {column} FROM '{folder}/{table}/*.parquet' ORDER BY 1"
        times = [
            [
                time
                for (time,) in duckdb.sql(read.format(column=column, table=table, folder=dataset)).fetchall()
            ]
            for table, column in (("requests", "received_unix_ns"), ("steps", "scheduled_unix_ns"))
        ]
        between = [time - times[0][0] for each in times for time in each]
        wrong = [(check.name, round(check.found)) for check in data.checks if not check.holds]
        offsets = {read_segment(path).header.pair.unix(0) // HOUR for path in segment_paths(tmp_path / name)}
        found[name] = (list(parts(data).values()), between, wrong, len(offsets))
    assert found["jumping"][:2] == found["steady"][:2]
    assert found["jumping"][3] == 3
    assert found["steady"][2] == []
    assert found["jumping"][2] == [("seconds by which the wall clock jumped", 7200)]
    tell(
        "wall clock set an hour on, then two back", "nothing; no time on the host moved", "jumped by 7,200 s"
    )


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["/dev/null/spool", "x" * 5000, "/proc/1/spool", "\n", "~", "file:///var/tmp", "/" + "a/" * 2100]
)
def test_spool_variable_that_makes_no_sense(tmp_path, value):
    """Whatever the variable says, activation is harmless and recording costs nothing but the records."""
    code = (
        "import stagetrace_vllm.plugin as p; p.activate()\n"
        "recorder = p._Plugin.installation._recorder\n"
        "for key in range(100): recorder.record(20, key)\n"
        "print(recorder.dropped in {0, 100}, recorder.faults)"
    )
    settings = {"STAGETRACE_SPOOL": value, "STAGETRACE_SPOOL_MAX_BYTES": "much", "STAGETRACE_SAMPLE": "some"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True 0\n"), done.stderr
    assert "Traceback" not in done.stderr
