"""Damage to a spool: what can happen to its files, and what must hold of whatever is read then."""

from __future__ import annotations

import shutil
import struct
import subprocess
from contextlib import contextmanager
from itertools import accumulate

import duckdb
import pytest
from hypothesis import strategies as st

from stagetrace import DataError, Recorder, partition, read_spool
from stagetrace.clock import ClockPair
from stagetrace.records import NONE, RECORD, RECORD_BYTES, Fact, JobKind, ReasonCode, RecordKind
from stagetrace.segment import HEADER_BYTES
from stagetrace.spool import segment_paths
from stagetrace.testing import MS, check_partition
from stagetrace_analyzer.ingest import ingest_spool

SMALL = HEADER_BYTES + 64 * RECORD_BYTES
"""Size of a segment that is soon full."""


class Scene:
    """Three processes of a server that record requests of all kinds of records, 40 ms each, one after the other.

    An image is fetched, decoded and processed, refused by the encoder cache for a step, encoded in the next
    one, and answered with two tokens.

    Attributes:
        now: The monotonic clock, and ``wall``, how far the wall clock is ahead of it.
    """

    def __init__(self, folder):
        self.now, self.wall = 0, 10**18
        self._epoch = 0
        self.api, self.engine, self.worker = (Recorder(folder, SMALL) for _ in range(3))
        self.engine.role = "engine"
        self.engine.announce(RecordKind.PROCESS_FACT, Fact.MODEL, "tiny")
        self.api.announce(RecordKind.HOOK_OFF, 0, "module:gone")

    @contextmanager
    def clocks(self):
        """Let recorders read the clocks of the scene."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stagetrace.segment.read_pair", lambda: ClockPair(self.wall + self.now, self.now))
            patch.setattr("stagetrace.recorder.monotonic_ns", lambda: self.now)
            yield

    def request(self, number):
        """Record a request from its receipt to its end."""
        self._front_end(number)
        self._engine(number)

    def _record(self, recorder, number, after, *fields):
        self.now = number * 40 * MS + round(after * MS)
        recorder.record_at(self.now, *fields)

    def _front_end(self, number):
        api = self.api
        self._record(api, number, 0, RecordKind.RECEIVED, number)
        self._record(api, number, 0, RecordKind.LOOP_LAG, 0, 2 * MS)
        text, name = api.define(f"id-{number}"), api.intern
        for after, kind, *fields in (
            (0, RecordKind.FACT_TEXT, Fact.PHASE, name("load")),
            (0, RecordKind.FACT_NUMBER, Fact.INTENDED_UNIX_NS, 5, 1 << 28),
            (0.5, RecordKind.BODY_COMPLETE, 100),
            (1, RecordKind.ITEM_BEGIN, 0, name("http"), name("host"), name("image")),
            (1, RecordKind.FETCH_BEGIN, 0),
            (2, RecordKind.FETCH_END, 0, 1),
            (2, RecordKind.JOB_SUBMITTED, 0, JobKind.DECODE, 0),
            (2.5, RecordKind.JOB_STARTED, 0),
            (3, RecordKind.MEDIA_DECODED, 0, 1000, 20 << 16 | 10, name("jpeg")),
            (3, RecordKind.JOB_ENDED, 0),
            (3.2, RecordKind.ITEM_END, 0),
            (3.2, RecordKind.JOB_SUBMITTED, 1, JobKind.PROCESS, NONE),
            (3.5, RecordKind.JOB_STARTED, 1),
            (4, RecordKind.PROCESSOR_CACHE, 0),
            (5, RecordKind.JOB_ENDED, 1),
            (5, RecordKind.ENGINE_REQUEST, text),
            (13, RecordKind.OUTPUT_FIRST, text),
            (13.2, RecordKind.RESPONSE_STARTED, 200, 1),
            (13.4, RecordKind.FIRST_USEFUL),
            (17, RecordKind.OUTPUT_FINISHED, text, name("length")),
            (17.5, RecordKind.LAST_BYTE),
            (18, RecordKind.ENDED),
        ):
            self._record(api, number, after, kind, number, *fields)

    def _engine(self, number):
        engine, first = self.engine, 4 * number - 3
        key = engine.define(f"id-{number}")
        if engine.epoch != self._epoch:
            self._epoch = engine.epoch
            self._record(engine, number, 6, RecordKind.FRAME, first)
        hashed, stopped = engine.intern("hash"), engine.intern("stopped")
        for after, kind, whom, *fields in (
            (6, RecordKind.HELD, key, 30, 16, 1),
            (6, RecordKind.ENGINE_ITEM, key, 0, hashed, 20, 25),
            (6.5, RecordKind.ADDED, key),
            (7, RecordKind.STEP, first, 0, ReasonCode.ENCODER_CACHE << 16, 1, 1),
            (7, RecordKind.HEAD, first, key),
            (7, RecordKind.BLOCKED, key, first, ReasonCode.ENCODER_CACHE),
            (8, RecordKind.STEP_DONE, first, MS),
            (8, RecordKind.STEP, first + 1, 30, 1, 1),
            (8, RecordKind.MEMBER, key, first + 1, 30),
            (8, RecordKind.STEP_ITEM, first + 1, key),
            (8, RecordKind.BLOCKED, key, first + 1),
            (12, RecordKind.STEP_DONE, first + 1, 4 * MS),
            (12, RecordKind.FIRST_TOKEN, key, first + 1),
            (13, RecordKind.STEP, first + 2, 1, 1, 1 | 1 << 16),
            (13, RecordKind.MEMBER, key, first + 2, 1, 30),
            (14, RecordKind.STEP_DONE, first + 2, MS),
            (16, RecordKind.STEP_DONE, first + 3, MS),
            (16, RecordKind.FREED, key, stopped, 2),
            (20, RecordKind.PAUSE, 0, 1),
            (21, RecordKind.PAUSE, 0),
            (22, RecordKind.OWN_COST, 0, 4, 5000, 0, 90),
        ):
            self._record(engine, number, after, kind, whom, *fields)
        for after, kind, step in (
            (8.1, RecordKind.STEP_BEGIN, 1),
            (8.2, RecordKind.ENCODE_BEGIN, 1),
            (10, RecordKind.ENCODE_END, 1),
            (13.1, RecordKind.STEP_BEGIN, 2),
            (15.1, RecordKind.STEP_BEGIN, 3),
        ):
            self._record(self.worker, number, after, kind, first + step, engine.number)


DESCRIBED_BYTES = 480
"""What is written of a header."""


@contextmanager
def mounted(folder, options):
    """A file system of its own in a folder, if one can be mounted here."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    command = [str(mount), "-t", "tmpfs", "-o", options, "none", str(folder)]
    if (
        mount is None
        or umount is None
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run([umount, "--lazy", str(folder)], check=True)


FIELDS = [struct.Struct("<" + code) for code in RECORD.format.lstrip("<")]
OFFSETS = list(accumulate((field.size for field in FIELDS), initial=0))
TIME, KEY, KIND = 0, 1, 6

FILES = st.integers(0, 31)
PLACES = st.one_of(st.integers(0, DESCRIBED_BYTES), st.integers(HEADER_BYTES, 1 << 20))
"""In the header, or, folded to what is there, in the records."""

EXTREMES = st.sampled_from([b"\xff", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x1f", b"9" * 8])


def _within(content, place):
    if place < HEADER_BYTES:
        return place
    return HEADER_BYTES + place % max(len(content) - HEADER_BYTES, 1)


def flip(contents, file, place, bit):
    """Flip a bit."""
    content, place = contents[file], _within(contents[file], place)
    if place < len(content):
        content[place] ^= 1 << bit


def overwrite(contents, file, place, piece):
    """Write something else over a few bytes."""
    place = _within(contents[file], place)
    contents[file][place : place + len(piece)] = piece


def alter(contents, file, slot, field, value):
    """Put another value into a field of a record that stays whole."""
    content = contents[file]
    slots = (len(content) - HEADER_BYTES) // RECORD_BYTES
    if slots > 0:
        FIELDS[field].pack_into(content, HEADER_BYTES + slot % slots * RECORD_BYTES + OFFSETS[field], value)


def cut(contents, file, place):
    """Cut the file off."""
    del contents[file][_within(contents[file], place) :]


def swap(contents, file, place):
    """Let two files have each other's header."""
    one, other = contents[file], contents[place % len(contents)]
    one[:HEADER_BYTES], other[:HEADER_BYTES] = other[:HEADER_BYTES], one[:HEADER_BYTES]


def double(contents, file, place):
    """Leave an older copy beside the file."""
    content = contents[file]
    contents.append(content[: _within(content, place)])


def lose(contents, file):
    """Lose the file."""
    if len(contents) > 1:
        del contents[file]


def add(contents, _file, content):
    """Add a file that never was a segment."""
    contents.append(bytearray(content))


NUMBERS = st.integers(0, 40) | st.sampled_from([1 << 15, 1 << 16, 1 << 31, NONE - 1, NONE])
VALUES = st.one_of(
    st.tuples(st.just(TIME), st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1 << 44)),
    st.tuples(st.integers(KEY, KIND - 1), NUMBERS),
    st.tuples(st.just(KIND), st.sampled_from([int(kind) for kind in RecordKind])),
)


def _of(change, *draws):
    return st.tuples(FILES, *draws).map(lambda drawn: (change, drawn))


DAMAGE = st.lists(
    st.one_of(
        _of(flip, PLACES, st.integers(0, 7)),
        _of(overwrite, PLACES, EXTREMES | st.binary(min_size=1, max_size=32)),
        st.tuples(FILES, st.integers(0, 1 << 12), VALUES).map(lambda d: (alter, (d[0], d[1], *d[2]))),
        _of(cut, PLACES),
        _of(swap, FILES),
        _of(double, PLACES),
        _of(lose),
        _of(add, st.binary(max_size=64) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 256)),
    ),
    min_size=1,
    max_size=24,
)
"""What may happen to the files of a spool, one thing after the other."""


def written(folder):
    """The segments of a spool, without the room that is left in them."""
    contents = (path.read_bytes() for path in segment_paths(folder))
    return [content.rstrip(b"\0").ljust(HEADER_BYTES, b"\0") for content in contents]


def lay_out(folder, contents):
    """Make a spool of nothing but these files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, content in enumerate(contents):
        (folder / f"{number}.stagetrace").write_bytes(content)


def damaged(contents, damage):
    """The files of a spool after all that has happened to them."""
    left = [bytearray(content) for content in contents]
    for change, (file, *drawn) in damage:
        change(left, file % len(left), *drawn)
    return left


def altered(contents, kind, field, value, places=slice(None)):
    """The contents with another value in a field of the records of a kind that stand at some places."""
    left = [bytearray(content) for content in contents]
    found = [
        (content, offset)
        for content in left
        for offset in range(HEADER_BYTES, len(content) - RECORD_BYTES + 1, RECORD_BYTES)
        if RECORD.unpack_from(content, offset)[KIND] == kind
    ]
    for content, offset in found[places]:
        FIELDS[field].pack_into(content, offset + OFFSETS[field], value)
    return left


NEGATIVE = {
    "requests": ("upload_ns", "ttft_ns", "completion_ns", "ended_ns"),
    "media": ("begin_ns", "ready_ns"),
    "stages": ("begin_ns", "duration_ns"),
    "loop_lag": ("duration_ns",),
}
"""Durations, and offsets from the receipt: none of them may be negative."""


def check_whatever_is_read(spool, dataset):
    """Check that a damaged spool is read, and that what is read is possible."""
    if not segment_paths(spool):
        with pytest.raises(DataError, match="no segments here"):
            read_spool(spool)
        return None
    data = read_spool(spool)
    for request in (*data.requests, *data.open_requests):
        check_partition(request, partition(request))
    ingest_spool(spool, dataset, force=True)
    for table, columns in NEGATIVE.items():
        wrong = " OR ".join(f"{column} < 0" for column in columns)
        query = f"SELECT * FROM '{dataset}/{table}/*.parquet' WHERE {wrong}"
        assert duckdb.sql(query).fetchall() == []
    return data
