"""Stages of torch modules: real modules on the CPU, and what the host does with a scripted device."""

from __future__ import annotations

import asyncio
import inspect
import time
from contextvars import Context
from types import SimpleNamespace

import pytest
from scripted_cuda import ScriptedCuda

import stagetrace
from stagetrace import Stage, partition, read_spool
from stagetrace.recording import close_recorder
from stagetrace.testing import check_partition
from stagetrace_torch import collect, timed, timed_batch, timing
from stagetrace_torch.device import CudaTimer

MS = 1_000_000


@pytest.fixture
def spool(tmp_path):
    """A folder that this process records into."""
    close_recorder()
    stagetrace.start(tmp_path / "spool")
    yield tmp_path / "spool"
    close_recorder()


def stages(folder):
    """What was told of each request: stage, item and milliseconds, in order; each partitioned whole."""
    data = read_spool(folder)
    for request in data.requests:
        check_partition(request, partition(request))
    told = [
        [(part.stage, part.item, part.end and (part.end - part.begin) / MS) for part in request.parts]
        for request in data.requests
    ]
    return told, data.set_aside


# --- on the CPU ------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    """A module that sleeps for as many seconds as it is told."""
    torch = pytest.importorskip("torch")

    class Sleeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, seconds):
            time.sleep(seconds)
            if seconds > 1:
                raise MemoryError("out of memory")
            return self.weight + seconds

    return Sleeper()


def test_calls_of_a_module_are_stages(spool, sleeper):
    """Each call of a timed module is a stretch of its stage, as long as the call, and its output is its own."""
    assert timed(sleeper, Stage.ENCODE, item=1) is sleeper
    with stagetrace.request():
        assert float(sleeper(0.02)) == pytest.approx(0.02)
        sleeper(0.0)
    ((first, second),), set_aside = stages(spool)
    assert (first[:2], second[:2]) == ((Stage.ENCODE, 1), (Stage.ENCODE, 1))
    assert first[2] >= 20
    assert second[2] < first[2]
    assert set_aside == {}


def test_call_of_nobody_is_counted(spool, sleeper):
    """A call outside of a request, a warm-up for instance, is counted and otherwise as ever."""
    timed(sleeper, Stage.ENCODE)
    sleeper(0.0)
    with stagetrace.request():
        pass
    assert stages(spool) == ([[]], {"call_outside_a_request": 1})


def test_functions_and_failures(spool):
    """A function is wrapped; its exception passes, and the stage ends there."""

    def fail():
        raise MemoryError("out of memory")

    work = timed(fail, Stage.PREPROCESS)
    assert work.__name__ == "fail"
    with stagetrace.request(), pytest.raises(MemoryError):
        work()
    (((stage, item, took_ms),),), set_aside = stages(spool)
    assert (stage, item) == (Stage.PREPROCESS, None)
    assert took_ms is not None
    assert set_aside == {}


def test_failure_of_a_module_ends_its_stage(spool, sleeper):
    """A module that raises leaves no stage open, and the next call is one of its own."""
    timed(sleeper, Stage.ENCODE)
    with stagetrace.request():
        with pytest.raises(MemoryError):
            sleeper(1.01)
        sleeper(0.0)
    (((_, _, failed_ms), (_, _, next_ms)),), set_aside = stages(spool)
    assert failed_ms >= 1000 > next_ms
    assert set_aside == {}


def test_batch_is_the_work_of_all_its_requests(spool, sleeper):
    """The requests of a batch wait until it begins, and are in the stage for all of it."""
    tickets = []
    requests = [stagetrace.request(), stagetrace.request()]
    for request in requests:
        with request:
            tickets.append(stagetrace.wait(Stage.ENCODE, item=0))
            if request is requests[1]:
                with timed_batch(sleeper, tickets):
                    sleeper(0.02)
    told, _ = stages(spool)
    assert [[part[:2] for part in parts] for parts in told] == [
        [(Stage.ENCODE_WAIT, 0), (Stage.ENCODE, 0)]
    ] * 2
    assert all(parts[1][2] >= 20 for parts in told)


def test_nothing_is_done_where_nothing_is_recorded(sleeper):
    """Without a folder to record into, modules work as ever."""
    close_recorder()
    timed(sleeper, Stage.ENCODE)
    with stagetrace.request(), timed_batch(sleeper, [stagetrace.wait(Stage.ENCODE)]):
        assert sleeper(0.0) == 0


