"""The recording API: what a server calls, and what is read of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import pytest

import stagetrace
from stagetrace import Outcome, Stage, partition, read_spool
from stagetrace.recording import close_recorder, current, process_recorder
from stagetrace.records import TEXT_MAX_BYTES
from stagetrace.spool import segment_paths
from stagetrace.testing import check_partition, recorded

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spool(tmp_path):
    """A folder that this process records into."""
    with recorded(tmp_path / "spool"):
        yield tmp_path / "spool"


def read(spool, set_aside=()):
    """What was recorded; nothing of it was set aside but what was expected, and every request is covered."""
    data = read_spool(spool)
    assert data.faults == data.dropped == 0
    assert data.set_aside == Counter(dict(set_aside))
    assert [check for check in data.checks if not check.holds] == []
    for request in data.requests:
        check_partition(request, partition(request))
    return data


def stages(intervals):
    """The stages of intervals, in order."""
    return [interval.stage for interval in intervals]


def test_one_request(spool):
    """Stages that follow each other are the request's, on both horizons; between them nothing was told."""
    with stagetrace.request():
        with stagetrace.stage(Stage.PREPROCESS):
            pass
        with stagetrace.stage(Stage.PREFILL):
            pass
        stagetrace.first_output()
        with stagetrace.stage(Stage.DECODE):
            pass
    (request,) = read(spool).requests
    assert request.outcome is Outcome.OK
    assert [part.stage for part in request.parts] == [Stage.PREPROCESS, Stage.PREFILL, Stage.DECODE]
    assert {part.process for part in request.parts} == {request.instance}
    parts = partition(request)
    assert stages(parts.ttft) == [
        *(Stage.RECEIVE, Stage.PREPROCESS, Stage.UNATTRIBUTED, Stage.PREFILL),
        Stage.RESPOND,
    ]
    assert stages(parts.completion)[3:] == [Stage.PREFILL, Stage.UNATTRIBUTED, Stage.DECODE, Stage.RESPOND]


def test_asynchronous_blocks(spool):
    """Requests, stages, and tickets are asynchronous blocks too."""

    async def answer():
        async with stagetrace.request():
            async with stagetrace.stage(Stage.PREPROCESS):
                await asyncio.sleep(0)
            async with stagetrace.wait(Stage.ENCODE).work():
                await asyncio.sleep(0)
            async with stagetrace.resume({}), stagetrace.stage(Stage.PREFILL):
                pass

    asyncio.run(answer())
    (request,) = read(spool).requests
    assert [part.stage for part in request.parts] == [Stage.PREPROCESS, Stage.ENCODE_WAIT, Stage.ENCODE]


