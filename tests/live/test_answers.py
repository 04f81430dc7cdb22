"""Answers of every kind on a real server: several of them, several prompts, long ones, structured ones, other paths."""

from __future__ import annotations

import pytest
from kinds import ask, check_joined, check_server, pieces, spent, tokens_told
from scenes import part, words

from stagetrace import Horizon, Reason, Stage, partition
from stagetrace_analyzer.demo.media import data_url, make_jpeg

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
TEXT = "the lamp on the table near the window is green"
ALWAYS = {Stage.RECEIVE, Stage.PREPROCESS, Stage.HANDOFF, Stage.PREFILL, Stage.RESPOND}
MEDIA = {Stage.RETRIEVAL, Stage.MEDIA_DECODE, Stage.MEDIA_DECODE_WAIT, Stage.ENCODE, Stage.ENCODE_WAIT}


RANDOM = {"temperature": 1, "seed": 7}


def chat(content=TEXT, *, tokens=8, **more):
    """A chat completion of so many tokens."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens} | more


def image(seed):
    """An image in the request itself."""
    return part(data_url(make_jpeg(seed)))


def prefill(request):
    """Tokens of a request's prompt by the step that computed them, and its items by the step that encoded them."""
    (engine,) = request.engine_requests
    changes = dict(engine.members)
    tokens, found = 0, {}
    for number in range(min(changes), engine.first_token + 1):
        tokens = changes.get(number, tokens)
        if tokens:
            found[number] = tokens
    return found, engine.encoded


def in_stream(answer):
    """The first answer of which a stream holds text, by its index."""
    choices = (choice for piece in pieces(answer) for choice in piece.get("choices", ()))
    return next(c["index"] for c in choices if c.get("text") or c.get("delta", {}).get("content"))


@pytest.fixture(scope="module")
def answered(live_server):
    """Every kind of answer at once: what came, its timeline, the number of prompts, and of answers to each."""
    prompts = [TEXT, "the door", f"{TEXT} and the door is open"]
    chats = [[{"role": "user", "content": text}] for text in prompts]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    eight = {"max_tokens": 8}
    two = {"n": 2} | RANDOM
    kinds = {
        "chat": (CHAT, chat(), 1, 1),
        "two": (CHAT, chat(**two), 1, 2),
        "two in a stream": (CHAT, chat(**two, **stream), 1, 2),
        "two to an image": (CHAT, chat([image(100), {"type": "text", "text": TEXT}], **two), 1, 2),
        "completion": (COMPLETIONS, {"prompt": TEXT} | eight, 1, 1),
        "prompts": (COMPLETIONS, {"prompt": prompts} | eight, 3, 1),
        "prompts in a stream": (COMPLETIONS, {"prompt": prompts} | eight | stream, 3, 1),
        "two to prompts in a stream": (COMPLETIONS, {"prompt": prompts[:2]} | two | eight | stream, 2, 2),
        "tokens": (COMPLETIONS, {"prompt": [5, 6, 7, 8]} | eight, 1, 1),
        "logprobs in a stream": (CHAT, chat(logprobs=True, top_logprobs=5, **stream), 1, 1),
        "logprobs of the prompt": (COMPLETIONS, {"prompt": TEXT, "prompt_logprobs": 2} | eight, 1, 1),
        "echo": (COMPLETIONS, {"prompt": TEXT, "echo": True} | eight | stream, 1, 1),
        "conversations": (f"{CHAT}/batch", {"messages": chats} | eight, 3, 1),
        "message": (MESSAGES, chat(), 1, 1),
        "message in a stream": (MESSAGES, chat(stream=True), 1, 1),
        "response": (RESPONSES, {"input": TEXT, "max_output_tokens": 8}, 1, 1),
        "response in a stream": (RESPONSES, {"input": TEXT, "max_output_tokens": 8, "stream": True}, 1, 1),
    }
    requests = {label: (path, live_server.visible | body) for label, (path, body, *_) in kinds.items()}
    sent, timelines = ask(live_server, "answers", requests)
    return {label: (sent[label], timelines[label], *counts) for label, (_, _, *counts) in kinds.items()}


