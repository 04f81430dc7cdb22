"""Recording: what is written is read, whatever happens in between."""

from __future__ import annotations

import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetrace.errors import DataError
from stagetrace.recorder import Recorder
from stagetrace.records import MAGIC, NONE, RECORD, RECORD_BYTES, TEXT_MAX_BYTES, RecordKind
from stagetrace.segment import HEADER_BYTES, read_segment
from stagetrace.spool import segment_paths

SMALL = HEADER_BYTES + 64 * RECORD_BYTES


def read_all(folder):
    """All segments of a spool in the order of writing."""
    return sorted(
        (read_segment(path) for path in segment_paths(folder)), key=lambda data: data.header.sequence
    )


def texts_of(segments):
    """Defined strings by number."""
    parts = sorted(part for data in segments for part in data.texts())
    found = {}
    for number, _, length, content in parts:
        found[number] = found.get(number, b"") + content[:length]
    return {number: content.decode() for number, content in found.items()}


def test_nothing_is_made_before_the_first_record(tmp_path):
    """A process that never serves leaves no file."""
    recorder = Recorder(tmp_path / "spool")
    recorder.announce(RecordKind.HOOK_OFF, 0, "module:target")
    assert not (tmp_path / "spool").exists()
    recorder.record(RecordKind.RECEIVED, 1)
    assert len(segment_paths(tmp_path / "spool")) == 1


def test_record_comes_back(tmp_path):
    """All fields of a record are read as they were written."""
    recorder = Recorder(tmp_path)
    recorder.record_at(123, RecordKind.STEP, 7, 1, 2, 3, NONE)
    (segment,) = read_all(tmp_path)
    assert list(segment) == [(123, 7, 1, 2, 3, NONE, RecordKind.STEP, MAGIC)]
    assert (segment.torn, segment.header.role, segment.header.pid) == (0, "engine", os.getpid())


@given(st.text(max_size=700))
def test_strings_come_back(tmp_path_factory, text):
    """A string is read as it was defined, cut at a length that no name needs."""
    folder = tmp_path_factory.mktemp("spool")
    recorder = Recorder(folder, SMALL)
    number = recorder.define(text)
    expected = text.encode("utf-8", "replace")[:TEXT_MAX_BYTES].decode("utf-8", "ignore")
    segments = read_all(folder)
    parts = sorted(part for data in segments for part in data.texts())
    content = b"".join(piece[:length] for _, _, length, piece in parts)
    assert {part[0] for part in parts} == {number}
    assert content.decode("utf-8", "ignore") == expected


def test_segments_roll(tmp_path):
    """Records go on in the next segment when one is full; none is lost, none is doubled."""
    recorder = Recorder(tmp_path, SMALL)
    for key in range(200):
        recorder.record(RecordKind.RECEIVED, key)
    segments = read_all(tmp_path)
    assert [data.header.sequence for data in segments] == [0, 1, 2, 3]
    assert [record[1] for data in segments for record in data] == list(range(200))


def test_announcements_stand_at_the_head_of_every_segment(tmp_path):
    """What a process says of itself survives the loss of its first segment."""
    recorder = Recorder(tmp_path, SMALL)
    recorder.announce(RecordKind.PROCESS_FACT, 9, "tiny")
    for key in range(100):
        recorder.record(RecordKind.RECEIVED, key)
    for segment in read_all(tmp_path):
        texts = texts_of([segment])
        facts = [texts[record[3]] for record in segment if record[6] == RecordKind.PROCESS_FACT]
        assert facts == ["tiny"]


def test_interned_strings_are_defined_once_a_segment(tmp_path):
    """A string that occurs often is written once a segment, and always known in it."""
    recorder = Recorder(tmp_path, SMALL)
    for key in range(200):
        recorder.record(RecordKind.FACT_TEXT, key, 3, recorder.intern("mixture"))
    segments = read_all(tmp_path)
    texts = texts_of(segments)
    assert len(texts) == len(segments)
    assert all(texts[r[3]] == "mixture" for data in segments for r in data if r[6] == RecordKind.FACT_TEXT)


def test_threads_share_a_segment(tmp_path):
    """Eight threads lose nothing and write over nothing, over many segments."""
    recorder = Recorder(tmp_path, SMALL)

    def work(thread):
        for number in range(1000):
            recorder.record(RecordKind.RECEIVED, thread, number)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    segments = read_all(tmp_path)
    written = Counter((record[1], record[2]) for data in segments for record in data)
    assert written == Counter((thread, number) for thread in range(8) for number in range(1000))
    assert sum(data.torn for data in segments) == 0