def test_without_a_folder_nothing_happens(tmp_path):
    """Nothing is recorded, made, set or raised when no folder is named."""
    code = (
        "import os, stagetrace as s\n"
        "s.start(service='none'); before = os.listdir()\n"
        "with s.request({'traceparent': 'x'}, {'model': 'm'}), s.stage(s.Stage.ENCODE, 0):\n"
        "    s.item(0, bytes=1); s.first_output(); s.finish(code='x'); assert s.carrier() == {}\n"
        "    ticket = s.wait(s.Stage.PREFILL); ticket.cancel()\n"
        "    with ticket.work(), s.resume({'stagetrace-request': 'x'}): pass\n"
        "assert os.listdir() == before == []"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_folder_of_the_environment(tmp_path):
    """The folder, its size and the sampling are read from the environment, as the vLLM plug-in does."""
    code = (
        "import stagetrace as s; s.start(); s.start()\n"
        "for _ in range(2):\n"
        "    with s.request({'traceparent': '00-' + '0' * 31 + '1-' + '1' * 16 + '-0' + str(_)}): pass"
    )
    environment = {
        "STAGETRACE_SPOOL": str(tmp_path / "spool"),
        "STAGETRACE_SPOOL_MAX_BYTES": "1M",
        "STAGETRACE_SAMPLE": "parent",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    data = read_spool(tmp_path / "spool")
    assert (len(data.requests), data.not_sampled) == (1, 1)
    assert segment_paths(tmp_path / "spool")[0].stat().st_size == 1 << 16


def test_second_start_changes_nothing(spool, tmp_path, caplog):
    """A second start goes on where the first one began; that it names another folder is said."""
    stagetrace.start(spool)
    assert caplog.text == ""
    stagetrace.start(tmp_path / "other")
    with stagetrace.request():
        pass
    assert not (tmp_path / "other").exists()
    assert f"records into {spool} already" in caplog.text
    assert len(read(spool).requests) == 1


@pytest.mark.parametrize("arguments", [{"spool": 7}, {"service": 7}, {"role": 7}, {"spool": "a\0b"}])
def test_start_never_raises(tmp_path, monkeypatch, caplog, arguments):
    """What cannot be followed is one line in the log at most, and requests are answered."""
    monkeypatch.chdir(tmp_path)
    try:
        stagetrace.start(**{"spool": tmp_path} | arguments)
        with stagetrace.request(), stagetrace.stage(Stage.ENCODE):
            ran = True
    finally:
        close_recorder()
    assert ran
    assert len(caplog.records) <= 1


def test_process_facts(tmp_path):
    """Service and role are told of the process; a role that would be no file name is not taken."""
    for name, role in (("one", "worker"), ("two", "../x")):
        with recorded(tmp_path / name):
            stagetrace.start(service="captions")
        with recorded(tmp_path / name):
            stagetrace.start(service="captions", role=role)
            with stagetrace.request():
                pass
    found = [list(read(tmp_path / name).processes.values()) for name in ("one", "two")]
    assert [(one.facts, one.header.role) for (one,) in found] == [({"service": "captions"}, "api")] * 2


def test_role(tmp_path):
    """The first start says what the process does."""
    code = f"import stagetrace as s; s.start({str(tmp_path)!r}, role='worker')\nwith s.request(): pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    (process,) = read(tmp_path).processes.values()
    assert process.header.role == "worker"


@pytest.mark.parametrize(
    "headers",
    [
        {
            "Traceparent": TRACEPARENT,
            "BAGGAGE": "user=secret,stagetrace.label=image",
            "Authorization": "secret",
        },
        [(b"traceparent", TRACEPARENT.encode()), (b"baggage", b"stagetrace.label=image"), (b"x", b"secret")],
    ],
)
def test_headers(spool, headers):
    """Of headers, in whatever case and form, only ours are kept."""
    with stagetrace.request(headers):
        pass
    (request,) = read(spool).requests
    assert request.facts == {"traceparent": TRACEPARENT, "label": "image"}
    assert b"secret" not in segment_paths(spool)[0].read_bytes()


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "00-zz", "baggage": "stagetrace.phase=" + "x" * 5000},
        {"traceparent": TRACEPARENT + "\n", "baggage": "\udcff,stagetrace.intended_unix_ns=-1,=,"},
        {"baggage": "stagetrace.intended_unix_ns=" + "9" * 30},
    ],
)
def test_hostile_headers_do_no_harm(spool, headers):
    """What is malformed or too long is not taken."""
    with stagetrace.request(headers):
        pass
    (request,) = read(spool).requests
    assert request.facts == {}


@pytest.mark.parametrize("headers", [7, [1, 2], {"a": None, "baggage": None}, {3: 4}])
def test_headers_that_are_none_are_counted(spool, headers):
    """A wrong call is counted and the request is recorded."""
    with stagetrace.request(headers):
        pass
    assert len(read(spool, {"unknown_headers": 1}).requests) == 1


def test_facts(spool):
    """Known facts reach the request; None is unknown."""
    with stagetrace.request(facts={"model": "tiny", "max_tokens": 7, "stream": False}):
        stagetrace.facts(external_id="a-1", phase=None)
        stagetrace.finish(
            finish_reason="stop", output_tokens=3, cached_tokens=None, media_items=0, status=200
        )
    (request,) = read(spool).requests
    assert request.facts == {
        "model": "tiny",
        "max_tokens": 7,
        "stream": False,
        "external_id": "a-1",
        "finish_reason": "stop",
        "output_tokens": 3,
        "media_items": 0,
        "status": 200,
    }