def test_every_answer_is_joined(answered):
    """Each answer to each prompt is an engine request of its own; tokens are counted as the answer counts them."""
    for answer, request, prompts, each in answered.values():
        check_joined(request, prompts * each)
        of = [(engine.index, engine.prompt) for engine in request.engine_requests]
        assert sorted(of) == [(index, index // each) for index in range(prompts * each)]
        assert (request.facts["prompt_tokens"], request.facts["output_tokens"]) == tokens_told(answer)
        assert request.facts["media_items"] == len(request.items)


def test_every_partition_is_whole(answered):
    """Both horizons are covered, and every stage that must be there is."""
    for label, (_, request, _, _) in answered.items():
        # A prompt of tokens has nothing to be prepared.
        always = ALWAYS - {Stage.PREPROCESS} if label == "tokens" else ALWAYS
        stages = spent(request).keys()
        assert stages >= always | {Stage.DECODE}
        assert bool(stages & MEDIA) == bool(request.items)
        assert spent(request, Horizon.TTFT).keys() >= always


def test_id_is_that_in_the_answer(answered):
    """Whatever the engine calls the parts of a request."""
    for answer, request, _, _ in answered.values():
        first = pieces(answer)[0]
        told = first.get("id") or (first.get("response") or first.get("message"))["id"]
        assert request.facts["external_id"] == told


def test_first_useful_byte_is_of_the_answer_it_says(answered):
    """A chunk names its answer; the first with text ends the way to the first useful byte, at that answer's token."""
    for label in ("two in a stream", "prompts in a stream", "two to prompts in a stream"):
        answer, request, _, _ = answered[label]
        assert request.choice == in_stream(answer)
        (engine,) = (engine for engine in request.engine_requests if engine.index == request.choice)
        steps = engine.steps
        before_delivery = [i for i in partition(request).ttft if i.stage is Stage.RESPOND]
        ends = {step.done for step in steps.steps if step.number >= engine.first_token}
        assert before_delivery[-1].begin in ends
        if not request.tokens_before:
            assert before_delivery[-1].begin == steps.steps[steps.place(engine.first_token)].done


def test_streams_of_every_path_begin_before_they_end(answered):
    """The first useful byte of a stream is not that of its first event, which holds nothing new."""
    for label, (_, request, _, _) in answered.items():
        streams = label.endswith("stream") or label == "echo"
        assert request.facts["stream"] is streams
        assert (request.first_useful < request.last_byte) or not streams
        assert (request.tokens_before is not None) is streams
        first_tokens = [e.steps.steps[e.steps.place(e.first_token)].done for e in request.engine_requests]
        assert request.first_useful > min(first_tokens)


def test_answers_to_an_image_share_its_encoding(answered):
    """Two answers to a prompt have one image: it had to be encoded, although one of them found it encoded."""
    _, request, _, _ = answered["two to an image"]
    (item,) = request.items.values()
    assert item.facts["encoder_cache"] == "miss"
    assert sum(len(engine.encoded) for engine in request.engine_requests) == 1
    assert request.facts["media_items"] == 1


def test_beam_search_is_one_round_after_the_other(live_server):
    """Beams ask the engine for a token at a time; each round's steps are prefill, and none is lost in a hand-off."""
    body = live_server.visible | {"prompt": TEXT, "use_beam_search": True, "n": 2, "max_tokens": 6}
    answers, requests = ask(live_server, "beams", {"beams": (COMPLETIONS, body)})
    request = requests["beams"]
    check_joined(request, 1 + 2 * 5)
    assert request.facts["external_id"] == pieces(answers["beams"])[0]["id"]
    stages = spent(request)
    assert stages.keys() >= ALWAYS
    assert Stage.DECODE not in stages
    parts = partition(request).completion
    rounds = [i.stage for i in parts if i.stage in {Stage.HANDOFF, Stage.PREFILL}]
    assert rounds == [Stage.HANDOFF, Stage.PREFILL] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_a_request_before_the_engine_does(live_server, stream):
    """The API server finds the string; what the engine still makes until it is told so is not decoding."""
    phase = f"stop {stream}"
    free = live_server.visible | chat(tokens=10) | RANDOM
    answers, _ = ask(live_server, f"{phase} before", {"free": (CHAT, free)})
    (piece,) = pieces(answers["free"])
    stop = piece["choices"][0]["message"]["content"][6:9]
    body = free | chat(tokens=400, stop=[stop], stream=stream)
    answers, _ = ask(live_server, phase, {"stopped": (CHAT, body)})

    def let_go(data):
        mine = [r for r in data.requests if r.facts.get("phase") == phase]
        return next((r for r in mine if all(e.freed for e in r.engine_requests)), None)

    # The engine learns of the end later than the client.
    request = live_server.wait_for(let_go)
    assert request.facts["finish_reason"] == "stop"
    assert request.facts["output_tokens"] < 60
    assert spent(request).keys() >= ALWAYS
    (engine,) = request.engine_requests
    decoding = [i for i in partition(request).completion if i.stage is Stage.DECODE]
    assert max((i.end for i in decoding), default=0) <= engine.output_finished


def test_long_prompts_are_computed_in_pieces(live_server):
    """Those behind the first exceed what one step holds; every token of a prompt is in some step."""
    sent = {f"text {n}": (CHAT, live_server.visible | chat([words(1500)])) for n in range(4)}
    _, requests = ask(live_server, "pieces", sent)
    most = 0
    for request in requests.values():
        tokens, _ = prefill(request)
        assert sum(tokens.values()) == request.facts["prompt_tokens"] - request.facts["cached_tokens"]
        assert spent(request).keys() >= ALWAYS
        most = max(most, len(tokens))
    assert most > 1


def test_encoding_is_spread_over_steps(live_server):
    """Requests of four images behind the first exceed what one step encodes; only its own items are encoding."""
    many = [[image(300 + 4 * n + place) for place in range(4)] for n in range(4)]
    bodies = [live_server.visible | chat([*images, {"type": "text", "text": TEXT}]) for images in many]
    _, requests = ask(live_server, "spread", {f"images {n}": (CHAT, body) for n, body in enumerate(bodies)})
    most = 0
    for request in requests.values():
        tokens, encoded = prefill(request)
        assert sorted(item for items in encoded.values() for item in items) == list(range(4))
        assert encoded.keys() <= tokens.keys()
        spent(request)
        encoding = [i for i in partition(request).completion if i.stage is Stage.ENCODE]
        assert {i.first_step for i in encoding} == encoded.keys()
        most = max(most, len(encoded))
    assert most > 1


def test_structured_answer_waits_for_its_grammar_once(live_server):
    """The grammar of a new schema is compiled while the request waits for it; the second request finds it made."""
    fields = {f"field_{n}": {"enum": [f"value_{n}_{m}" for m in range(200)]} for n in range(20)}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema}}
    body = {"model": live_server.visible["model"], "temperature": 0} | chat(tokens=24, response_format=form)
    sent = {"first": (CHAT, body), "second": (CHAT, body)}
    _, requests = ask(live_server, "structured", sent, in_turn=True)
    waited = {}
    for label, request in requests.items():
        assert spent(request).keys() >= ALWAYS
        intervals = partition(request).ttft
        waited[label] = sum(i.duration for i in intervals if i.reason is Reason.GRAMMAR)
    assert waited["first"] > 10 * waited["second"]


def test_nothing_was_lost_or_set_aside(live_server, answered):
    """After all that: no dropped record, no fault, every hook as known, and independent counts agree."""
    check_server(live_server)
