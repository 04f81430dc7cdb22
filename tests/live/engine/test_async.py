"""Asynchronous scheduling: the next step is composed before the one before is done."""

from __future__ import annotations

from engines import (
    asynchronous,
    both,
    embedding_consumer,
    kv_consumer,
    one_image_a_step,
    one_image_in_the_cache,
)


def test_steps_overlap_and_time_does_not(drive):
    """Steps that are composed early still take their turn on the device."""
    engine = drive(after=asynchronous)
    assert engine.core.batch_queue_size == 2
    engine.request("a", outputs=4)
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("decode", 30)]


def test_arrival_while_two_steps_are_on_their_way(drive):
    """A request that comes while two steps are queued waits for both."""
    engine = drive(after=asynchronous)
    engine.request("a", outputs=8)
    late = []
    arrival = engine.clock.now + 25_000_000
    engine.during(25, lambda: late.append(engine.request("b", held_only=True)))
    while engine.clock.now < arrival:
        engine.step()
    engine.core.add_request(*late[0])
    engine.drain()
    # It comes in the third step, when the fourth is composed already; the fifth takes it.
    assert engine.partition("b") == [("prefill.wait(step)", 15), ("prefill", 10)]


def test_seats_under_asynchronous_scheduling(drive):
    """The queue waits for seats, to the millisecond, although steps are composed ahead."""
    engine = drive(after=asynchronous, max_num_seqs=1)
    engine.request("a", outputs=3)
    engine.request("b")
    engine.drain()
    stages = engine.partition("b")
    assert [stage for stage, _ in stages] == ["prefill.wait(seats)", "prefill"]
    assert stages[-1] == ("prefill", 10)


def test_encoder_budget_under_asynchronous_scheduling(drive):
    """The second image goes into the step that is composed while the first one is encoded, and no earlier."""
    engine = drive(after=both(asynchronous, one_image_a_step))
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 205, images=[(0, 200, "y")])
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 10)]
    assert engine.partition("two") == [("encode.wait(encoder_budget)", 110), ("encode", 100), ("prefill", 10)]


def test_seated_request_refused_under_asynchronous_scheduling(drive):
    """A request whose text is computed waits for the encoder, although its next steps are composed ahead."""
    engine = drive(after=both(asynchronous, one_image_a_step))
    engine.request("three", 605, images=[(0, 200, "x"), (200, 200, "y"), (400, 200, "z")])
    engine.request("text first", 260, images=[(50, 200, "w")])
    engine.drain()
    assert engine.partition("three") == [("encode", 100), ("prefill", 10)] * 3
    assert engine.partition("text first") == [
        ("prefill", 110),
        ("encode.wait(encoder_budget)", 220),
        ("encode", 100),
        ("prefill", 10),
    ]


def test_encoder_cache_under_asynchronous_scheduling(drive):
    """The cache has room again once the last chunk of the image is on its way; the next step takes the other."""
    engine = drive(after=both(asynchronous, one_image_in_the_cache), long_prefill_token_threshold=64)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 260, images=[(50, 200, "y")])
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 40)]
    assert engine.partition("two") == [
        ("prefill", 110),
        ("encode.wait(encoder_cache)", 30),
        ("encode", 100),
        ("prefill", 20),
    ]


def test_transfers_under_asynchronous_scheduling(drive):
    """What has come is in the step that is composed next, and that one waits for the step before it."""
    engine = drive(after=asynchronous, **kv_consumer(), **embedding_consumer())
    engine.transfers.remote_kv("a", 32, takes=45)
    engine.request("a", 40)
    engine.transfers.remote_embedding("x", takes=25)
    engine.request("b", 205, images=[(0, 200, "x")])
    engine.request("other", outputs=12)
    engine.drain()
    assert engine.partition("other") == [("prefill", 10), ("decode", 110)]
    # It comes in the third step, when the fourth is composed already; the fifth takes it.
    assert engine.partition("b") == [("embedding_transfer.wait(remote_embedding)", 40), ("prefill", 10)]
    # It comes in the fifth step, whose end tells; the sixth is composed already, the seventh takes it.
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 60), ("prefill", 10)]