@pytest.mark.parametrize(
    "facts",
    [{"prompt": "secret"}, {"model": 7}, {"max_tokens": "7"}, {"max_tokens": -1}, {"status": 1 << 62}],
)
def test_unknown_facts_are_counted(spool, facts):
    """A fact that there is not, or of another type, is counted and not kept."""
    with stagetrace.request(facts=facts):
        stagetrace.finish(**facts)
    (request,) = read(spool, {"unknown_fact": 2}).requests
    assert request.facts == {}
    assert b"secret" not in segment_paths(spool)[0].read_bytes()


class RefusedError(Exception):
    """Of the server."""


@pytest.mark.parametrize(
    ("raised", "outcome", "code"),
    [
        (RefusedError("secret"), Outcome.ERROR, "RefusedError"),
        (KeyboardInterrupt(), Outcome.ERROR, "KeyboardInterrupt"),
        (asyncio.CancelledError(), Outcome.CANCELLED, None),
        (GeneratorExit(), Outcome.CANCELLED, None),
    ],
)
def test_exceptions(spool, raised, outcome, code):
    """What leaves the block is the outcome, passes untouched, and its text is not kept."""
    with pytest.raises(type(raised)) as caught, stagetrace.request(), stagetrace.stage(Stage.PREFILL):
        raise raised
    assert caught.value is raised
    (request,) = read(spool).requests
    assert (request.outcome, request.facts.get("error_code")) == (outcome, code)
    assert stages(partition(request).completion)[:2] == [Stage.RECEIVE, Stage.PREFILL]
    assert request.last_byte is None
    assert b"secret" not in segment_paths(spool)[0].read_bytes()


@pytest.mark.parametrize(
    ("told", "outcome", "code"),
    [
        ({}, Outcome.OK, None),
        ({"outcome": Outcome.OK}, Outcome.OK, None),
        ({"code": "bad_image"}, Outcome.ERROR, "bad_image"),
        ({"outcome": Outcome.ERROR}, Outcome.ERROR, "error"),
        ({"outcome": Outcome.CANCELLED}, Outcome.CANCELLED, None),
    ],
)
def test_told_outcomes(spool, told, outcome, code):
    """A server may say how a request ended; the first error is the cause of those behind it."""
    with stagetrace.request():
        stagetrace.finish(**told)
    (request,) = read(spool).requests
    assert (request.outcome, request.facts.get("error_code")) == (outcome, code)
    assert (request.last_byte is None) == (outcome is Outcome.CANCELLED)


def test_error_before_an_exception_is_the_cause(spool):
    """The code that the server told stays when an exception follows."""
    with suppress(RefusedError), stagetrace.request():
        stagetrace.finish(code="bad_image")
        raise RefusedError
    (request,) = read(spool).requests
    assert request.facts["error_code"] == "bad_image"


@pytest.mark.parametrize(
    "told", [{"outcome": Outcome.LOST}, {"outcome": "gone"}, {"outcome": Outcome.OK, "code": "x"}]
)
def test_impossible_outcomes_are_counted(spool, told):
    """An outcome that a server cannot tell changes nothing."""
    with stagetrace.request():
        stagetrace.finish(**told)
    (request,) = read(spool, {"unknown_outcome": 1}).requests
    assert request.outcome is Outcome.OK


@pytest.mark.parametrize("stage", ["encoding", Stage.UNATTRIBUTED, Stage.ENCODE_WAIT, None, [], 3])
def test_unknown_stages_are_counted(spool, stage):
    """What is no work and no transfer is counted, and its block runs."""
    with stagetrace.request():
        with stagetrace.stage(stage):
            ran = True
        with stagetrace.wait(stage).work():
            pass
    assert ran
    (request,) = read(spool, {"unknown_stage": 2}).requests
    assert request.parts == []


def test_stage_without_a_wait_cannot_be_waited_for(spool):
    """There is no wait for a hand-off."""
    with stagetrace.request(), stagetrace.wait(Stage.HANDOFF).work():
        pass
    assert read(spool, {"unknown_stage": 1}).requests[0].parts == []


