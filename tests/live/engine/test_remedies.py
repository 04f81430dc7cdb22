"""What is advised against a wait helps on vLLM's own scheduler, and what it costs is seen as well."""

from __future__ import annotations

import pytest

IMAGE = 200
"""Embeddings of an image; the largest that the model can have are 272."""


def ask_for_images(engine, count, **attributes):
    """Give the engine requests of one image each, no two images the same."""
    for number in range(count):
        image = [(0, IMAGE, str(number))]
        held = engine.request(f"image {number}", IMAGE + 5, images=image, held_only=True)
        for name, value in attributes.items():
            setattr(held[0], name, value)
        engine.core.add_request(*held)


def arrive_in_step(engine, **attributes):
    """Let a text come 4 ms after the begin of the next step, run that step, and drain the engine."""
    late = []
    engine.during(4, lambda: late.append(engine.request("text", held_only=True)))
    engine.step()
    for name, value in attributes.items():
        setattr(late[0][0], name, value)
    engine.core.add_request(*late[0])
    engine.drain()
    return engine.partition("text")


@pytest.mark.parametrize(
    ("budget", "images", "step"),
    [(1024, 4, 406), (512, 2, 206), (256, 1, 106), (64, 1, 106)],
)
def test_token_budget_bounds_the_images_of_a_step(drive, budget, images, step):
    """A lower token budget lets fewer images into a step that a text has to wait for, but an image is never cut."""
    engine = drive(max_num_batched_tokens=budget)
    ask_for_images(engine, 4)
    first, *_ = arrive_in_step(engine)
    assert engine.scheduler.max_num_encoder_input_tokens == max(budget, 272)
    assert first == ("prefill.wait(step)", step)
    assert engine.partition("image 0")[0] == ("encode", 100 * images)


@pytest.mark.parametrize(("budget", "first_token"), [(1024, 416), (256, 436)])
def test_token_budget_does_not_shorten_a_queue_of_images(drive, budget, first_token):
    """Behind four images a text has its token no sooner with short steps: it waits for the encoder with those before it."""
    engine = drive(max_num_batched_tokens=budget)
    ask_for_images(engine, 4)
    found = arrive_in_step(engine)
    assert sum(took for _, took in found) == first_token
    assert ("prefill.wait(encoder_budget)" in dict(found)) is (budget == 256)


@pytest.mark.parametrize(("budget", "waits"), [(256, 110), (512, 0)])
def test_token_budget_is_the_encoders_as_well(drive, budget, waits):
    """A higher token budget takes two images at once: the second does not wait, and both steps become one longer one."""
    engine = drive(max_num_batched_tokens=budget)
    ask_for_images(engine, 2)
    engine.drain()
    found = engine.partition("image 1")
    assert sum(took for stage, took in found if stage == "encode.wait(encoder_budget)") == waits
    assert ("encode", 100 if waits else 200) in found


@pytest.mark.parametrize(("budget", "waits"), [(128, 10), (512, 0)])
def test_token_budget_is_the_size_of_the_encoders_cache(drive, budget, waits):
    """A higher token budget makes room for a second image while the first one is still in use."""
    engine = drive(max_num_batched_tokens=budget)
    ask_for_images(engine, 1)
    engine.step()
    engine.request("second", IMAGE + 5, images=[(0, IMAGE, "second")])
    engine.drain()
    found = engine.partition("second")
    assert sum(took for stage, took in found if stage == "encode.wait(encoder_cache)") == waits


def test_priority_goes_past_refused_images(drive):
    """A text of a better priority waits for the step under way only, whatever images are in the queue."""
    engine = drive(max_num_batched_tokens=256, scheduling_policy="priority")
    ask_for_images(engine, 4, priority=1)
    found = arrive_in_step(engine, priority=0)
    assert [(stage, took) for stage, took in found if "wait" in stage] == [("prefill.wait(step)", 106)]


@pytest.mark.parametrize(("threshold", "waits"), [(0, 20), (32, 0)])
def test_long_prompts(drive, threshold, waits):
    """With a bound on what a long prompt takes of a step, a short one finds tokens in the first."""
    engine = drive(max_num_batched_tokens=64, long_prefill_token_threshold=threshold)
    engine.request("long", 160)
    engine.request("short", 30)
    engine.drain()
    assert engine.partition("short") == [("prefill.wait(tokens)", 20)] * bool(waits) + [("prefill", 10)]


@pytest.mark.parametrize(("caching", "steps"), [(False, 3), (True, 1)])
def test_prefix_caching(drive, caching, steps):
    """A prompt that was computed before takes one step instead of three."""
    engine = drive(enable_prefix_caching=caching, max_num_batched_tokens=64)
    for name in ("first", "again"):
        engine.request(name, 160)
        engine.drain()
    assert engine.partition("again") == [("prefill", 10 * steps)]


@pytest.mark.parametrize(
    ("options", "waits"),
    [({"max_num_seqs": 2}, True), ({"max_num_seqs": 4}, False), ({"max_num_active_seqs": 2}, True)],
)
def test_seats(drive, options, waits):
    """With more seats nobody waits for one; the other setting of seats takes them away again."""
    engine = drive(**options)
    for name in "abc":
        engine.request(name, outputs=3)
    engine.drain()
    assert engine.partition("c") == [("prefill.wait(seats)", 30)] * waits + [("prefill", 10), ("decode", 20)]


@pytest.mark.parametrize(("blocks", "waits"), [(9, True), (17, False)])
def test_kv_memory(drive, blocks, waits):
    """With twice the blocks a second prompt finds room at once."""
    engine = drive(num_gpu_blocks_override=blocks, max_model_len=128)
    engine.request("a", 100, outputs=3)
    engine.request("b", 100)
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(kv)", 30)] * waits + [("prefill", 10)]


@pytest.mark.parametrize("watermark", [0.0, 0.3])
def test_watermark(drive, watermark):
    """With blocks kept free nobody is preempted and computes again; the wait moves to before the first token."""
    engine = drive(num_gpu_blocks_override=8, max_model_len=112, watermark=watermark)
    for name in "ab":
        engine.request(name, 47, outputs=20)
    engine.drain()
    parts = engine.parts("b").completion
    waits = {str(part.stage) for part in parts if part.reason}
    assert waits == ({"prefill.wait"} if watermark else {"decode.wait"})
    assert any(part.recompute for part in parts) is not bool(watermark)


@pytest.mark.parametrize("same", [False, True])
def test_same_media(drive, same):
    """An image that the encoder's cache holds is not encoded again, whoever sent it."""
    engine = drive()
    for name, identifier in (("one", "x"), ("two", "x" if same else "y")):
        engine.request(name, IMAGE + 5, images=[(0, IMAGE, identifier)])
        engine.drain()
    assert engine.partition("two") == [("encode", 100)] * (not same) + [("prefill", 10)]


@pytest.mark.parametrize(("adapters", "waits"), [(1, True), (2, False)])
def test_lora_slots(drive, adapters, waits):
    """With room for a second adapter in a step its request does not wait."""
    from vllm.lora.request import LoRARequest

    engine = drive(enable_lora=True, max_loras=adapters, max_lora_rank=8)
    engine.request("one", outputs=3, lora=LoRARequest("one", 1, "/nowhere"))
    engine.request("two", lora=LoRARequest("two", 2, "/nowhere"))
    engine.drain()
    assert engine.partition("two") == [("prefill.wait(lora)", 30)] * waits + [("prefill", 10)]
