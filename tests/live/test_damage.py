"""Damage to a live server and to its spool: what was recorded is read, and the server never notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import needs
import pytest
import serve_as_the_command
from damage import DAMAGE, check_whatever_is_read, damaged, lay_out, mounted, written
from hypothesis import HealthCheck, given, settings
from kinds import check_joined, pieces, spent
from pacing import Pace
from scenes import Client, body, small_image, words

from stagetrace import Outcome, read_spool
from stagetrace.records import RECORD_BYTES
from stagetrace.segment import read_segment
from stagetrace.spool import segment_paths

ANSWERED = 24
"""Requests that are answered before a process is killed."""

LONG = ("long", "longer")
"""Requests whose answers are on their way for certain when it is."""

JUST_BEFORE_S = 0.02
"""The client may have an answer before the server has recorded that it was sent."""

SEGMENT = 1 << 16
"""Size of a segment in a spool of at most 1 MiB."""


class Server:
    """A server of a tiny model that records into small segments, and how it ended."""

    def __init__(self, model, folder, spool, *arguments, environment=None, front_ends=1):
        from stagetrace_analyzer.demo.server import VllmServer

        pace = Pace(folder)
        environment = pace.environment({"STAGETRACE_SPOOL_MAX_BYTES": "1M"} | (environment or {}))
        arguments = ("--max-num-seqs=4", *pace.arguments, *arguments)
        if front_ends > 1:
            arguments += (f"--api-server-count={front_ends}",)
        self.vllm = VllmServer(
            model, folder / "log", spool=spool, arguments=arguments, environment=environment
        )
        if front_ends > 1:
            # The module that serves by itself has only one.
            self.vllm._command[1:3] = [serve_as_the_command.__file__]
        self.spool, self.visible, self.paced = spool, {}, pace.paced

    @property
    def url(self):
        return self.vllm.url

    def __enter__(self):
        self.vllm.start()
        try:
            self.vllm.wait_ready()
        except BaseException:
            self.vllm.stop()
            raise
        return self

    def __exit__(self, *error):
        self.vllm.stop()

    def terminate(self):
        """Stop it as an operator does; returns its exit code."""
        self.vllm._process.terminate()
        return self.vllm._process.wait(30)

    def ended(self):
        """Wait until it has ended by itself; returns its exit code."""
        return self.vllm._process.wait(30)

    def pids(self):
        """The process ids of each role, as the segments tell them."""
        found = {}
        for path in segment_paths(self.spool):
            header = read_segment(path).header
            found.setdefault(header.role, set()).add(header.pid)
        return found


def played(server, phase, scene):
    """Play a scene to its end, whatever becomes of its requests."""
    from stagetrace_analyzer.demo.client import Client as DemoClient

    async def within():
        async with DemoClient(server.url, None) as client:
            # A random model answers in letters only when told: only text is useful.
            server.visible = client._constant
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await scene(Client(session, server, phase))

    return asyncio.run(within())


def report(spool):
    """What ``stagetrace analyze`` says of a spool, in words and in numbers."""
    command = [sys.executable, "-m", "stagetrace", "analyze", str(spool)]
    done = [
        subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=60)
        for more in ((), ("--json",))
    ]
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 2
    return done[0].stdout, json.loads(done[1].stdout)


# --- kill -9 ----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a client saw of a request: whether anything came, when it had all, how many tokens that was."""

    status: int | None = None
    content: bytearray = field(default_factory=bytearray)
    whole_at: float | None = None
    tokens: int | None = None

    def is_whole(self):
        """Whether the answer is there to its end, and no error."""
        streams = self.content.startswith(b"data: ")
        done = self.content.endswith(b"data: [DONE]\n\n") if streams else bool(self.content)
        return self.status == 200 and done and b'"error"' not in self.content