def test_calls_outside_of_a_request_are_counted(spool):
    """Nothing raises where no request is known, and the report says how often."""
    with stagetrace.stage(Stage.ENCODE), stagetrace.wait(Stage.PREFILL).work():
        stagetrace.item(0, bytes=3)
        stagetrace.first_output()
        stagetrace.finish()
    stagetrace.item(0, bytes=3)
    stagetrace.first_output()
    stagetrace.finish()
    assert stagetrace.carrier() == {}
    assert read(spool, {"call_outside_a_request": 5}).requests == []


def test_misuse_never_stops_recording(spool):
    """However often a server is wrong, its requests are recorded."""
    for _ in range(300):
        with stagetrace.request(facts={"nothing": 1}), stagetrace.stage("x", -1):
            stagetrace.finish(7)
    expected = dict.fromkeys(("unknown_fact", "unknown_stage", "unknown_item", "unknown_outcome"), 300)
    assert len(read(spool, expected).requests) == 300


def test_items(spool):
    """Facts of media items reach the item; of a URL scheme and host are kept, of a hash a digest."""
    with stagetrace.request():
        for index in range(2):
            with stagetrace.stage(Stage.RETRIEVAL, index):
                pass
            with stagetrace.stage(Stage.MEDIA_DECODE, item=index):
                stagetrace.item(index, modality="image", bytes=5 << 32, width=4, height=3, format="png")
        stagetrace.item(1, url="https://u:secret@cdn.example/secret?secret", hash="secret", media_cache="hit")
    (request,) = read(spool).requests
    first, second = request.items.values()
    assert first.facts == {"modality": "image", "bytes": 5 << 32, "width": 4, "height": 3, "format": "png"}
    assert (second.facts["scheme"], second.facts["host"]) == ("https", "cdn.example")
    assert len(second.facts["hash"]) == 32
    assert request.received < first.begin < first.ready < second.begin < second.ready
    assert partition(request).critical_item == 1
    assert b"secret" not in segment_paths(spool)[0].read_bytes()


def test_impossible_items_are_counted(spool):
    """An item has a place, and facts of known names and types."""
    with stagetrace.request():
        stagetrace.item(-1, bytes=1)
        stagetrace.item("0")
        stagetrace.item(0, pixels=b"secret", bytes="x")
    read(spool, {"unknown_item": 2, "unknown_fact": 2})


@stagetrace.stage(Stage.PREPROCESS)
def tokens(text):
    """Count the letters of a text."""
    return len(text)


@stagetrace.stage(Stage.PREFILL)
async def prefill():
    """Wait for a moment."""
    await asyncio.sleep(0)
    return "prefilled"


@stagetrace.stage(Stage.DECODE)
def letters(text):
    """One letter after the other, and whatever is sent in between."""
    first = yield text[0]
    second = yield text[1]
    return [first, second]


@stagetrace.stage(Stage.DECODE)
async def letters_async(text):
    """One letter after the other, or what is sent; an error thrown at it is a letter too."""
    given = None
    for letter in text:
        try:
            given = yield given or letter
        except RefusedError:
            given = "!"


def test_decorated_functions(spool):
    """A decorated function of any kind is itself, and each call of it is in the stage."""

    async def answer():
        with stagetrace.request():
            assert tokens("four") == 4
            assert await prefill() == "prefilled"
            generator = letters("ab")
            assert [next(generator), generator.send("x")] == ["a", "b"]
            with pytest.raises(StopIteration) as stopped:
                generator.send("y")
            assert stopped.value.value == ["x", "y"]
            assert [letter async for letter in letters_async("cd")] == ["c", "d"]

    asyncio.run(answer())
    (request,) = read(spool).requests
    assert [part.stage for part in request.parts] == [
        Stage.PREPROCESS,
        Stage.PREFILL,
        Stage.DECODE,
        Stage.DECODE,
    ]
    assert (tokens.__name__, tokens.__doc__) == ("tokens", "Count the letters of a text.")


