"""A real server that has its requests exported while it serves, and is stopped: nothing is missing."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import needs
import pytest
from receivers import attributes, grpc_receiver
from scenes import Client, Stream, body, gone, small_image, words

from stagetrace import Outcome, partition, read_spool
from stagetrace.attributes import EXPORT_VARIABLE
from stagetrace.process_records import has_died
from stagetrace_analyzer.classes import load_rules
from stagetrace_export.follow import LOCK_FILE
from stagetrace_export.spans import Origin, request_spans
from stagetrace_vllm.export import LOG_FILE

SENT = 40


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A model that costs next to nothing."""
    needs.vllm()
    from stagetrace_analyzer.demo.model import TINY, make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny", TINY)


async def traffic(server):
    """Texts and images, streamed and whole, and two clients that leave."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
        client = Client(session, server, "live")

        async def one(number):
            await asyncio.sleep(number * 0.1)
            content = words(20) if number % 3 else small_image()
            if number % 4 == 0:
                await Stream(client, f"stream-{number}", body(content, max_tokens=20)).read
            else:
                await client.send(f"whole-{number}", body(content, max_tokens=5))

        async def leave(number):
            stream = await client.start(f"left-{number}", body(words(20), max_tokens=1500))
            await gone(stream.read)

        await asyncio.gather(*map(one, range(SENT - 2)), *map(leave, range(2)))


def spans_of(spool):
    """Id, parent, and duration of the spans that the finished spool gives, by id."""
    data = read_spool(spool)
    origin = Origin.of(data, load_rules(None))
    made = [span for request in data.requests for span in request_spans(request, partition(request), origin)]
    return data, {span.context.span_id: (span.name, span.end_time - span.start_time) for span in made}


def wait_for(condition, what, seconds=60):
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_requests_are_exported_while_the_server_serves_and_after_it(tiny_model, start_server):
    """With one variable more in its environment, every request of a server arrives once, as it is read afterwards.

    Requests arrive while the server serves; when it is stopped by SIGTERM the exporter sends the rest and ends.
    """
    with grpc_receiver() as receiver:
        environment = {
            EXPORT_VARIABLE: "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_BSP_SCHEDULE_DELAY": "1000",
        }
        with start_server(tiny_model, "--max-num-seqs=4", environment=environment) as server:
            server.may_end = True
            with server.paced(5):
                asyncio.run(traffic(server))
            wait_for(lambda: len(mine(receiver)) > SENT / 2, "nothing arrived while the server served")
            asyncio.run(late(server))
            exporter = int((server.spool / LOCK_FILE).read_text())
            server.process.stop()
            wait_for(lambda: has_died(exporter), "the exporter did not end")
        data, expected = spans_of(server.spool)
        log = (server.spool / LOG_FILE).read_text()
        arrived = [
            (
                int.from_bytes(span.span_id, "big"),
                span.name,
                span.end_time_unix_nano - span.start_time_unix_nano,
            )
            for span in receiver.spans
        ]
    found = [request for request in data.requests if request.facts.get("phase") == "live"]
    assert len(mine(receiver)) == len(found) == SENT + 1
    assert sum(request.outcome is Outcome.CANCELLED for request in found) == 2
    assert len(arrived) == len(expected), log
    assert {span: told for span, *told in arrived} == {span: [*told] for span, told in expected.items()}
    assert f"{len(data.requests)} requests" in log
    assert "Traceback" not in log
    assert str(server.spool / LOG_FILE) in (server.spool.parent / "log").read_text()


async def late(server):
    """One more request, just before the server is stopped."""
    async with aiohttp.ClientSession() as session:
        await Client(session, server, "live").send("late", body(words(5), max_tokens=2))


def mine(receiver):
    """Labels of the requests of which a root span has arrived."""
    found = (attributes(span) for span in receiver.spans if not span.parent_span_id)
    return [told["stagetrace.label"] for told in found if told.get("stagetrace.phase") == "live"]
