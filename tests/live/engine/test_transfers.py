"""What comes from another server is waited for to the millisecond, and under its own name."""

from __future__ import annotations

import pytest
from engines import embedding_consumer, encoder_only, kv_consumer, one_image_a_step, one_image_in_the_cache


def test_remote_kv_alone(drive):
    """A request alone waits for its KV until the poll after its arrival, and then computes the rest."""
    engine = drive(**kv_consumer())
    engine.transfers.remote_kv("a", 32, takes=50)
    engine.request("a", 40, outputs=2)
    engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 51), ("prefill", 10), ("decode", 10)]
    assert engine.timeline("a").facts["cached_tokens"] == 32


def test_remote_kv_of_the_whole_prompt(drive):
    """With the KV of the whole prompt here, its last token alone is computed."""
    engine = drive(**kv_consumer())
    engine.transfers.remote_kv("a", 48, takes=50)
    engine.request("a", 48)
    engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 51), ("prefill", 10)]
    assert engine.timeline("a").engine_requests[0].members[0][1] == 1


def test_remote_kv_does_not_hold_up_the_queue(drive):
    """What is behind a request whose KV is under way is taken."""
    engine = drive(**kv_consumer())
    engine.transfers.remote_kv("a", 32, takes=45)
    engine.request("a", 40)
    engine.request("b", outputs=8)
    engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 50), ("prefill", 10)]
    assert engine.partition("b") == [("prefill", 10), ("decode", 70)]


def test_remote_kv_while_the_engine_only_polls(drive):
    """A request that comes while the engine has nothing to run waits for its own KV, and not for a step."""
    engine = drive(**kv_consumer())
    engine.transfers.remote_kv("a", 32, takes=60)
    engine.request("a", 40)
    engine.step(20)
    engine.transfers.remote_kv("b", 32, takes=20)
    engine.request("b", 40)
    engine.drain()
    assert engine.partition("b") == [("kv_transfer.wait(remote_kv)", 21), ("prefill", 10)]
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 61), ("prefill", 10)]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_wait_for_blocks_while_the_engine_only_polls(drive, policy):
    """A request that finds the blocks taken by a load waits for KV room, and not for a step."""
    engine = drive(**kv_consumer(), num_gpu_blocks_override=9, max_model_len=128, scheduling_policy=policy)
    engine.transfers.remote_kv("a", 96, takes=60)
    engine.request("a", 100)
    engine.step(20)
    engine.request("b", 100)
    engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 61), ("prefill", 10)]
    assert engine.partition("b") == [("prefill.wait(kv)", 51), ("prefill", 10)]


def test_lookup_of_remote_kv(drive):
    """While a connector finds out what there is, the request waits for that."""
    engine = drive(**kv_consumer())
    engine.transfers.remote_kv("a", 32, lookup=15, takes=24)
    engine.request("a", 40)
    engine.request("b", outputs=8)
    engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 50), ("prefill", 10)]
    assert engine.partition("b") == [("prefill", 10), ("decode", 70)]


def test_remote_kv_without_blocks_to_load_into(drive):
    """A load that finds no room has not begun: the request waits for KV room."""
    engine = drive(**kv_consumer(), num_gpu_blocks_override=9, max_model_len=128)
    engine.request("a", 100, outputs=3)
    engine.transfers.remote_kv("b", 96, takes=20)
    engine.request("b", 100)
    engine.drain()
    assert engine.partition("b") == [
        ("prefill.wait(kv)", 30),
        ("kv_transfer.wait(remote_kv)", 21),
        ("prefill", 10),
    ]


def test_remote_kv_is_no_reason_when_all_seats_are_taken(drive):
    """With all seats taken nobody asks for the KV: a request waits for seats before its load, and after."""
    engine = drive(**kv_consumer(), max_num_seqs=1)
    engine.transfers.remote_kv("a", 32, takes=5)
    engine.request("a", 40)
    engine.request("b", outputs=3)
    engine.transfers.remote_kv("c", 32, takes=5)
    engine.request("c", 40)
    engine.drain()
    assert engine.partition("b") == [("prefill", 10), ("decode", 20)]
    assert engine.partition("a") == [
        ("kv_transfer.wait(remote_kv)", 10),
        ("prefill.wait(seats)", 20),
        ("prefill", 10),
    ]
    assert engine.partition("c") == [
        ("prefill.wait(seats)", 30),  # behind a
        ("prefill.wait(seats)", 10),
        ("kv_transfer.wait(remote_kv)", 6),
        ("prefill", 10),
    ]


def test_failed_load_is_computed_here(drive):
    """After a load that failed, the whole prompt is computed, and none of it counts as cached."""
    engine = drive(**kv_consumer("recompute"))
    engine.transfers.remote_kv("a", 32, takes=50, fails=True)
    engine.request("a", 40)
    engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 51), ("prefill", 10)]
    assert engine.timeline("a").engine_requests[0].members[0][1] == 40
    assert not engine.timeline("a").facts.get("cached_tokens")