def test_decorated_asynchronous_generator_is_spoken_to(spool):
    """What is sent and thrown reaches an asynchronous generator, and it is closed with its wrapper."""

    async def answer():
        with stagetrace.request():
            generator = letters_async("abcd")
            got = [await anext(generator), await generator.asend("x"), await generator.athrow(RefusedError)]
            assert got == ["a", "x", "!"]
            await generator.aclose()
            failing = letters_async("a")
            await anext(failing)
            with pytest.raises(ZeroDivisionError):
                await failing.athrow(ZeroDivisionError)

    asyncio.run(answer())
    (request,) = read(spool).requests
    assert len(request.parts) == 2
    assert all(part.end for part in request.parts)


def test_decorated_functions_call_themselves(spool):
    """Calls within and beside calls are parts of their own."""

    @stagetrace.stage(Stage.PREPROCESS)
    def nested(depth):
        return depth and 1 + nested(depth - 1)

    with stagetrace.request():
        assert nested(5) == 5
    (request,) = read(spool).requests
    assert len(request.parts) == 6
    assert all(part.end for part in request.parts)
    assert stages(partition(request).completion) == [Stage.RECEIVE, *[Stage.PREPROCESS] * 11, Stage.RESPOND]


def test_ticket(spool):
    """A ticket is a wait until its work begins, or until it is cancelled; then it is used up."""
    with stagetrace.request():
        worked, cancelled = stagetrace.wait(Stage.PREFILL), stagetrace.wait(Stage.ENCODE, item=0)
        with worked.work():
            pass
        cancelled.cancel()
        cancelled.cancel()
        worked.cancel()
        with worked.work():
            pass
    (request,) = read(spool).requests
    assert Counter(part.stage for part in request.parts) == {
        Stage.PREFILL_WAIT: 1,
        Stage.PREFILL: 2,
        Stage.ENCODE_WAIT: 1,
    }
    wait, work, _ = sorted((p for p in request.parts if p.item is None), key=lambda part: part.begin)
    assert wait.end == work.begin
    assert all(part.end for part in request.parts)


def test_stage_that_does_not_end_is_counted(spool):
    """A stage or a wait that is never ended lasts as long as the request, and is counted."""
    with stagetrace.request():
        stagetrace.stage(Stage.PREPROCESS).__enter__()
        stagetrace.wait(Stage.ENCODE)
    (request,) = read(spool, {"stage_without_end": 2}).requests
    assert stages(partition(request).completion) == [Stage.RECEIVE, Stage.PREPROCESS, Stage.ENCODE_WAIT]


def test_stage_after_its_request_is_counted(spool):
    """What goes on when the answer was given belongs to no horizon."""
    with stagetrace.request():
        ticket = stagetrace.wait(Stage.ENCODE)
        ticket.cancel()
    with ticket.work():
        pass
    (request,) = read(spool, {"stage_after_its_request": 1}).requests
    assert stages(partition(request).completion)[-1] is Stage.RESPOND


def test_request_within_a_request(spool):
    """Each has its own stages, and the outer one goes on."""
    with stagetrace.request(facts={"label": "outer"}):
        with stagetrace.request(facts={"label": "inner"}), stagetrace.stage(Stage.ENCODE):
            pass
        with stagetrace.stage(Stage.PREFILL):
            pass
    assert current.get() is None
    found = {r.facts["label"]: [p.stage for p in r.parts] for r in read(spool).requests}
    assert found == {"outer": [Stage.PREFILL], "inner": [Stage.ENCODE]}


def test_nothing_belongs_to_a_request_that_is_over(spool):
    """What a task still says of a request that has ended changes nothing of it, and is counted."""

    async def straggler(go_on):
        await go_on.wait()
        stagetrace.first_output()
        stagetrace.finish(code="late")
        with stagetrace.stage(Stage.DECODE):
            assert stagetrace.carrier() == {}
        stagetrace.wait(Stage.DECODE).cancel()

    async def answer():
        go_on = asyncio.Event()
        async with stagetrace.request():
            task = asyncio.create_task(straggler(go_on))
        go_on.set()
        await task

    asyncio.run(answer())
    (request,) = read(spool, {"call_outside_a_request": 4}).requests
    assert (request.outcome, request.first_useful, request.parts) == (Outcome.OK, None, [])