# --- on a scripted device --------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """A scripted device."""
    scripted = ScriptedCuda()
    monkeypatch.setitem(timing._DEVICES, "scripted:0", timing._Device(CudaTimer(scripted)))
    return scripted


@pytest.fixture
def encoder():
    """A module whose parameters are on the scripted device."""
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device="scripted:0")]))


def encode(encoder):
    """Launch the encoder for a ticket of the current request."""
    with timed_batch(encoder, [stagetrace.wait(Stage.ENCODE, item=0)]):
        pass


def parts_of_one(folder):
    """The parts of the only request."""
    (request,) = read_spool(folder).requests
    return sorted(request.parts, key=lambda part: part.begin)


def test_device_tells_when_it_is_done(spool, cuda, encoder):
    """The stage lasts as long as the device took, is known only then, and the host never waits."""
    with stagetrace.request():
        encode(encoder)
    cuda.reached = 1
    collect()
    assert [(part.stage, part.end) for part in parts_of_one(spool)] == [(Stage.ENCODE_WAIT, None)]
    cuda.reached = 2
    collect()
    waited, encoded = parts_of_one(spool)
    assert (waited.stage, encoded.stage, encoded.item) == (Stage.ENCODE_WAIT, Stage.ENCODE, 0)
    assert waited.end == encoded.begin
    assert encoded.end - encoded.begin == MS


def test_device_does_one_batch_after_the_other(spool, cuda, encoder):
    """A batch that is launched while the device is busy begins when the one before is done."""
    cuda.event_ms = 5000
    with stagetrace.request():
        encode(encoder)
        encode(encoder)
    cuda.reached = 4
    collect()
    first, second = (part for part in parts_of_one(spool) if part.stage is Stage.ENCODE)
    assert first.end == second.begin
    assert second.end - second.begin == 5000 * MS


def test_next_call_reads_what_the_device_has_done(spool, cuda, encoder):
    """A server that never collects learns of a batch when it launches the next one."""
    with stagetrace.request():
        encode(encoder)
        cuda.reached = 2
        encode(encoder)
    assert [part.stage for part in parts_of_one(spool) if part.end].count(Stage.ENCODE) == 1


def test_nothing_is_timed_while_a_graph_is_captured(spool, cuda, encoder):
    """In a capture the wait ends and the work is unknown: nothing is guessed."""
    cuda.capturing = True
    with stagetrace.request():
        encode(encoder)
    cuda.capturing = False
    (waited,) = parts_of_one(spool)
    assert waited.stage is Stage.ENCODE_WAIT
    assert waited.end is not None
    assert cuda.recorded == []


def test_call_in_a_capture_leaves_no_trace(spool, cuda, encoder):
    """A call that nothing waited for and that is not timed has neither a begin nor an end."""

    def work():
        return "embeddings"

    work.parameters = encoder.parameters
    cuda.capturing = True
    with stagetrace.request():
        assert timed(work, Stage.ENCODE)() == "embeddings"
    cuda.capturing = False
    assert stages(spool) == ([[]], {})


def test_broken_device_never_reaches_the_host(spool, cuda, encoder):
    """When events fail the host goes on, the fault is counted, and later work is timed."""
    with stagetrace.request():
        encode(encoder)
        cuda.broken, cuda.reached = True, 2
        collect()
        cuda.broken = False
        encode(encoder)
        cuda.reached = 4
        collect()
    assert stagetrace.recording.process_recorder().faults == 1
    stages_of_parts = [part.stage for part in parts_of_one(spool)]
    assert stages_of_parts.count(Stage.ENCODE) == 1
    assert all(part.end is not None for part in parts_of_one(spool))


def test_calls_of_a_function_on_a_device(spool, cuda, encoder):
    """A timed function without a ticket has no wait: its stage is what the device took."""

    class Encoder:
        parameters = staticmethod(encoder.parameters)

        def __call__(self):
            return "embeddings"

    work = timed(Encoder(), Stage.ENCODE)
    with stagetrace.request():
        assert work() == "embeddings"
        cuda.reached = 2
        collect()
    (encoded,) = parts_of_one(spool)
    assert encoded.end - encoded.begin == MS


# --- the same on the host and on a device ----------------------------------------------------------