def test_fork_gets_its_own_segment(tmp_path):
    """A forked child opens a segment of its own and leaves its parent's alone."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    child = os.fork()
    if child == 0:
        recorder.record(RecordKind.RECEIVED, 2)
        os._exit(0)
    os.waitpid(child, 0)
    recorder.record(RecordKind.RECEIVED, 3)
    keys = {data.header.pid: [record[1] for record in data] for data in read_all(tmp_path)}
    assert keys == {os.getpid(): [1, 3], child: [2]}


def test_kill_loses_nothing(tmp_path):
    """What was recorded before ``kill -9`` is read."""
    code = (
        "import os, signal, sys; from pathlib import Path; from stagetrace import Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]))\n"
        "for key in range(1000): recorder.record(20, key)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (segment,) = read_all(tmp_path)
    assert [record[1] for record in segment] == list(range(1000))


def test_only_the_owner_may_read(tmp_path):
    """Spool folders are 0700, files 0600."""
    folder = tmp_path / "spool"
    Recorder(folder).record(RecordKind.RECEIVED, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(segment_paths(folder)[0].stat().st_mode) == 0o600


def test_folder_that_cannot_be_made_is_counted(tmp_path):
    """Without a place to write, records are dropped and counted, and nothing is raised."""
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    recorder = Recorder(in_the_way / "spool")
    recorder.record(RecordKind.RECEIVED, 1)
    recorder.record_at(1, RecordKind.RECEIVED, 1)
    assert recorder.define("text") != recorder.define("text")
    assert (recorder.dropped, recorder.faults) == (4, 0)


def test_field_that_does_not_fit_is_a_fault_not_an_exception(tmp_path):
    """A value of the wrong size is counted, and the records around it are written."""
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    recorder.record(RecordKind.RECEIVED, -1)
    recorder.record(RecordKind.RECEIVED, 2)
    (segment,) = read_all(tmp_path)
    assert [record[1] for record in segment] == [1, 2]
    assert (segment.header.faults, segment.torn, recorder.dropped) == (1, 1, 0)


def test_torn_record_is_set_aside(tmp_path):
    """A slot that was taken but not written whole is counted; the records behind it are read."""
    recorder = Recorder(tmp_path, SMALL)
    for key in range(3):
        recorder.record(RecordKind.RECEIVED, key)
    (path,) = segment_paths(tmp_path)
    content = bytearray(path.read_bytes())
    begin = HEADER_BYTES + RECORD_BYTES
    content[begin + 20 : begin + RECORD_BYTES] = bytes(12)
    path.write_bytes(content)
    segment = read_segment(path)
    assert [record[1] for record in segment] == [0, 2]
    assert segment.torn == 1


@given(st.integers(0, HEADER_BYTES + 5 * RECORD_BYTES))
def test_cut_segment_is_read_to_its_last_whole_record(tmp_path_factory, length):
    """A segment cut anywhere gives its whole records, or says in one line that it is none."""
    folder = tmp_path_factory.mktemp("spool")
    recorder = Recorder(folder, SMALL)
    for key in range(5):
        recorder.record_at(key + 1, RecordKind.RECEIVED, key)
    (path,) = segment_paths(folder)
    path.write_bytes(path.read_bytes()[:length])
    if length < HEADER_BYTES:
        with pytest.raises(DataError):
            read_segment(path)
        return
    whole = (length - HEADER_BYTES) // RECORD_BYTES
    assert [record[1] for record in read_segment(path)] == list(range(whole))


def test_record_is_32_bytes():
    """The record's size is part of the format."""
    assert RECORD.size == RECORD_BYTES == 32


def test_segment_is_seen_only_with_its_header(tmp_path, monkeypatch):
    """A reader that looks at the very moment at which a segment is made finds it whole or not at all."""
    seen = []
    map_file = mmap.mmap

    def look(descriptor, size):
        seen.append(segment_paths(tmp_path))
        return map_file(descriptor, size)

    monkeypatch.setattr(mmap, "mmap", look)
    recorder = Recorder(tmp_path)
    recorder.record(RecordKind.RECEIVED, 1)
    assert seen == [[]]
    assert read_segment(segment_paths(tmp_path)[0]).header.pid == os.getpid()
