"""Following a spool: receivers that are away, exporters that are stopped or killed, servers that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from stagetrace import DataError, Recorder, UsageError
from stagetrace.records import RECORD_BYTES, RecordKind
from stagetrace.segment import HEADER_BYTES
from stagetrace_export.closed import ClosedRequests
from stagetrace_export.follow import LOCK_FILE, follow, sole_exporter

SMALL = HEADER_BYTES + 100 * RECORD_BYTES

WRITER = """
import sys, time
from pathlib import Path
from stagetrace import Recorder
from stagetrace.records import RecordKind as K
recorder = Recorder(Path(sys.argv[1]), 7296)
for number in range(1, int(sys.argv[2]) + 1):
    for kind in (K.RECEIVED, K.LAST_BYTE, K.ENDED):
        recorder.record(kind, number)
    time.sleep(float(sys.argv[3]))
print("written", flush=True)
sys.stdin.read()
"""

EXPORTER = """
import sys
from pathlib import Path
from stagetrace_export.closed import ClosedRequests
from stagetrace_export.follow import follow, sole_exporter, stop_signals
spool, sent = Path(sys.argv[1]), open(sys.argv[2], "a")
def export(closed):
    for request in closed.requests:
        print(request.request_id, file=sent, flush=True)
    return True
with sole_exporter(spool), stop_signals() as stop:
    print("follows", flush=True)
    follow(ClosedRequests(spool, spool / "position"), export, stop=stop, interval_s=0.05, until_ended=True)
"""


class Recipient:
    """Takes what is exported, unless it is away.

    Attributes:
        ids: Requests that came, and how often.
        calls: How often it was asked.
        away: How often it will not take anything.
    """

    def __init__(self, away=0):
        self.ids, self.calls, self.away = Counter(), 0, away

    def __call__(self, closed):
        self.calls += 1
        if self.away:
            self.away -= 1
            return False
        self.ids.update(request.request_id for request in closed.requests)
        return True


@contextmanager
def running(code, *arguments):
    """A process that has said its first word and is killed at the end."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def record(recorder, *numbers):
    """Record requests from their receipt to their end."""
    for number in numbers:
        for kind in (RecordKind.RECEIVED, RecordKind.LAST_BYTE, RecordKind.ENDED):
            recorder.record(kind, number)


@pytest.fixture
def spool(tmp_path):
    """The folder of a spool."""
    return tmp_path / "spool"


@pytest.fixture
def written(spool):
    """A spool whose process has recorded 200 requests and has ended."""
    with running(WRITER, spool, 200, 0):
        pass
    return spool


def test_ends_by_itself(written, capsys):
    """It ends when the processes have ended and all is exported, and says how much that was."""
    recipient = Recipient()
    followed = follow(
        ClosedRequests(written), recipient, stop=threading.Event(), until_ended=True, interval_s=0.02
    )
    assert followed.is_complete
    assert len(recipient.ids) == followed.counts["exported"] == 200
    assert capsys.readouterr().err == "stagetrace: 200 requests exported\n"


def test_receiver_that_is_away(written, capsys):
    """What is not taken is sent again until it is; an outage is two lines, and nothing is lost or doubled."""
    recipient = Recipient(away=5)
    source = ClosedRequests(written)
    followed = follow(
        source, recipient, stop=threading.Event(), until_ended=True, interval_s=0.02, delays_s=(0.01, 0.02)
    )
    assert followed.is_complete
    assert set(recipient.ids.values()) == {1}
    assert len(recipient.ids) == 200
    lines = capsys.readouterr().err.splitlines()
    assert ["did not take" in line for line in lines] == [True, False, False]
    assert "answers again, after 6 attempts" in lines[1]


def test_nothing_is_read_while_the_receiver_is_away(spool):
    """While a batch waits, the spool keeps the rest."""
    recorder = Recorder(spool, SMALL)
    record(recorder, *range(1, 50))
    source, stop = ClosedRequests(spool, grace_ns=0), threading.Event()
    held = []

    def export(closed):
        record(recorder, *range(100 * len(held) + 100, 100 * len(held) + 200))
        held.append(source._window.held_bytes)
        return len(held) > 8

    thread = threading.Thread(
        target=follow,
        args=(source, export),
        kwargs={"stop": stop, "interval_s": 0.01, "delays_s": (0.01, 0.02)},
    )
    time.sleep(1.1)  # a request is closed a second after its end
    thread.start()
    while len(held) <= 8:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert len(set(held[:9])) == 1


def test_stop_exports_what_is_closed(spool):
    """Told to stop, it exports what is closed by then, and leaves the rest to the next exporter."""
    recorder = Recorder(spool, SMALL)
    record(recorder, 1, 2, 3)
    time.sleep(1.1)
    record(recorder, 4)
    recorder.record(RecordKind.RECEIVED, 5)
    stop, recipient = threading.Event(), Recipient()
    stop.set()
    source = ClosedRequests(spool, spool / "position")
    followed = follow(source, recipient, stop=stop)
    assert followed.is_complete
    assert len(recipient.ids) == 3
    assert followed.counts["open"] == 2