@pytest.mark.parametrize("followed", [True, False], ids=["followed", "last"])
def test_failed_load_ends_the_request(drive, followed):
    """A request that a failed load ends was in its wait until then, whether or not a step follows."""
    engine = drive(**kv_consumer())
    engine.transfers.remote_kv("a", 32, takes=50, fails=True)
    engine.request("a", 40)
    engine.drain()
    if followed:
        engine.request("b")
        engine.drain()
    assert engine.partition("a") == [("kv_transfer.wait(remote_kv)", 50)]
    assert engine.timeline("a").engine_requests[0].finish_reason == "error"


def test_remote_embedding_alone(drive):
    """An image whose embedding comes from another server is waited for, and not encoded here."""
    engine = drive(**embedding_consumer())
    engine.transfers.remote_embedding("x", takes=50)
    engine.request("a", 205, images=[(0, 200, "x")], outputs=2)
    engine.drain()
    assert engine.partition("a") == [
        ("embedding_transfer.wait(remote_embedding)", 50),
        ("prefill", 10),
        ("decode", 10),
    ]


def test_remote_embedding_does_not_hold_up_the_queue(drive):
    """What is behind a request whose embedding is under way is taken."""
    engine = drive(**embedding_consumer())
    engine.transfers.remote_embedding("x", takes=45)
    engine.request("a", 205, images=[(0, 200, "x")])
    engine.request("b", outputs=8)
    engine.drain()
    assert engine.partition("a") == [("embedding_transfer.wait(remote_embedding)", 50), ("prefill", 10)]
    assert engine.partition("b") == [("prefill", 10), ("decode", 70)]


def test_remote_embedding_while_the_engine_only_polls(drive):
    """A request that comes while the engine has nothing to run waits for its own embedding."""
    engine = drive(**embedding_consumer())
    engine.transfers.remote_embedding("x", takes=60)
    engine.request("a", 205, images=[(0, 200, "x")])
    engine.step(20)
    engine.transfers.remote_embedding("y", takes=20)
    engine.request("b", 205, images=[(0, 200, "y")])
    engine.drain()
    assert engine.partition("b") == [("embedding_transfer.wait(remote_embedding)", 20), ("prefill", 10)]
    assert engine.partition("a") == [("embedding_transfer.wait(remote_embedding)", 60), ("prefill", 10)]


def test_one_image_from_elsewhere_and_one_encoded_here(drive):
    """A request waits for the embedding that comes, and then for the encoder with the other image."""
    engine = drive(**embedding_consumer())
    engine.transfers.remote_embedding("x", takes=50)
    engine.request("a", 450, images=[(0, 200, "x"), (220, 200, "y")])
    engine.drain()
    assert engine.partition("a") == [
        ("embedding_transfer.wait(remote_embedding)", 50),
        ("encode", 100),
        ("prefill", 10),
    ]


def test_embedding_that_a_seated_request_lost(drive):
    """An embedding that has to come again keeps a request that has its seat out of steps."""
    engine = drive(**embedding_consumer(), max_num_batched_tokens=128)
    engine.transfers.remote_embedding("x", takes=0)
    engine.request("a", 250, images=[(150, 100, "x")])
    engine.request("b", outputs=8)
    engine.step()
    engine.transfers.remote_embedding("x", takes=25)
    engine.drain()
    assert engine.partition("a") == [
        ("prefill", 10),
        ("embedding_transfer.wait(remote_embedding)", 30),
        ("prefill", 10),
    ]


def test_embedding_that_finds_no_room(drive):
    """An embedding that is here, but finds the encoder's cache full, waits for the cache."""
    engine = drive(**embedding_consumer(), after=one_image_in_the_cache, max_num_batched_tokens=128)
    engine.request("one", 205, images=[(0, 200, "y")])
    engine.step()
    engine.transfers.remote_embedding("x", takes=0)
    engine.request("two", 205, images=[(0, 200, "x")])
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 20)]
    assert engine.partition("two") == [("encode.wait(encoder_cache)", 10), ("prefill", 20)]


def test_embedding_before_kv(drive):
    """A request that needs both waits for its embedding first: its KV is loaded from then on."""
    engine = drive(**embedding_consumer(), **kv_consumer())
    engine.transfers.remote_embedding("x", takes=30)
    engine.transfers.remote_kv("a", 32, takes=20)
    engine.request("a", 250, images=[(40, 200, "x")])
    engine.drain()
    assert engine.partition("a") == [
        ("embedding_transfer.wait(remote_embedding)", 30),
        ("kv_transfer.wait(remote_kv)", 21),
        ("prefill", 10),
    ]


def test_server_that_only_encodes(drive):
    """Where embeddings are made for other servers, requests wait for the encoder, and end without a token."""
    engine = drive(**encoder_only(), after=one_image_a_step)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 205, images=[(0, 200, "y")])
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 10)]
    assert engine.partition("two") == [("encode.wait(encoder_budget)", 110), ("encode", 100), ("prefill", 10)]
    assert engine.timeline("two").engine_requests[0].finish_reason == "stopped"