class Load:
    """Clients that send one request after the other until the server is no more."""

    def __init__(self, client):
        self.client, self.seen, self.killed_at = client, {}, None
        self._numbers = itertools.count()

    async def send(self, label, request):
        """Send a request and keep what comes."""
        seen = self.seen[label] = Seen()
        headers = self.client.headers(label) | {"X-Request-Id": f"twice-{len(self.seen) // 2}"}
        url = self.client.server.url + "/v1/chat/completions"
        stream = {"stream_options": {"include_usage": True}} if request["stream"] else {}
        content = self.client.server.visible | request | stream
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
            async with self.client.session.post(url, json=content, headers=headers) as response:
                seen.status = response.status
                async for piece in response.content.iter_any():
                    seen.content += piece
            if seen.is_whole():
                seen.whole_at = time.monotonic()
                seen.tokens = pieces(bytes(seen.content))[-1]["usage"]["completion_tokens"]
        return seen.whole_at is not None

    async def one_after_the_other(self):
        while self.killed_at is None or time.monotonic() < self.killed_at + 10:
            number = next(self._numbers)
            content = (words(20), *([small_image((64, 64))] if number % 4 == 0 else []))
            request = body(*content, max_tokens=4 + number % 9, stream=number % 2 == 0)
            if not await self.send(f"r{number}", request):
                return

    def answered(self):
        return sum(seen.whole_at is not None for seen in self.seen.values())

    async def _until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.seen
            await asyncio.sleep(0.01)

    async def until_killed(self, pid_of):
        """Kill a process in the middle of the load; returns when nothing more comes."""
        tasks = [asyncio.create_task(self.one_after_the_other()) for _ in range(4)]
        await self._until(lambda: self.answered() >= ANSWERED)
        long = body(words(30), max_tokens=1900, stream=True)
        with self.client.server.paced(5):
            tasks += [asyncio.create_task(self.send(label, long)) for label in LONG]
            await self._until(
                lambda: all(label in self.seen and len(self.seen[label].content) > 999 for label in LONG)
            )
            pid = pid_of()
            self.killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*tasks)
        return self


def check_killed(server, load, tell, name):
    """Check what is left of a server under load after one of its processes was killed."""
    data = read_spool(server.spool)
    found = {}
    for request in (*data.requests, *data.open_requests):
        found.setdefault(request.facts["label"], []).append(request)
    whole = {
        label: seen
        for label, seen in load.seen.items()
        if seen.whole_at is not None and seen.whole_at < load.killed_at - JUST_BEFORE_S
    }
    broken = {label for label, seen in load.seen.items() if seen.status and seen.whole_at is None}
    assert len(whole) >= ANSWERED - 4
    assert set(LONG) <= broken
    for label, seen in whole.items():
        (request,) = found[label]
        spent(request)
        check_joined(request, 1)
        assert request.facts["output_tokens"] == seen.tokens
    outcomes = Counter(request.outcome for label in broken for request in found[label])
    assert outcomes.total() == len(broken)
    assert set(outcomes) <= {Outcome.ERROR, Outcome.LOST}, outcomes
    assert data.open_requests == []
    assert data.dropped == data.faults == 0
    # Clients went on asking an engine that was no more, and a record may have been cut off.
    asked_in_vain = data.set_aside.pop("request_without_engine", 0)
    assert asked_in_vain <= len(broken)
    assert set(data.set_aside) <= {"torn_record"}, data.set_aside
    assert [check for check in data.checks if not check.holds] == []
    check_whatever_is_read(server.spool, server.spool.parent / "dataset")
    text, facts = report(server.spool)
    counts = Counter()
    for entry in facts["classes"]:
        counts.update(entry["outcomes"])
    assert counts == Counter(str(request.outcome) for request in data.requests)
    assert all(f"{count} {outcome}" in text for outcome, count in counts.items()) or len(facts["classes"]) > 1
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    tell(
        f"`kill -9` of {name} under load",
        f"of {len(whole)} answered requests nothing; {len(broken)} answers broke off",
        told + (f", {asked_in_vain} of them without engine" if asked_in_vain else ""),
    )
    return data


