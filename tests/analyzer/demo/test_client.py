"""The open-loop client, against a real server in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("PIL")

from stagetrace.errors import ServerError
from stagetrace_analyzer.demo.arrivals import IMAGE, TEXT, Arrival, ArrivalPlan, sequential_plan
from stagetrace_analyzer.demo.client import Client
from stagetrace_analyzer.demo.media import MediaServer


def plan_of(*offsets_ms, traffic=TEXT):
    arrivals = (Arrival(offset * 1_000_000, traffic, seed) for seed, offset in enumerate(offsets_ms))
    return ArrivalPlan("text only", tuple(arrivals))


def run(spoken, plan, method=Client.run, **options):
    async def all_of_it():
        async with Client(spoken.url, media, **options) as client:
            return await method(client, plan)

    with MediaServer() as media:
        return asyncio.run(all_of_it())


def test_a_streamed_answer_is_measured_chunk_by_chunk(spoken):
    """The first chunk holds no text and is not the first useful one."""
    (seen,) = run(spoken, plan_of(0))
    assert (seen.status, seen.error, seen.output_chunks) == (200, None, 3)
    assert seen.intended_ns <= seen.sent_ns < seen.first_useful_ns <= seen.last_ns


def test_an_answer_in_one_piece_is_useful_when_it_is_there(spoken):
    """It has one chunk."""
    (seen,) = run(spoken, plan_of(0, traffic=dataclasses.replace(TEXT, stream=False)))
    assert (seen.status, seen.error, seen.output_chunks) == (200, None, 1)
    assert seen.first_useful_ns <= seen.last_ns


def test_every_request_says_who_it_is_and_when_it_was_due(spoken):
    """The server's records are joined to the client's by these headers."""
    before_ns = time.time_ns()
    seen = run(spoken, plan_of(0, 10))
    assert len({one.request_id for one in seen}) == 2
    for one, headers in zip(seen, spoken.headers, strict=True):
        assert headers["X-Request-Id"] == one.request_id
        assert headers["baggage"] == (
            "stagetrace.phase=text%20only,stagetrace.label=text,"
            f"stagetrace.intended_unix_ns={one.intended_unix_ns}"
        )
        assert before_ns <= one.intended_unix_ns <= time.time_ns()


def test_a_text_request_asks_for_visible_text_of_a_fixed_length(spoken):
    """A random model would otherwise stop, or say nothing visible."""
    run(spoken, plan_of(0))
    (body,) = spoken.requests
    (text,) = body.pop("messages")[0]["content"]
    assert len(text["text"].split()) == 20
    assert body == {
        "model": "tiny",
        "temperature": 0,
        "ignore_eos": True,
        "allowed_token_ids": [ord(letter) for letter in "abcdefghij"],
        "max_tokens": 16,
        "stream": True,
    }


@pytest.mark.parametrize(("delay_ms", "scheme"), [(20, "http://127.0.0.1"), (None, "data:image/jpeg")])
def test_an_image_request_names_or_holds_its_images(spoken, delay_ms, scheme):
    """Two images are two different addresses."""
    run(spoken, plan_of(0, traffic=dataclasses.replace(IMAGE, images=2, image_delay_ms=delay_ms)))
    content = spoken.requests[0]["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    urls = {part["image_url"]["url"] for part in content[:2]}
    assert len(urls) == 2
    assert all(url.startswith(scheme) for url in urls)


def test_requests_leave_when_they_are_due_however_slow_the_server_is(spoken):
    """Open loop: three requests are in the server at once."""
    spoken.delay_s = 0.5
    seen = run(spoken, plan_of(0, 50, 100))
    assert spoken.arrived_ns[-1] - spoken.arrived_ns[0] < 400_000_000
    assert all(one.completion_ns >= 500_000_000 for one in seen)
    assert all(one.sent_ns >= one.intended_ns for one in seen)


def test_in_turn_each_waits_for_the_one_before(spoken):
    """The next request arrives after the server's delay for the one before."""
    spoken.delay_s = 0.1
    seen = run(spoken, sequential_plan("warm-up", [TEXT], 3, 0), Client.run_in_turn)
    gaps = [after - before for before, after in itertools.pairwise(spoken.arrived_ns)]
    assert min(gaps) >= 100_000_000
    assert [one.intended_ns for one in seen] == [0, 0, 0]


@pytest.mark.parametrize(
    ("how", "status", "error", "chunks"),
    [
        ({"status": 500}, 500, "http", 0),
        ({"fault": "server"}, 200, "server", 3),
        ({"fault": "truncated"}, 200, "truncated", 3),
    ],
)
def test_a_failure_is_an_observation(spoken, how, status, error, chunks):
    """Nothing is raised, nothing is left out."""
    for name, value in how.items():
        setattr(spoken, name, value)
    seen = run(spoken, plan_of(0, 10))
    assert [(one.status, one.error, one.output_chunks) for one in seen] == [(status, error, chunks)] * 2
    assert [one.completion_ns for one in seen] == [None, None]


def test_a_request_that_takes_too_long_is_given_up(spoken):
    """The load ends in bounded time."""
    spoken.delay_s = 30
    (seen,) = run(spoken, plan_of(0), timeout_s=0.2)
    assert (seen.status, seen.error) == (None, "TimeoutError")
    assert seen.last_ns < 10_000_000_000


def test_cancelling_cuts_off_what_is_open(spoken):
    """Ctrl-C does not wait for slow answers."""
    spoken.delay_s = 30

    async def cancelled():
        async with Client(spoken.url, None) as client:
            load = asyncio.create_task(client.run(plan_of(0, 10_000)))
            await asyncio.sleep(0.2)
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load

    begin = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("path", ["/nowhere", ":1"])
def test_what_is_no_vllm_server_is_said_at_once(spoken, path):
    """The message names the address and what is missing."""
    spoken.url = spoken.url + path if path.startswith("/") else "http://127.0.0.1" + path
    with pytest.raises(ServerError, match=r"does not answer.*/tokenize"):
        run(spoken, plan_of(0))
