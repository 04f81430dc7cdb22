"""Every wait of the real scheduler has its true length and its true reason."""

from __future__ import annotations

import pickle
import threading
import time

from engines import one_image_a_step, one_image_in_the_cache, whole_images


def test_alone(drive):
    """A request alone is prefill and decode, and nothing else."""
    engine = drive()
    engine.request("a", outputs=3)
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("decode", 20)]


def test_step(drive):
    """A request that the input thread gets during a step waits for its end."""
    engine = drive()
    engine.request("a", outputs=2)
    late = []
    engine.during(4, lambda: late.append(engine.request("b", held_only=True)))
    engine.step()
    engine.core.add_request(*late[0])
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(step)", 6), ("prefill", 10)]


def test_seats(drive):
    """With all seats taken the queue waits for seats, and its head holds it."""
    engine = drive(max_num_seqs=2)
    for name in "abcd":
        engine.request(name, outputs=3)
    engine.drain()
    assert engine.partition("c") == [("prefill.wait(seats)", 30), ("prefill", 10), ("decode", 20)]
    waits = [interval for interval in engine.parts("d").completion if interval.reason]
    assert [(wait.reason, wait.holder) for wait in waits] == [("seats", "c")]


def test_tokens(drive):
    """A prompt that takes the whole token budget makes the others wait for tokens."""
    engine = drive(max_num_batched_tokens=64)
    engine.request("long", 160)
    engine.request("short", 30)
    engine.drain()
    assert engine.partition("long") == [("prefill", 30)]
    assert engine.partition("short") == [("prefill.wait(tokens)", 20), ("prefill", 10)]


def test_kv(drive):
    """A prompt that finds no free blocks waits for KV."""
    engine = drive(num_gpu_blocks_override=9, max_model_len=128)
    engine.request("a", 100, outputs=3)
    engine.request("b", 100)
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(kv)", 30), ("prefill", 10)]


def test_preemption(drive):
    """A preempted request waits in decode.wait, computes again, and then goes on decoding."""
    engine = drive(num_gpu_blocks_override=8, max_model_len=112)
    engine.request("a", 47, outputs=20)
    engine.request("b", 47, outputs=20)
    engine.drain()
    parts = engine.parts("b").completion
    stages = [(interval.stage.value, interval.reason, interval.recompute) for interval in parts]
    assert stages == [
        ("prefill", None, False),
        ("decode", None, False),
        ("decode.wait", "preempting", False),
        ("decode.wait", "kv", False),
        ("prefill", None, True),
        ("decode", None, False),
    ]
    assert engine.partition("a") == [("prefill", 10), ("decode", 190)]


def test_nobody_is_taken_in_a_step_that_preempts(drive):
    """In the step that takes a seat from somebody, the queue waits because of that."""
    engine = drive(num_gpu_blocks_override=8, max_model_len=112)
    engine.request("a", 47, outputs=20)
    engine.request("b", 47, outputs=20)
    engine.step(2)
    engine.request("c", 100)
    engine.drain()
    reasons = [interval.reason for interval in engine.parts("c").completion if interval.reason]
    assert "preempting" in reasons
    assert set(reasons) <= {"preempting", "kv"}


def test_encoder_budget(drive):
    """The second image waits for the encoder's budget; text behind it waits with it, but not for encoding."""
    engine = drive(after=one_image_a_step)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 205, images=[(0, 200, "y")])
    engine.request("text", 30)
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 10)]
    assert engine.partition("two") == [("encode.wait(encoder_budget)", 110), ("encode", 100), ("prefill", 10)]
    assert engine.partition("text") == [("prefill.wait(encoder_budget)", 110), ("prefill", 110)]
    assert [i.holder for i in engine.parts("text").completion if i.reason] == ["two"]


def test_encoder_cache(drive):
    """An image that finds the encoder's cache full of another one in use waits for the cache."""
    engine = drive(after=one_image_in_the_cache, max_num_batched_tokens=128)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.step()
    engine.request("two", 205, images=[(0, 200, "y")])
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 20)]
    assert engine.partition("two") == [("encode.wait(encoder_cache)", 10), ("encode", 100), ("prefill", 20)]


def test_second_image_refused_while_running(drive):
    """A step holds the text up to the second image, which the encoder takes in the next one: nobody waits."""
    engine = drive(after=one_image_a_step)
    engine.request("other", 205, images=[(0, 200, "z")])
    engine.request("two", 450, images=[(20, 200, "x"), (230, 200, "y")])
    engine.drain()
    assert engine.partition("two") == [
        ("prefill", 110),
        ("encode", 100),
        ("prefill", 10),
        ("encode", 100),
        ("prefill", 10),
    ]