@pytest.mark.parametrize("role", ["api", "worker"])
def test_killed_process(model, tmp_path, tell, role):
    """Whatever process is killed, every request that was answered is there whole, and the others are told."""
    with Server(model, tmp_path, tmp_path / "spool") as server:

        def victim():
            (pid,) = server.pids()[role]
            return pid

        load = played(server, role, lambda client: Load(client).until_killed(victim))
        server.ended()
    check_killed(server, load, tell, {"api": "the API server", "worker": "the worker"}[role])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that costs next to nothing."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import TINY, make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny", TINY)


@pytest.fixture(scope="module")
def two_front_ends(model, tmp_path_factory):
    """A server with two API servers, whose engine is killed under load; the server, the load, its pids."""
    folder = tmp_path_factory.mktemp("two")
    pids = {}
    with Server(model, folder, folder / "spool", front_ends=2) as server:

        def victim():
            pids.update(server.pids())
            (pid,) = pids["engine"]
            return pid

        load = played(server, "engine", lambda client: Load(client).until_killed(victim))
        server.ended()
    return server, load, pids


def test_killed_engine_of_two_front_ends(two_front_ends, tell):
    """Both API servers record, their requests are joined with the one engine, and no name is there twice.

    Every two requests bear the same ``X-Request-Id``.
    """
    server, load, pids = two_front_ends
    data = check_killed(server, load, tell, "the engine of two API servers")
    assert len(pids["api"]) == 2
    instances = Counter(request.instance for request in data.requests)
    assert len(instances) == 2
    assert min(instances.values()) > 3
    assert {data.processes[name].header.pid for name in instances} == pids["api"]
    names = [request.request_id for request in data.requests]
    identifiers = [engine.identifier for request in data.requests for engine in request.engine_requests]
    assert len(set(names)) == len(names)
    assert len(set(identifiers)) == len(identifiers)
    external = Counter(r.facts["external_id"] for r in data.requests if r.outcome is Outcome.OK)
    assert max(external.values()) == 2
    (engine,) = data.engines
    taken = [(r.instance, e) for r in data.requests for e in r.engine_requests if e.held is not None]
    assert {one.steps.engine for _, one in taken} == {engine.engine}
    assert {instance for instance, _ in taken} == set(instances)


def told(data):
    """What a report says of the quality of what was read."""
    return data.set_aside, [check for check in data.checks if not check.holds]


def test_real_segments_damaged(two_front_ends, tmp_path, tell):
    """Whatever happens to the files of a real server, they are read, and what is read is possible."""
    server, *_ = two_front_ends
    contents = written(server.spool)
    sound = told(read_spool(server.spool))
    examples = Counter()

    @given(DAMAGE)
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def damage_and_read(damage):
        lay_out(tmp_path / "spool", damaged(contents, damage))
        data = check_whatever_is_read(tmp_path / "spool", tmp_path / "dataset")
        examples["read"] += data is not None
        examples["told"] += data is not None and told(data) != sound

    damage_and_read()
    assert examples["told"] > examples["read"] / 2
    tell(
        f"bits, fields, headers, lengths, files of this spool changed, {examples['read']} times",
        "what was changed",
        f"something set aside, or counts that do not agree, {examples['told']} times",
    )


# --- places that cannot be written ------------------------------------------------------------------

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = {"type": "text", "text": "the lamp on the table near the window"}
ASKED = [
    (CHAT, body(TEXT, max_tokens=12, logprobs=True, top_logprobs=3)),
    (CHAT, body(TEXT, max_tokens=12) | STREAM),
    (CHAT, body(small_image((64, 64)), TEXT, max_tokens=8, logprobs=True)),
    (COMPLETIONS, {"prompt": "the lamp on the table", "max_tokens": 12, "logprobs": 2}),
    (COMPLETIONS, {"prompt": "the door", "max_tokens": 5} | STREAM),
    (COMPLETIONS, {"prompt": ["the lamp", "the door"], "max_tokens": 5}),
    (CHAT, body(TEXT, max_tokens=-1)),
    ("/v1/nothing", {}),
]
"""Answers of every kind, and refusals."""


