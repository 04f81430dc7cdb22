"""The recording API across tasks, threads, executors, generators and processes."""

from __future__ import annotations

import asyncio
import contextvars
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

import stagetrace
from stagetrace import Outcome, Stage, partition, read_spool
from stagetrace.recording import current
from stagetrace.testing import check_partition, recorded


@pytest.fixture
def spool(tmp_path):
    """A folder that this process records into."""
    with recorded(tmp_path / "spool"):
        yield tmp_path / "spool"


def told(spool, set_aside=()):
    """The stages told of each request, by label; nothing else was set aside."""
    data = read_spool(spool)
    assert (data.faults, data.dropped, dict(data.set_aside)) == (0, 0, dict(set_aside))
    for request in data.requests:
        check_partition(request, partition(request))
    return {
        request.facts.get("label"): [
            part.stage for part in sorted(request.parts, key=lambda part: part.begin)
        ]
        for request in data.requests
    }


def test_tasks(spool):
    """A hundred requests in tasks of one loop keep their stages apart, also in tasks that they start."""

    async def preprocess():
        async with stagetrace.stage(Stage.PREPROCESS):
            await asyncio.sleep(0)

    async def answer(number):
        async with stagetrace.request(facts={"label": str(number)}):
            await asyncio.gather(*(preprocess() for _ in range(number % 4)))

    async def serve():
        await asyncio.gather(*(answer(number) for number in range(100)))

    asyncio.run(serve())
    assert told(spool) == {str(number): [Stage.PREPROCESS] * (number % 4) for number in range(100)}


