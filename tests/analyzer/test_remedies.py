"""Remedies: which, in which order, and that the page of them says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagetrace.stages import Kind, Reason, Stage
from stagetrace_analyzer.remedies import MATERIAL, MOST, REMEDIES, remedies_for

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "remedies.md").read_text(encoding="utf-8")
OF_THE_QUEUE = set(Reason) - {Reason.REMOTE_EMBEDDING, Reason.REMOTE_KV}
REASONS = {
    Stage.PREFILL_WAIT: OF_THE_QUEUE,
    Stage.DECODE_WAIT: OF_THE_QUEUE - {Reason.STEP},
    Stage.ENCODE_WAIT: {Reason.ENCODER_BUDGET, Reason.ENCODER_CACHE},
    Stage.EMBEDDING_TRANSFER_WAIT: {Reason.REMOTE_EMBEDDING},
    Stage.KV_TRANSFER_WAIT: {Reason.REMOTE_KV},
}
"""Reasons that a wait in the engine can have; a request that was preempted is in the queue again."""

OCCUR = [(stage, reason) for stage, reasons in REASONS.items() for reason in sorted(reasons)]


def keys(*waits):
    """The keys of the remedies for some waits."""
    return [remedy.key for remedy in remedies_for(waits)]


def table(header):
    """The cells of the table of the page that begins with a header row."""
    lines = PAGE[PAGE.index(header) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_has_remedies(stage):
    """Whatever dominates, there is something to try, and not more than one can read."""
    assert 1 <= len(remedies_for([(stage, None)])) <= MOST


def test_waits_with_a_reason_are_those_of_the_engine():
    """The waits for which reasons are listed here are all that are not in front of the engine."""
    front_end = {Stage.MEDIA_DECODE_WAIT, Stage.PREPROCESS_WAIT}
    assert set(REASONS) == {stage for stage in Stage if stage.kind is Kind.WAIT} - front_end


@pytest.mark.parametrize(("stage", "reason"), OCCUR)
def test_every_reason_has_remedies_of_its_own(stage, reason):
    """Each reason that a wait can have brings remedies from a material share on, and none below it."""
    of_the_stage = keys((stage, None))
    alone = keys((stage, {reason: 1.0}))
    beside_others = keys((stage, {reason: MATERIAL}))
    assert 1 <= len(alone) <= MOST
    assert beside_others[: len(alone)] == alone
    assert keys((stage, {reason: MATERIAL * 0.9})) == of_the_stage
    if len(REASONS[stage]) > 2:
        assert alone != of_the_stage


def test_remedies_of_the_stage_are_for_what_no_reason_explains():
    """Whoever waits for a paused engine is not told to shrink images, unless much of the wait is something else."""
    assert keys((Stage.PREFILL_WAIT, {Reason.PAUSED: 0.9})) == ["who_pauses"]
    of_the_stage = keys((Stage.PREFILL_WAIT, None))
    assert keys((Stage.PREFILL_WAIT, {Reason.PAUSED: 0.7})) == ["who_pauses", *of_the_stage][:MOST]
    assert keys((Stage.PREFILL_WAIT, {Reason.UNKNOWN: 1.0})) == ["no_reason", *of_the_stage][:MOST]


def test_unknown_reason_says_that_nothing_cheap_is_known():
    """Where the scheduler showed no reason, the first entry says so instead of guessing."""
    (first, *_) = remedies_for([(Stage.PREFILL_WAIT, {Reason.UNKNOWN: 0.9})])
    assert first.advice.startswith("Nothing cheap is known")


def test_reasons_take_turns_and_the_larger_begins():
    """Of two material reasons each has its best remedy before the other has its second."""
    found = keys((Stage.PREFILL_WAIT, {Reason.GRAMMAR: 0.3, Reason.SEATS: 0.6, Reason.LORA: 0.1}))
    assert found == ["seats", "same_schemas", "active_seats", "grammar_backend", "shorter_answers"]


def test_stages_in_the_order_given_and_each_remedy_once():
    """The first stage's remedies come first; the second stage adds those that are not there yet."""
    first, second = (Stage.PREPROCESS_WAIT, None), (Stage.ENCODE, None)
    found = keys(first, second)
    assert found == list(dict.fromkeys([*keys(first), *keys(second)]))
    assert len(found) < len(keys(first)) + len(keys(second))


def test_nothing_is_advised_that_undoes_what_was_advised_before():
    """The token budget is not to be raised and lowered at once, nor are the seats, in one stage or in two."""
    in_one = keys((Stage.PREFILL_WAIT, {Reason.STEP: 0.5, Reason.TOKENS: 0.5}))
    assert len({"token_budget", "shorter_steps"} & set(in_one)) == 1
    in_two = keys((Stage.DECODE_WAIT, {Reason.KV: 1.0}), (Stage.PREFILL_WAIT, {Reason.SEATS: 1.0}))
    assert {"seats", "active_seats", "fewer_seats"} & set(in_two) == {"fewer_seats"}