def test_stop_has_a_deadline(written, capsys):
    """Told to stop while the receiver is away, it gives up at the deadline; another exporter sends it all."""
    stop, recipient = threading.Event(), Recipient(away=1 << 30)
    stop.set()
    source = ClosedRequests(written, written / "position")
    followed = follow(source, recipient, stop=stop, interval_s=0.02, deadline_s=0.1, delays_s=(0.02, 0.02))
    assert not followed.is_complete
    assert 1 < recipient.calls < 20
    assert "0 requests exported; what is not exported stays in the spool" in capsys.readouterr().err
    recipient.away = 0
    source = ClosedRequests(written, written / "position")
    follow(source, recipient, stop=threading.Event(), until_ended=True, interval_s=0.02)
    assert len(recipient.ids) == 200


def test_position_that_cannot_be_stored(written, tmp_path, capsys):
    """It is told, and the export goes on."""
    source = ClosedRequests(written, tmp_path / "no" / "position")
    followed = follow(source, Recipient(), stop=threading.Event(), until_ended=True, interval_s=0.02)
    assert followed.counts["exported"] == 200
    assert capsys.readouterr().err.count("the position cannot be stored (No such file or directory)") == 1


def test_receiver_that_nobody_will_set_right(written, capsys):
    """Once the server has ended, a receiver that takes nothing is tried for a while; another exporter sends it all."""
    with running("print()") as starter:
        starter.wait()
    recipient = Recipient(away=1 << 30)
    source = ClosedRequests(written, written / "position")
    how = {"stop": threading.Event(), "until_ended": True, "starter": starter.pid, "interval_s": 0.02}
    followed = follow(source, recipient, abandon_s=0.1, delays_s=(0.02, 0.02), **how)
    assert not followed.is_complete
    assert recipient.calls > 1
    assert "the server has ended, and the receiver still takes nothing" in capsys.readouterr().err
    recipient.away = 0
    assert follow(ClosedRequests(written, written / "position"), recipient, **how).is_complete
    assert len(recipient.ids) == 200


def test_what_is_read_without_a_request_is_handed_over(spool):
    """Each poll is handed over, so that steps are sent though no request has ended."""
    recorder, stop, polls = Recorder(spool), threading.Event(), []
    recorder.record(RecordKind.RECEIVED, 1)

    def export(closed):
        polls.append(len(closed.requests))
        if len(polls) == 3:
            stop.set()
        return True

    follow(ClosedRequests(spool), export, stop=stop, interval_s=0.01)
    assert polls[:3] == [0, 0, 0]


def test_second_exporter_of_a_spool(spool):
    """It is refused in one line that names the first one, with exit code 2."""
    with sole_exporter(spool):
        with (
            pytest.raises(UsageError, match=f"process {os.getpid()} exports it already") as refused,
            sole_exporter(spool),
        ):
            pass
        assert refused.value.exit_code == 2
    with sole_exporter(spool):
        assert (spool / LOCK_FILE).stat().st_mode & 0o777 == 0o600


def test_lock_follows_no_link(spool, tmp_path):
    """Where somebody has put a link in place of the lock, one line says so, and what it leads to is left alone."""
    (tmp_path / "theirs").write_text("precious")
    spool.mkdir()
    (spool / LOCK_FILE).symlink_to(tmp_path / "theirs")
    with pytest.raises(DataError, match="symbolic link"), sole_exporter(spool):
        pass
    assert (tmp_path / "theirs").read_text() == "precious"


def test_lock_of_a_killed_exporter_is_free(spool, tmp_path):
    """An exporter that was killed is in nobody's way."""
    with running(EXPORTER, spool, tmp_path / "sent") as process:
        with pytest.raises(UsageError, match=f"process {process.pid}"), sole_exporter(spool):
            pass
        process.kill()
        process.wait()
        with sole_exporter(spool):
            pass


@pytest.mark.slow
def test_exporter_is_killed_again_and_again(spool, tmp_path):
    """While a process records and rolls its segments, killed exporters leave no request out; a batch may come twice."""
    sent = tmp_path / "sent"
    with running(WRITER, spool, 0, 0):
        pass  # so that the spool is there
    command = [sys.executable, "-c", WRITER, str(spool), "3000", "0.001"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        for alive_s in (1.4, 0.3, 0.9, 0.5):
            with running(EXPORTER, spool, sent):
                time.sleep(alive_s)
        writer.stdout.readline()
        writer.stdin.close()
        writer.wait()
        with running(EXPORTER, spool, sent) as last:
            assert last.wait(60) == 0
            said = last.stderr.read().decode()
    found = Counter(sent.read_text().split())
    assert len(found) == 3000
    assert max(found.values()) <= 5
    assert sum(found.values()) < 2 * 3000
    assert said.count("\n") == 1, said


def test_sigterm(spool, tmp_path):
    """SIGTERM ends it in good order, with what was closed by then."""
    record(Recorder(spool, SMALL), 1, 2, 3)
    time.sleep(1.1)
    with running(EXPORTER, spool, tmp_path / "sent") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read() == b"stagetrace: 3 requests exported\n"
    assert len((tmp_path / "sent").read_text().split()) == 3


def test_starter_is_waited_for(spool):
    """An exporter whose server has not recorded anything yet waits for as long as the server lives."""
    recipient = Recipient()
    with running("print(); import sys; sys.stdin.read()") as starter:
        options = {"stop": threading.Event(), "interval_s": 0.02, "until_ended": True, "starter": starter.pid}
        thread = threading.Thread(target=follow, args=(ClosedRequests(spool), recipient), kwargs=options)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        with running(WRITER, spool, 7, 0):
            pass
        time.sleep(0.3)
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    assert len(recipient.ids) == 7