def test_image_refused_behind_its_text(drive):
    """Text up to an image is computed; the image then waits for the encoder that others use, seat or not."""
    engine = drive(after=one_image_a_step)
    engine.request("three", 605, images=[(0, 200, "x"), (200, 200, "y"), (400, 200, "z")])
    engine.request("text first", 260, images=[(50, 200, "w")])
    engine.request("text", outputs=4)
    engine.drain()
    assert engine.partition("three") == [("encode", 100), ("prefill", 10)] * 3
    assert engine.partition("text first") == [
        ("prefill", 110),
        ("encode.wait(encoder_budget)", 220),
        ("encode", 100),
        ("prefill", 10),
    ]
    assert engine.partition("text") == [("prefill", 110), ("decode", 330)]


def test_image_refused_behind_its_text_for_want_of_cache(drive):
    """Text up to an image is computed; the image then waits until another one is no longer in use."""
    engine = drive(after=one_image_in_the_cache, long_prefill_token_threshold=64)
    engine.request("one", 205, images=[(0, 200, "x")])
    engine.request("two", 260, images=[(50, 200, "y")])
    engine.drain()
    assert engine.partition("one") == [("encode", 100), ("prefill", 40)]
    assert engine.partition("two") == [
        ("prefill", 110),
        ("encode.wait(encoder_cache)", 30),
        ("encode", 100),
        ("prefill", 10),
    ]


def test_chunked_prefill_over_an_image(drive):
    """An image is encoded in the step of the chunk in which it begins, and in no other."""
    engine = drive(max_num_batched_tokens=64)
    engine.request("a", 300, images=[(100, 100, "x")])
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("encode", 100), ("prefill", 40)]


def test_image_that_may_not_be_cut(drive):
    """Where images may not be cut into chunks, a chunk ends before one that does not fit, and nobody waits."""
    engine = drive(after=whole_images, long_prefill_token_threshold=128)
    engine.request("a", 250, images=[(50, 100, "x")])
    engine.request("text", outputs=8)
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("encode", 100), ("prefill", 20)]


def test_draft_tokens(drive):
    """With draft tokens a step decodes several tokens, and is decoding all the same."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    engine = drive(speculative_config=drafts)
    engine.request("a", outputs=7)
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("decode", 20)]
    assert [tokens for _, tokens in engine.timeline("a").engine_requests[0].members] == [30, 3]


def test_paused(drive):
    """A paused engine makes the queue wait because it is paused."""
    from vllm.v1.core.sched.interface import PauseState

    engine = drive()
    engine.request("a", outputs=4)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.request("b")
    engine.step(2)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(paused)", 20), ("prefill", 10)]


def test_pause_in_which_nothing_is_scheduled(drive):
    """A pause that stops the whole engine is a wait, and neither prefill nor decode."""
    from vllm.v1.core.sched.interface import PauseState

    engine = drive()
    engine.request("a", outputs=3)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.clock.advance(1000)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("decode.wait(paused)", 1000), ("decode", 20)]


def test_idle_engine_with_a_request_is_a_wait(drive):
    """Time in which the engine schedules nothing although it holds a request is no work."""
    engine = drive()
    held = engine.request("a", held_only=True)
    engine.clock.advance(300)
    engine.core.add_request(*held)
    engine.drain()
    assert engine.partition("a") == [("prefill.wait(step)", 300), ("prefill", 10)]


def test_preempted_in_its_prompt_computes_only_that_again(drive):
    """A request that loses its seat in the middle of its prompt repeats what it had, and no more."""
    engine = drive(
        num_gpu_blocks_override=14,
        max_model_len=208,
        max_num_batched_tokens=64,
        scheduler_reserve_full_isl=False,
    )
    engine.request("a", 30, outputs=40)
    engine.step(2)
    engine.request("b", 180, outputs=2)
    engine.drain()
    (seen,) = engine.timeline("b").engine_requests
    assert seen.preempted
    for _, computed in seen.preempted:
        assert computed < 180
    again = sum(i.last_step - i.first_step + 1 for i in engine.parts("b").completion if i.recompute)
    assert again <= sum(-(-computed // 64) for _, computed in seen.preempted)


def test_mark_of_a_step_needs_nothing_of_ours_to_be_read(drive):
    """The scheduler's output can be unpickled by a worker that does not have the plug-in."""
    engine = drive()
    engine.request("a")
    output = engine.scheduler.schedule()
    pickled = pickle.dumps(output)
    assert b"stagetrace_vllm" not in pickled
    assert pickle.loads(pickled)._stagetrace_step[1] == 1  # noqa: S301 - it is our own