def test_text_behind_images_is_not_told_that_tokens_bound_an_image():
    """Waiting for steps that encode, one is told of the images' size before the token budget, which never cuts one."""
    found = keys((Stage.PREFILL_WAIT, {Reason.STEP: 1.0}))
    assert found.index("max_pixels") < found.index("shorter_steps")


@pytest.mark.parametrize("reason", [Reason.KV, Reason.SEATS, Reason.PREEMPTING])
def test_preempted_requests_are_not_told_to_raise_the_seats(reason):
    """After the first token a wait is lost blocks: more seats would cost more of them."""
    assert "seats" not in keys((Stage.DECODE_WAIT, {reason: 1.0}))


@pytest.mark.parametrize(
    "wait",
    [
        ("", None),
        ("prefill.waiting", {"step": 1.0}),
        ("waiting", {}),
        ("nowhere.wait", {"nothing": 1.0}),
    ],
)
def test_unknown_stages_have_none(wait):
    """A stage that is not ours, as a foreign trace may have, brings nothing and breaks nothing."""
    assert remedies_for([wait]) == ()


def test_unknown_reasons_bring_nothing_of_their_own():
    """A reason that is not ours is passed over, and so is a share that is no number."""
    of_the_stage = keys((Stage.PREFILL_WAIT, None))
    assert keys((Stage.PREFILL_WAIT, {"weather": 0.9})) == of_the_stage
    assert keys((Stage.PREFILL_WAIT, {"seats": float("nan")})) == of_the_stage
    assert remedies_for([]) == ()


def test_plain_strings_are_stages():
    """Stages and reasons read from a file are as good as the members of the enumerations."""
    assert keys(("prefill.wait", {"seats": 1.0})) == keys((Stage.PREFILL_WAIT, {Reason.SEATS: 1.0}))


def test_each_remedy_is_for_something():
    """Every remedy is reached by a stage or a reason, and their keys are distinct."""
    reached = {
        *(key for stage in Stage for key in keys((stage, None))),
        *(key for stage, reason in OCCUR for key in keys((stage, {reason: 1.0}))),
    }
    assert sorted(reached) == sorted(remedy.key for remedy in REMEDIES)


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.key)
def test_texts_are_short(remedy):
    """Advice and check fit into two lines of a terminal, and are sentences."""
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", remedy.key)
    assert len(remedy.advice) <= 100
    assert len(remedy.check) <= 110
    assert all(text[-1] in ".?" and "\n" not in text for text in (remedy.advice, remedy.check))


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.key)
def test_sources_are_of_a_kind_that_can_be_looked_up(remedy):
    """A source is an address, a name in a file of vLLM, or a test of ours that exists."""
    for source in remedy.source.split("; "):
        if source.startswith("tests/"):
            path, _, test = source.partition(": ")
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), source
        else:
            assert re.fullmatch(r"https://[\w.-]+\.\w+/\S+|vllm/[\w/]+\.py: [\w-]+", source), source


def test_checks_name_figures_that_exist():
    """Every stage that a check names is a stage, and every reason in brackets is a reason."""
    for remedy in REMEDIES:
        for stage in re.findall(r"\b[a-z_]+\.wait\b", remedy.check):
            assert stage in set(Stage), remedy
        for reason in re.findall(r"\((\w+)\)", remedy.check):
            assert reason in set(Reason), remedy


def test_page_has_every_remedy():
    """The page's table of remedies is the code's, word for word."""
    assert table("| remedy | advice |") == [
        [
            f"`{remedy.key}`",
            remedy.advice,
            f"`{remedy.option}`" if remedy.option else "",
            remedy.check,
            "; ".join(
                source if source.startswith("https") else f"`{source}`"
                for source in remedy.source.split("; ")
            ),
        ]
        for remedy in REMEDIES
    ]


def test_page_says_what_is_tried_first():
    """The page's table of stages and reasons is what is returned for each."""
    expected = [[f"`{stage}`", *_cell((stage, None))] for stage in Stage]
    expected += [[f"`{stage}({reason})`", *_cell((stage, {reason: 1.0}))] for stage, reason in OCCUR]
    assert table("| where the time goes |") == expected


def _cell(wait):
    return [", ".join(f"`{key}`" for key in keys(wait))]


def test_without_media_nothing_is_said_about_media():
    """A server of texts is not told to shrink images, and still told something."""
    waits = [("prefill.wait", {"step": 1.0})]
    with_media, without = remedies_for(waits), remedies_for(waits, media=False)
    assert any("image" in remedy.advice for remedy in with_media)
    assert without
    assert not any("an image's pixels" in remedy.advice for remedy in without)
    assert {remedy.key for remedy in without}.isdisjoint({"max_pixels", "image_limit", "same_media"})