def answers(server, phase):
    """Status, headers and bytes of the answers to all that is asked, one after the other."""

    async def scene(client):
        found = []
        for number, (path, request) in enumerate(ASKED):
            headers = client.headers(str(number)) | {"X-Request-Id": f"asked-{number}"}
            content = server.visible | request
            # Two tokens that come at once are one piece of a stream.
            with server.paced(50 if request.get("stream") else 0):
                async with client.session.post(server.url + path, json=content, headers=headers) as response:
                    # What is left to differ is when it was said.
                    body = re.sub(rb'"created":\d+', b"", await response.read())
                    said = {name: value for name, value in response.headers.items() if name.lower() != "date"}
                    found.append((response.status, said, body))
        return found

    return played(server, phase, scene)


@pytest.fixture(scope="module")
def without_us(model, tmp_path_factory):
    """What a server answers that was told to load other plug-ins than ours, its exit code, and its spool."""
    folder = tmp_path_factory.mktemp("without")
    environment = {"VLLM_PLUGINS": "lora_filesystem_resolver"}
    with Server(model, folder, folder / "spool", environment=environment) as server:
        # Twice, because only what is answered alike can be compared.
        return answers(server, "x"), answers(server, "x"), server.terminate(), server.spool


def test_plugin_that_is_not_listed_does_nothing(without_us, tell):
    """VLLM_PLUGINS without our name: the server answers, and nothing is written."""
    first, second, code, spool = without_us
    assert [status for status, *_ in first] == [200] * 6 + [400, 404]
    assert [body for *_, body in first] == [body for *_, body in second]
    assert code == 0
    assert not spool.exists()
    tell("VLLM_PLUGINS without stagetrace", "everything: nothing is recorded", "there is no spool")


def test_place_that_cannot_be_written(model, without_us, tmp_path, tell):
    """A server whose spool cannot be written answers byte for byte what it answers without us.

    The place is below a file, then read-only, full, and full again after some time.
    """
    expected, _, code, _ = without_us
    disk = tmp_path / "disk"
    disk.write_text("in the way")
    with contextlib.ExitStack() as stack, Server(model, tmp_path, disk / "spool") as server:
        assert answers(server, "below a file") == expected
        disk.unlink()
        disk.mkdir()
        with mounted(disk, "ro,size=1m"):
            time.sleep(1.1)
            assert answers(server, "read-only") == expected
        stack.enter_context(mounted(disk, f"size={3 * SEGMENT + 4096}"))
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * (3 * SEGMENT))
        time.sleep(1.1)
        assert answers(server, "full") == expected
        assert segment_paths(server.spool) == []
        ballast.unlink()
        time.sleep(1.1)
        assert answers(server, "room") == expected
        assert {role: len(pids) for role, pids in server.pids().items()} == {
            "api": 1,
            "engine": 1,
            "worker": 1,
        }
        filled = 0
        while len(written(server.spool)[0]) < SEGMENT - RECORD_BYTES:
            assert answers(server, "filling") == expected
            filled += 1
            assert filled < 50
        assert answers(server, "full again") == expected
        subprocess.run([shutil.which("mount"), "-o", "remount,size=1m", str(disk)], check=True)
        time.sleep(1.1)
        assert answers(server, "room again") == expected
        assert server.terminate() == code
        data = read_spool(server.spool)
        check_whatever_is_read(server.spool, tmp_path / "dataset")
        text, facts = report(server.spool)
    phases = Counter(request.facts["phase"] for request in data.requests)
    traced = len(ASKED) - 1
    assert phases["room"] == phases["room again"] == traced
    assert not {"below a file", "read-only", "full", "full again"} & phases.keys()
    assert data.dropped == facts["ingest"]["dropped"] > 0
    assert data.faults == 0
    lost = "in_flight_while_records_were_lost"
    assert set(data.set_aside) <= {lost, f"engine_request_{lost}"}, data.set_aside
    assert "no room for records" in text
    tell(
        f"spool below a file, read-only, full, full again; {len(ASKED)} requests each",
        "the records of that time; of the answers not a byte",
        f"{data.dropped} records dropped, no room for records (from, to)",
    )