def test_threads_share_a_process(spool):
    """Requests in threads keep their stages apart, and no record is lost."""

    def answer(label):
        for _ in range(300):
            with stagetrace.request(facts={"label": label}), stagetrace.stage(Stage.PREFILL):
                pass

    threads = [threading.Thread(target=answer, args=[str(number)]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = read_spool(spool)
    assert len(data.requests) == 1200
    assert {tuple(part.stage for part in request.parts) for request in data.requests} == {(Stage.PREFILL,)}
    assert data.set_aside == {}


def test_ticket_in_another_thread(spool):
    """Work on a ticket belongs to its request in whatever thread, and so does what is recorded within it."""
    tickets, done = queue.Queue(), queue.Queue()

    def work():
        while (ticket := tickets.get()) is not None:
            with ticket.work(), stagetrace.stage(Stage.ENCODE):
                stagetrace.item(0, modality="image")
            done.put(current.get())

    worker = threading.Thread(target=work)
    worker.start()
    for label in ("one", "two"):
        with stagetrace.request(facts={"label": label}):
            tickets.put(stagetrace.wait(Stage.PREFILL))
            assert done.get() is None
    tickets.put(None)
    worker.join()
    stages = [Stage.PREFILL_WAIT, Stage.PREFILL, Stage.ENCODE]
    assert told(spool) == {"one": stages, "two": stages}


def test_ticket_of_a_cancelled_task(spool):
    """A client that leaves while its request waits is cancelled in that wait, and late work does no harm."""

    async def serve():
        tickets = []

        async def answer():
            async with stagetrace.request():
                tickets.append(stagetrace.wait(Stage.PREFILL))
                await asyncio.Event().wait()

        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with tickets[0].work():
            pass

    asyncio.run(serve())
    (request,) = read_spool(spool).requests
    assert request.outcome is Outcome.CANCELLED
    assert partition(request).completion[-1].stage is Stage.PREFILL_WAIT


def test_executor(spool):
    """A thread pool needs the context or the ticket; ``to_thread`` passes it by itself."""

    def decode():
        with stagetrace.stage(Stage.MEDIA_DECODE, item=0):
            pass

    async def answer(pool):
        loop = asyncio.get_running_loop()
        async with stagetrace.request(facts={"label": "asyncio"}):
            await asyncio.to_thread(decode)
            await loop.run_in_executor(pool, contextvars.copy_context().run, decode)
            await loop.run_in_executor(pool, decode)

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(answer(pool))
        with stagetrace.request(facts={"label": "threads"}):
            pool.submit(contextvars.copy_context().run, decode).result()
    assert told(spool, {"call_outside_a_request": 1}) == {
        "asyncio": [Stage.MEDIA_DECODE] * 2,
        "threads": [Stage.MEDIA_DECODE],
    }


def test_generator_that_holds_a_request(spool):
    """A request in a generator ends with it, wherever it is advanced or closed."""

    def answer(label):
        with stagetrace.request(facts={"label": label}):
            for letter in "abc":
                with stagetrace.stage(Stage.DECODE):
                    pass
                yield letter

    assert list(answer("whole")) == ["a", "b", "c"]
    half = contextvars.copy_context().run(answer, "half")
    assert contextvars.copy_context().run(next, half) == "a"
    half.close()
    assert current.get() is None
    other = answer("thread")
    next(other)
    thread = threading.Thread(target=other.close)
    thread.start()
    thread.join()
    outcomes = {request.facts["label"]: request.outcome for request in read_spool(spool).requests}
    assert outcomes == {"whole": Outcome.OK, "half": Outcome.CANCELLED, "thread": Outcome.CANCELLED}
    current.set(None)


def test_blocks_that_end_crosswise(spool):
    """Two blocks in one context that end in the order of their beginning leave no request behind."""

    def answer():
        with stagetrace.request():
            yield

    first, second = answer(), answer()
    next(first)
    next(second)
    assert [list(first), list(second)] == [[], []]
    assert current.get() is None


def test_asynchronous_generator_closed_by_the_loop(spool):
    """An answer that nobody reads to its end is closed elsewhere and is cancelled."""

    async def answer():
        async with stagetrace.request():
            with stagetrace.stage(Stage.DECODE):
                yield 1
                yield 2

    async def serve():
        async def read_one():
            return await anext(generator)

        generator = answer()
        assert await asyncio.create_task(read_one()) == 1

    asyncio.run(serve())
    (request,) = read_spool(spool).requests
    assert request.outcome is Outcome.CANCELLED
    assert request.parts[0].end is not None


def work_for(carrier, stage=Stage.ENCODE):
    """What a worker process does for a request."""
    with stagetrace.resume(carrier), stagetrace.stage(stage, 1):
        stagetrace.item(1, width=20)
        stagetrace.finish(output_tokens=9)
    return os.getpid()


def start_worker(spool):
    """Begin to record in a process that was not forked."""
    stagetrace.start(spool, service="worker", role="worker")


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_pool_of_processes(spool, how):
    """Stages, items and facts of another process belong to the request, and say where they were."""
    context = multiprocessing.get_context(how)
    with ProcessPoolExecutor(1, mp_context=context, initializer=start_worker, initargs=[spool]) as pool:
        with stagetrace.request(facts={"label": how}):
            with stagetrace.stage(Stage.MEDIA_DECODE, 0):
                pass
            carrier = json.loads(json.dumps(stagetrace.carrier()))
            assert pool.submit(work_for, carrier).result() != os.getpid()
        data = read_spool(spool)
    assert data.set_aside == {}
    (request,) = data.requests
    check_partition(request, partition(request))
    local, remote = sorted(request.parts, key=lambda part: part.begin)
    assert (local.process, remote.stage, remote.item) == (request.instance, Stage.ENCODE, 1)
    assert remote.process != local.process
    assert data.processes[remote.process].facts == {"service": "worker"}
    assert request.items[1].facts == {"width": 20}
    assert request.facts == {"label": how, "output_tokens": 9}
    assert request.received < local.begin < local.end < remote.begin < remote.end < request.ended
    assert [check for check in data.checks if not check.holds] == []


def test_forked_child_is_not_its_parents_request(spool):
    """What a forked child records belongs to no request until it resumes one."""

    def child():
        with stagetrace.stage(Stage.ENCODE):
            pass
        work_for(carrier, Stage.PREFILL)

    with stagetrace.request():
        carrier = stagetrace.carrier()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        with stagetrace.stage(Stage.DECODE):
            pass
    assert told(spool, {"call_outside_a_request": 1}) == {None: [Stage.PREFILL, Stage.DECODE]}


def test_resume_in_the_same_process(spool):
    """A carrier may come back to where it was made, and travel on from where it was resumed."""
    with stagetrace.request():
        carrier = stagetrace.carrier()
        with stagetrace.resume(carrier):
            assert stagetrace.carrier() == carrier
            with stagetrace.stage(Stage.PREFILL):
                pass
            stagetrace.first_output()
    (request,) = read_spool(spool).requests
    assert [part.stage for part in request.parts] == [Stage.PREFILL]
    assert request.first_useful is not None


@pytest.mark.parametrize(
    "carrier",
    [
        None,
        "x",
        {"stagetrace-request": None},
        {"stagetrace-request": "../.."},
        {"stagetrace-request": "ab-1x"},
    ],
)
def test_what_is_no_carrier_is_counted(spool, carrier):
    """What names no request is counted, and its stages are nobody's."""
    with stagetrace.resume(carrier), stagetrace.stage(Stage.ENCODE):
        pass
    assert told(spool, {"unknown_carrier": 1}) == {}


@pytest.mark.parametrize("as_headers", [str.title, lambda name: name.encode()])
def test_carrier_travels_as_headers(spool, as_headers):
    """Whatever becomes of the case of its key, and as the pairs that a server has."""
    with stagetrace.request():
        (pair,) = stagetrace.carrier().items()
        key, name = as_headers(pair[0]), pair[1]
        sent = {key: name} if isinstance(key, str) else [(key, name.encode()), (b"host", b"x")]
        work_for(sent)
    assert told(spool) == {None: [Stage.ENCODE]}


def test_carrier_of_an_unknown_request_is_counted(spool):
    """Stages of a request that is not in the spool are set aside."""
    work_for({"stagetrace-request": "00ff00ff00ff-7"})
    assert told(spool, {"resumed_request_without_beginning": 1}) == {}


def test_outcome_is_told_where_the_request_was_received(spool):
    """A worker may not say how a request ends."""
    with stagetrace.request(), stagetrace.resume(stagetrace.carrier()):
        stagetrace.finish(code="x")
    data = read_spool(spool)
    assert (data.requests[0].outcome, data.set_aside) == (Outcome.OK, {"unknown_outcome": 1})


def test_process_that_stopped_recording(tmp_path):
    """A request of which a worker did not record its part is set aside by that reason."""
    code = (
        "import sys, pathlib, stagetrace as s; from stagetrace.recording import process_recorder\n"
        "spool = pathlib.Path(sys.argv[1]); s.start(spool)\n"
        "with s.resume({'stagetrace-request': sys.argv[2]}), s.stage(s.Stage.ENCODE):\n"
        "    (spool / 'OFF').touch(); process_recorder().look_at = 0; process_recorder().look()\n"
        "(spool / 'OFF').unlink()"
    )
    with recorded(tmp_path), stagetrace.request():
        name = stagetrace.carrier()["stagetrace-request"]
        subprocess.run([sys.executable, "-c", code, str(tmp_path), name], check=True)
    data = read_spool(tmp_path)
    assert (data.requests, data.set_aside) == ([], {"in_flight_while_recording_was_off": 1})