@pytest.fixture(params=["host", "device"])
def anywhere(request, monkeypatch):
    """What has no parameters is on the host, or on a scripted device that is done at once."""
    monkeypatch.delitem(timing._DEVICES, "None", raising=False)
    if request.param == "device":
        cuda = ScriptedCuda()
        cuda.reached = 1 << 30
        monkeypatch.setitem(timing._DEVICES, "None", timing._Device(CudaTimer(cuda)))
    return request.param


async def _coroutine(log):
    log.append("begun")
    await asyncio.sleep(0.02)
    log.append("ended")
    return "embeddings"


def _generator(log):
    log.append("begun")
    sent = yield 1
    log.append(sent)
    time.sleep(0.02)
    return "embeddings"


async def _async_generator(log):
    log.append("begun")
    yield 1
    await asyncio.sleep(0.02)
    log.append("ended")


async def _use_coroutine(work, log):
    assert await work(log) == "embeddings"


async def _use_generator(work, log):
    items = work(log)
    assert next(items) == 1
    with pytest.raises(StopIteration) as stopped:
        items.send("ended")
    assert stopped.value.value == "embeddings"


async def _use_async_generator(work, log):
    assert [item async for item in work(log)] == [1]


@pytest.mark.parametrize(
    ("work", "use", "is_one"),
    [
        (_coroutine, _use_coroutine, inspect.iscoroutinefunction),
        (_generator, _use_generator, inspect.isgeneratorfunction),
        (_async_generator, _use_async_generator, inspect.isasyncgenfunction),
    ],
)
def test_functions_stay_what_they_are(spool, anywhere, work, use, is_one):
    """Coroutine functions and generators stay such, do their work, and are in the stage until they end."""
    wrapped = timed(work, Stage.ENCODE, item=2)
    assert is_one(wrapped)
    log = []

    async def serve():
        with stagetrace.request():
            await use(wrapped, log)
            collect()

    asyncio.run(serve())
    assert log == ["begun", "ended"]
    (((stage, item, took_ms),),), set_aside = stages(spool)
    assert (stage, item) == (Stage.ENCODE, 2)
    assert took_ms >= 20 if anywhere == "host" else took_ms == 1
    assert set_aside == {}


@pytest.mark.parametrize(
    ("name", "seen", "counted"),
    [
        ("encode", [Stage.ENCODE], {}),
        ("encoder", [], {"unknown_stage": 1}),
        (Stage.ENCODE_WAIT, [], {"unknown_stage": 1}),
        (["encode"], [], {"unknown_stage": 1}),
        (None, [], {"unknown_stage": 1}),
    ],
)
def test_stages_by_name(spool, anywhere, name, seen, counted):
    """A stage may be given by its name; what is none is counted at each call and never raised."""
    work = timed(lambda: "embeddings", name)
    with stagetrace.request():
        assert work() == "embeddings"
        collect()
    (parts,), set_aside = stages(spool)
    assert [stage for stage, _, _ in parts] == seen
    assert set_aside == counted


def test_call_after_its_request_is_counted(spool, anywhere):
    """Work that is done in the context of a request which has ended is nobody's."""
    work = timed(lambda: "embeddings", Stage.ENCODE)

    async def serve():
        with stagetrace.request():
            late = asyncio.create_task(_later(work))
        await late
        collect()

    asyncio.run(serve())
    assert stages(spool) == ([[]], {"call_outside_a_request": 1})


async def _later(work):
    work()


def test_batch_has_no_request_of_its_own(spool, anywhere):
    """In a batch the current request is the one before: what is told there is that one's, or nobody's."""
    with stagetrace.request():
        others = stagetrace.wait(Stage.ENCODE)
        assert Context().run(_carrier_in_batch, [others]) == {}
        with stagetrace.request():
            mine = stagetrace.carrier()
            assert _carrier_in_batch([stagetrace.wait(Stage.ENCODE), others]) == mine
            assert stagetrace.carrier() == mine


def _carrier_in_batch(tickets):
    """What is current in a batch, by its carrier."""
    with timed_batch(None, tickets):
        return stagetrace.carrier()


def test_batch_that_is_never_begun_leaves_its_tickets(spool, anywhere):
    """Tickets are taken up where the block begins, not where it is made."""
    with stagetrace.request():
        ticket = stagetrace.wait(Stage.ENCODE)
        timed_batch(None, [ticket])
        ticket.cancel()
    ((waited,),), set_aside = stages(spool)
    assert waited[0] is Stage.ENCODE_WAIT
    assert waited[2] is not None
    assert set_aside == {}