def test_service_of_a_forked_process(spool):
    """A forked process has its parent's service; another name comes too late."""
    stagetrace.start(service="captions")
    stagetrace.start(service="other")
    child = os.fork()
    if child == 0:
        with stagetrace.request():
            pass
        os._exit(0)
    os.waitpid(child, 0)
    with stagetrace.request():
        pass
    assert [one.facts for one in read(spool).processes.values()] == [{"service": "captions"}] * 2


def test_last_word_counts(spool):
    """What the server tells of a request counts more than what the client said of it in a header."""
    with stagetrace.request({"baggage": "stagetrace.label=hers"}):
        stagetrace.facts(label="ours", max_tokens=1, external_id="a")
        stagetrace.facts(max_tokens=2, external_id="b")
    (request,) = read(spool).requests
    assert (request.facts["label"], request.facts["max_tokens"]) == ("ours", 2)
    assert request.facts["external_id"] == "a"


def test_long_texts_are_not_kept(spool):
    """Of a text that a client may have written no more is kept in memory than in the file."""
    with stagetrace.request(facts={"model": "m" * 100_000}):
        pass
    (request,) = read(spool).requests
    assert request.facts["model"] == "m" * TEXT_MAX_BYTES
    assert max(map(len, process_recorder()._segment.interned)) == TEXT_MAX_BYTES


def test_first_output_counts_once(spool):
    """The first useful byte is the first one that is told; without any there is no such time."""
    with stagetrace.request():
        stagetrace.first_output()
        with stagetrace.stage(Stage.DECODE):
            stagetrace.first_output()
    with stagetrace.request():
        pass
    first, second = read(spool).requests
    assert first.first_useful < first.parts[0].begin
    assert (second.first_useful, partition(second).ttft) == (None, ())


def test_left_out_requests(tmp_path, monkeypatch):
    """A request that sampling leaves out leaves one record, whatever is called within it."""
    monkeypatch.setenv("STAGETRACE_SAMPLE", "0")
    with recorded(tmp_path), stagetrace.request(facts={"model": "m"}), stagetrace.stage(Stage.ENCODE, 0):
        stagetrace.item(0, bytes=1)
        stagetrace.first_output()
        stagetrace.finish(code="x")
        assert stagetrace.carrier() == {}
        with stagetrace.wait(Stage.PREFILL).work(), stagetrace.resume(stagetrace.carrier()):
            stagetrace.stage(Stage.DECODE).__enter__()
    data = read(tmp_path)
    assert (data.records, data.not_sampled, data.requests) == (1, 1, [])


def test_switch(tmp_path):
    """A file OFF switches the API off and on again while the process runs."""
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "OFF").touch()
    with recorded(spool):
        with stagetrace.request():
            pass
        assert segment_paths(spool) == []
        (spool / "OFF").unlink()
        process_recorder().look_at = 0
        with stagetrace.request():
            pass
    assert len(read_spool(spool).requests) == 1


def test_open_request_of_a_process_that_ended_is_lost(tmp_path):
    """A request whose process was killed is lost, in the stage that it was in."""
    code = (
        f"import os, signal, stagetrace as s; s.start({str(tmp_path)!r})\n"
        "with s.request(), s.stage(s.Stage.ENCODE): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    (request,) = read(tmp_path).requests
    assert (request.outcome, [part.stage for part in request.parts]) == (Outcome.LOST, [Stage.ENCODE])


def test_bytes_of_a_request(spool):
    """A request with an image, three stages and a wait stays within a kilobyte."""
    with stagetrace.request({"traceparent": TRACEPARENT}, {"model": "tiny"}):
        with stagetrace.stage(Stage.RETRIEVAL, 0):
            stagetrace.item(0, modality="image", bytes=1, format="png", width=1, height=1)
        for stage in (Stage.MEDIA_DECODE, Stage.PREPROCESS):
            with stagetrace.stage(stage):
                pass
        with stagetrace.wait(Stage.PREFILL).work():
            pass
        stagetrace.finish(output_tokens=5)
    data = read(spool)
    assert data.records * 32 <= 1024