def test_long_queue_costs_little(drive):
    """The work of a step's hooks does not grow with the queue."""
    engine = drive(max_num_seqs=1)
    engine.request("first", outputs=50)
    engine.step()
    looked_at = []

    class Watched(dict):
        def get(self, key, default=None):
            looked_at.append(key)
            return super().get(key, default)

    for number in range(300):
        engine.request(f"queued-{number}")
    engine.scheduler.requests = Watched(engine.scheduler.requests)
    engine.step()
    assert len(looked_at) < 10


def test_deferred(drive, monkeypatch):
    """Prefills that are put off for the sake of other engines wait because they are deferred."""
    engine = drive()
    engine.request("a", outputs=4)
    engine.step()
    engine.request("b")
    with monkeypatch.context() as throttled:
        throttled.setattr(engine.core, "_should_throttle_prefills", lambda: True)
        engine.step(2)
    engine.drain()
    assert engine.partition("b") == [("prefill.wait(deferred)", 20), ("prefill", 10)]


def test_grammar(drive, monkeypatch):
    """A request whose grammar is still being compiled waits for it, and does not hold up the queue."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import StructuredOutputManager

    gate, compile_grammar = threading.Event(), StructuredOutputManager._create_grammar

    def compile_slowly(self, request):
        gate.wait(30)
        return compile_grammar(self, request)

    monkeypatch.setattr(StructuredOutputManager, "_create_grammar", compile_slowly)
    engine = drive()
    engine.request("other", outputs=4)
    wanted = StructuredOutputsParams(regex="[a-z]*")
    wanted._backend = "xgrammar"
    guided = engine.request("guided", structured_outputs=wanted)
    engine.request("behind")
    engine.step(3)
    gate.set()
    while guided.structured_output_request.grammar is None:
        time.sleep(0.01)
    engine.drain()
    assert engine.partition("guided") == [("prefill.wait(grammar)", 30), ("prefill", 10)]
    assert engine.partition("behind") == [("prefill", 10)]


def test_grammar_is_no_reason_while_nobody_looks(drive, monkeypatch):
    """With all seats taken a guided request waits for seats, whatever its status says."""
    from vllm.sampling_params import StructuredOutputsParams

    engine = drive(max_num_seqs=1)
    engine.request("other", outputs=3)
    wanted = StructuredOutputsParams(regex="[a-z]*")
    wanted._backend = "xgrammar"
    guided = engine.request("guided", structured_outputs=wanted)
    while guided.structured_output_request.grammar is None:
        time.sleep(0.01)
    engine.drain()
    assert engine.partition("guided") == [("prefill.wait(seats)", 30), ("prefill", 10)]


def test_lora(drive):
    """A request whose adapter finds no place in the step waits for it, and does not hold up the queue."""
    from vllm.lora.request import LoRARequest

    engine = drive(enable_lora=True, max_loras=1, max_lora_rank=8)
    engine.request("one", outputs=3, lora=LoRARequest("one", 1, "/nowhere"))
    engine.request("two", lora=LoRARequest("two", 2, "/nowhere"))
    engine.request("without")
    engine.drain()
    assert engine.partition("two") == [("prefill.wait(lora)", 30), ("prefill", 10)]
    assert engine.partition("without") == [("prefill", 10)]


def test_lora_is_no_reason_when_all_seats_are_taken(drive):
    """A request that could not have had its adapter waits for a seat once there is none."""
    from vllm.lora.request import LoRARequest

    engine = drive(enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=2)
    engine.request("one", outputs=4, lora=LoRARequest("one", 1, "/nowhere"))
    engine.request("two", lora=LoRARequest("two", 2, "/nowhere"))
    engine.step()
    engine.request("without", outputs=3)
    engine.drain()
    waits = [stage for stage, _ in engine.partition("two") if "wait" in stage]
    assert waits == ["prefill.wait(lora)", "prefill.wait(seats)"]


def test_prefix_hit_over_the_image(drive):
    """An image under a cached prefix is not encoded, and nobody waits for its encoding."""
    engine = drive(enable_prefix_caching=True)
    for name in ("first", "again"):
        engine.request(name, 320, images=[(0, 200, "x")])
        engine.drain()
    assert engine.partition("first") == [("encode", 100), ("prefill", 10)]
    assert engine.partition("again") == [("prefill", 10)]
    assert engine.timeline("again").facts["cached_tokens"] == 304


def test_one_token(drive):
    """A request of one token has its first token in its last step."""
    engine = drive()
    engine.request("a", outputs=1)
    engine.drain()
    (seen,) = engine.timeline("a").engine_requests
    assert seen.first_token == seen.members[0][0]


def test_abort_in_the_queue(drive):
    """A request that is aborted while it waits ends in the wait it was in."""
    engine = drive(max_num_seqs=1)
    engine.request("a", outputs=5)
    engine.request("b")
    engine.step(2)
    engine.core.abort_requests(["b"])
    engine.drain()
    assert engine.partition("b")[0][0] == "prefill.wait(seats)"
