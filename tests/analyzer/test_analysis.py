from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.errors import DataError
from stagetrace.stages import Horizon, Kind, Stage
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules, parse_rules
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.population import read_places
from stagetrace_analyzer.results import (
    NOT_MATERIAL,
    Analysis,
    Answer,
    Check,
    Dominant,
    MediaFacts,
    Quantile,
    Question,
    Region,
    Share,
    StageTime,
    WarmUp,
)

MS = 1_000_000
NOT_ESTIMABLE = {n: f"not estimable: needs at least {n} requests" for n in (6, 72, 368)}
TOO_FEW = "not estimable: needs at least 200 ok requests of the class"


def analyzed(rows, folder: Path, **options) -> Analysis:
    return analyze([rows.write(folder)], load_rules(), **options)


def values(quantiles) -> list[int | None]:
    return [quantile.value_ns for quantile in (quantiles.p50, quantiles.p95, quantiles.p99)]


def dominant_waits(report, region: Region = Region.ALL) -> list[Dominant]:
    return [report.composition(horizon, region).dominant_wait for horizon in Horizon]


def times(report, horizon: Horizon) -> dict[str, StageTime]:
    return {time.stage: time for time in report.stages if time.horizon is horizon}


def test_two_classes(two_classes, tmp_path: Path) -> None:
    """Counts, shares, stage times and dominant waits of the fixture, worked out by hand."""
    analysis = analyzed(two_classes, tmp_path)
    text, image = analysis.classes
    assert (text.traffic_class, image.traffic_class) == ("text/short", "image/short")
    assert (analysis.requests, analysis.warm_up, analysis.unclassified) == (400, 8, 0)
    assert (text.requests, text.outcomes, text.phase) == (200, {"ok": 200}, None)

    assert {name: t.share.value for name, t in times(image, Horizon.TTFT).items()} == {
        "receive": 10 / 100,
        "prefill.wait": 40 / 100,
        "prefill": 45 / 100,
        "respond": 5 / 100,
    }
    assert [t.stage for t in image.stages if t.horizon is Horizon.COMPLETION] == [
        "receive",
        "prefill.wait",
        "prefill",
        "decode",
        "respond",
    ]
    wait = times(image, Horizon.COMPLETION)["prefill.wait"]
    assert wait == StageTime(
        Horizon.COMPLETION,
        "prefill.wait",
        Kind.WAIT,
        Share(40 / 195, 40 / 195, 40 / 195),
        pytest.approx(40 * MS),
        Quantile(40 * MS),
        Quantile(40 * MS),
    )
    assert image.dominant_wait == Dominant(
        ("prefill.wait",),
        Share(0.4, 0.4, 0.4),
        {"prefill.wait": {"step": 0.75, "encoder_budget": 0.25}},
        None,
        "prefill.wait",
    )
    assert text.dominant_wait == Dominant(reason=NOT_MATERIAL)
    assert (values(image.ttft.quantiles)[1], values(image.completion.quantiles)[1]) == (100 * MS, 195 * MS)
    assert (values(image.waiting.quantiles)[0], values(text.waiting.quantiles)[0]) == (40 * MS, 0)
    assert image.ttft.quantiles.p99 == Quantile(None, reason=NOT_ESTIMABLE[368])
    assert image.ttft.survivors is None
    assert image.unattributed == {Horizon.TTFT: 0.0, Horizon.COMPLETION: 0.0}
    assert image.partitioned == {Horizon.TTFT: 200, Horizon.COMPLETION: 200}
    assert analysis.warm_ups[0] == WarmUp("warm-up", 8, 8, "sent to warm up", settled=True)


def test_media_and_quality_of_two_classes(two_classes, tmp_path: Path) -> None:
    """Media facts, joins and the ingest table come through; unknown cache answers are unknown."""
    analysis = analyzed(two_classes, tmp_path)
    text, image = analysis.classes
    assert text.media is None
    assert image.media == MediaFacts(200, 1000.0, 200.0, {"unknown": 200}, {"hit": 100, "miss": 100})
    assert analysis.joins == {"api+engine+worker": 400}
    assert analysis.partition_mismatches == {Horizon.TTFT: 0, Horizon.COMPLETION: 0}
    assert analysis.ingest.set_aside == {"torn record": 3}
    assert (analysis.ingest.records, analysis.ingest.requests) == (5000, 408)
    assert (analysis.ingest.dropped, analysis.ingest.faults) == (2, 1)
    assert analysis.ingest.hooks_off == {"vllm.engine:step": 1}
    assert analysis.ingest.checks == (
        Check("in = out", 8, 8, holds=True),
        Check("queue", 100, 90, holds=False),
    )


def test_by_phase(two_classes, tmp_path: Path) -> None:
    """Phases come in the order in which they began, classes in the order of the rules."""
    analysis = analyzed(two_classes, tmp_path, by_phase=True)
    assert [(r.phase, r.traffic_class, r.requests) for r in analysis.classes] == [
        ("text", "text/short", 100),
        ("image", "image/short", 100),
        ("mixture", "text/short", 100),
        ("mixture", "image/short", 100),
    ]
    assert analysis.by_phase
    assert analysis.classes[3].dominant_wait == Dominant(reason=TOO_FEW, seen="prefill.wait")
    assert analysis.classes[3].media == MediaFacts(100, 1000.0, 200.0, {"unknown": 100}, {"hit": 100})


@pytest.mark.parametrize(
    ("phases", "requests", "warm_up"),
    [
        (["warm-up", "warm-up"], 2, 0),
        (["warm-up", None], 1, 1),
        (["warm-up", "a", "a"], 2, 1),
        ([None], 1, 0),
    ],
)
def test_warm_up_is_left_out_beside_other_requests(rows, tmp_path, phases, requests, warm_up) -> None:
    """Warm-up is analyzed only if there is nothing else."""
    for phase in phases:
        rows.request(("both", "receive", 1.0), phase=phase)
    analysis = analyzed(rows, tmp_path)
    assert (analysis.requests, analysis.warm_up) == (requests, warm_up)


def test_a_phase_for_each_request(rows, tmp_path: Path) -> None:
    """As one they are analyzed; told apart they are too many to read, and would take all memory."""
    for number in range(301):
        rows.request(("both", "receive", 1.0), phase=f"phase {number}")
    assert analyzed(rows, tmp_path).requests == 301
    with pytest.raises(
        DataError, match="301 classes by phase are too many; at most 300 are told apart"
    ) as caught:
        analyze([tmp_path], load_rules(), by_phase=True)
    assert "leave --by-phase out" in (caught.value.hint or "")
    rows.requests.pop()
    rows.stages.pop()
    assert len(analyzed(rows, tmp_path / "300", by_phase=True).classes) == 300


def test_requests_without_a_phase_are_kept_by_phase(rows, tmp_path: Path) -> None:
    """An unknown phase is a key of its own, with its stages."""
    for phase in (None, "a"):
        for _ in range(20):
            rows.request(("both", "receive", 1.0), ("both", "prefill.wait", 3.0), phase=phase)
    reports = analyzed(rows, tmp_path, by_phase=True).classes
    assert [report.phase for report in reports] == [None, "a"]
    assert [times(report, Horizon.TTFT)["prefill.wait"].share.value for report in reports] == [0.75, 0.75]


def test_failed_requests_are_infinitely_slow(rows, tmp_path: Path) -> None:
    """Of 100 requests, 90 end well in 1 to 90 ms; p95 is not reached, p50 is the 50th.

    A cancelled request had its first token after 1 ms, and still counts as infinite.
    """
    for ms in range(1, 91):
        rows.request(("both", "receive", ms))
    for outcome in ["error"] * 4 + ["lost"] * 3:
        rows.request(outcome=outcome)
    for _ in range(3):
        rows.request(("ttft", "receive", 1.0), outcome="cancelled", completion_ns=None)
    (report,) = analyzed(rows, tmp_path).classes
    assert report.outcomes == {"ok": 90, "error": 4, "lost": 3, "cancelled": 3}
    quantiles = report.ttft.quantiles
    assert (quantiles.requests, quantiles.reached) == (100, 90)
    for found in (quantiles, report.completion.quantiles):
        assert values(found) == [50 * MS, None, None]
        assert found.p95.reason == "not reached (10.0 % never got there)"
        assert found.p99.reason == NOT_ESTIMABLE[368]
    assert report.ttft.survivors.requests == 90
    assert values(report.ttft.survivors)[0] == 45 * MS
    assert report.ttft.ecdf_p[-1] == 0.9
    assert values(report.waiting.quantiles)[0] == 0
    assert report.waiting.quantiles.p95.reason == "not reached (10.0 % never got there)"
    assert report.partitioned == {Horizon.TTFT: 90, Horizon.COMPLETION: 90}
    assert times(report, Horizon.TTFT)["receive"].p50 == Quantile(45 * MS)


@pytest.mark.parametrize(
    ("count", "known"), [(5, ""), (6, "50"), (71, "50"), (80, "50 95"), (367, "50 95"), (800, "50 95 99")]
)
def test_few_requests_give_no_quantile(rows, tmp_path: Path, count: int, known: str) -> None:
    """p50 needs 6 independent requests, p95 72 and p99 368; of stages the same number in all."""
    order = np.random.default_rng(1).permutation(count) + 1
    for ms in order.tolist():
        rows.request(("both", "receive", ms))
    (report,) = analyzed(rows, tmp_path).classes
    expected = {
        q: math.ceil(count * int(q) / 100) * MS if q in known.split() else None for q in ("50", "95", "99")
    }
    assert values(report.ttft.quantiles) == list(expected.values())
    for quantile in (report.ttft.quantiles.p50, report.ttft.quantiles.p95, report.ttft.quantiles.p99):
        if quantile.value_ns is None:
            assert quantile.reason.startswith("not estimable: ")
        else:
            assert quantile.reason is None
            assert quantile.low_ns <= quantile.value_ns <= quantile.high_ns
    stage = times(report, Horizon.COMPLETION)["receive"]
    for found, wanted in zip((stage.p50, stage.p95), expected.values(), strict=False):
        assert found.value_ns == (None if wanted is None else pytest.approx(wanted, rel=0.005))


def test_requests_without_a_stage_count_as_zero(rows, tmp_path: Path) -> None:
    """With 6 of 100 requests in a stage its p50 is 0, its p95 is the smallest of the 6."""
    for number in range(100):
        waits = [("both", "decode.wait", 10.0 + number)] if number < 6 else []
        rows.request(("both", "receive", 1.0), *waits)
    (report,) = analyzed(rows, tmp_path).classes
    wait = times(report, Horizon.TTFT)["decode.wait"]
    assert (wait.p50, wait.p95) == (Quantile(0), Quantile(10 * MS))
    assert wait.mean_ns == pytest.approx((10 + 11 + 12 + 13 + 14 + 15) * MS / 100)
    assert wait.share.value == pytest.approx(75 / 175)


def test_a_share_is_a_ratio_of_sums(rows, tmp_path: Path) -> None:
    """One long request outweighs a short one: 0 of 1 ms and 50 of 99 ms is a half, not a quarter."""
    rows.request(("both", "receive", 1.0))
    rows.request(("both", "receive", 49.0), ("both", "prefill.wait", 50.0))
    (report,) = analyzed(rows, tmp_path).classes
    assert times(report, Horizon.TTFT)["prefill.wait"].share.value == 0.5


@pytest.mark.parametrize(
    ("requests", "wait_and_total", "reason"),
    [
        (199, (50.0, 100.0), TOO_FEW),
        (200, (50.0, 100.0), None),
        (200, (5.0, 100.0), None),
        (200, (4.9, 100.0), NOT_MATERIAL),
        (200, (1.0, 2.0), None),
        (200, (0.9, 2.0), NOT_MATERIAL),
    ],
)
def test_a_dominant_wait_is_material(rows, tmp_path, requests, wait_and_total, reason) -> None:
    """It has 200 requests behind it, at least 5 % of the horizon and at least 1 ms a request."""
    wait_ms, total_ms = wait_and_total
    for _ in range(requests):
        rows.request(("both", "prefill.wait", wait_ms), ("both", "prefill", total_ms - wait_ms))
    (report,) = analyzed(rows, tmp_path).classes
    expected = () if reason else ("prefill.wait",)
    assert [(w.stages, w.reason, w.seen) for w in dominant_waits(report)] == [
        (expected, reason, "prefill.wait") for _ in Horizon
    ]


def test_the_dominant_wait_is_the_largest_of_each_horizon(rows, tmp_path: Path) -> None:
    """Until the first token media wait, afterwards decoding does; work is a dominant stage but no wait."""
    for _ in range(200):
        rows.request(
            ("both", "media_decode.wait", 20.0),
            ("both", "prefill.wait", 10.0, "step"),
            ("both", "prefill", 70.0),
            ("completion", "decode.wait", 60.0, "seats"),
            ("completion", "decode.wait", 20.0),
            ("completion", "decode.wait", 20.0, "unknown"),
        )
    (report,) = analyzed(rows, tmp_path).classes
    ttft, completion = dominant_waits(report)
    assert (ttft.stages, ttft.share.value, ttft.reasons) == (("media_decode.wait",), 0.2, None)
    assert (completion.stages, completion.share.value) == (("decode.wait",), 0.5)
    assert completion.reasons == {"decode.wait": {"seats": 0.6, "unknown": 0.4}}
    stages = [report.composition(horizon, Region.ALL).dominant_stage.stages for horizon in Horizon]
    assert stages == [("prefill",), ("decode.wait",)]


def test_waits_that_are_equally_large_are_named_together(rows, tmp_path: Path) -> None:
    """Two waits that take turns as the larger one are both named, a third small one is not."""
    generator = np.random.default_rng(3)
    for _ in range(400):
        first, second = generator.uniform(0, 20, 2)
        rows.request(
            ("both", "media_decode.wait", first),
            ("both", "preprocess.wait", second),
            ("both", "prefill.wait", 1.0, "step"),
            ("both", "prefill", 30.0),
        )
    (report,) = analyzed(rows, tmp_path).classes
    dominant = report.dominant_wait
    assert sorted(dominant.stages) == ["media_decode.wait", "preprocess.wait"]
    shares = times(report, Horizon.TTFT)
    assert dominant.share.value == pytest.approx(sum(shares[stage].share.value for stage in dominant.stages))


def test_the_tail_can_wait_elsewhere_than_the_rest(rows, tmp_path: Path) -> None:
    """One request in ten waits long for the engine, all wait a little for preprocessing: both are found."""
    generator = np.random.default_rng(4)
    for _ in range(4000):
        slow = generator.random() < 0.1
        waits = [("both", "prefill.wait", generator.uniform(500, 600), "step")] if slow else []
        rows.request(
            ("both", "preprocess.wait", 10.0), ("both", "prefill", generator.uniform(10, 20)), *waits
        )
    (report,) = analyzed(rows, tmp_path).classes
    typical, tail = (report.composition(Horizon.TTFT, region) for region in (Region.TYPICAL, Region.TAIL))
    assert (typical.requests, tail.requests) == (pytest.approx(800), pytest.approx(200))
    assert typical.dominant_wait.stages == ("preprocess.wait",)
    assert tail.dominant_wait.stages == ("prefill.wait",)
    assert tail.dominant_wait.reasons == {"prefill.wait": {"step": 1.0}}
    assert tail.mean_ns > 500 * MS > 100 * MS > typical.mean_ns


def test_a_tail_of_one_long_queue_names_nothing(rows, tmp_path: Path) -> None:
    """Its 300 requests stood in the same queue: they are worth few, so shares have no interval and no name."""
    generator = np.random.default_rng(6)
    for number in range(6000):
        queue_ms = 900.0 - abs(number - 3000) if 2850 < number < 3150 else 0.0
        rows.request(
            ("both", "prefill.wait", queue_ms, "step"), ("both", "prefill", generator.uniform(10, 20))
        )
    (report,) = analyzed(rows, tmp_path).classes
    tail = report.composition(Horizon.TTFT, Region.TAIL)
    assert tail.requests == pytest.approx(300)
    assert (tail.dominant_wait.stages, tail.dominant_wait.seen) == ((), "prefill.wait")
    assert tail.dominant_wait.reason.startswith("not estimable: these 300 requests are worth ")
    assert {share.low for share in tail.shares.values()} == {None}
    assert report.composition(Horizon.TTFT, Region.TYPICAL).dominant_wait.reason == NOT_MATERIAL


def test_reasons_are_those_of_the_same_requests_and_horizon(rows, tmp_path: Path) -> None:
    """Reasons of the other horizon, of failed requests and of those that do not add up do not count."""
    for _ in range(200):
        rows.request(
            ("ttft", "prefill.wait", 10.0, "step"),
            ("completion", "prefill.wait", 10.0, "seats"),
        )
    rows.request(("both", "prefill.wait", 90.0, "tokens"), outcome="error")
    rows.request(("both", "prefill.wait", 90.0, "tokens"), ttft_ns=1, completion_ns=1)
    (report,) = analyzed(rows, tmp_path).classes
    assert [wait.reasons for wait in dominant_waits(report)] == [
        {"prefill.wait": {"step": 1.0}},
        {"prefill.wait": {"seats": 1.0}},
    ]


def test_a_thousand_reasons_are_the_largest_and_others(rows, tmp_path: Path) -> None:
    """Nobody reads so many, and each takes memory; their time stays, and adds up."""
    for number in range(1000):
        rows.request(("both", "prefill.wait", 10.0, f"r{number}"), ("both", "prefill.wait", 30.0, "step"))
    analysis = analyzed(rows, tmp_path)
    (report,) = analysis.classes
    assert analysis.partition_mismatches == dict.fromkeys(Horizon, 0)
    reasons = report.dominant_wait.reasons["prefill.wait"]
    assert list(reasons)[:2] == ["step", "other"]
    assert len(reasons) == 31
    assert (reasons["step"], math.fsum(reasons.values())) == (0.75, pytest.approx(1))
    assert reasons["other"] == pytest.approx(0.25 * 971 / 1000)


def test_thirty_reasons_beside_a_stage_with_more(rows, tmp_path: Path) -> None:
    """They are all told, also where some of the time has no reason; the other stage's smallest is not."""
    for number in range(31):
        rows.request(
            ("both", "prefill.wait", 100.0 - number, f"r{number:02}"),
            ("both", "decode.wait", 50.0 - number, None if number == 30 else f"r{number:02}"),
        )
    rows.request(*[("both", "decode.wait", 900.0)] * 2, ("both", "prefill.wait", 900.0))
    places = _places(rows.write(tmp_path))
    reasons = {stage: {r for s, r in places if s == stage} for stage in ("prefill.wait", "decode.wait")}
    thirty = {f"r{number:02}" for number in range(30)}
    assert reasons == {"prefill.wait": {*thirty, "other", None}, "decode.wait": {*thirty, None}}


def _places(folder: Path) -> list[tuple[str, str | None]]:
    with open_dataset([folder]) as connection:
        found = read_places(connection)
    return list(zip(found.stages, found.reasons, strict=True))


def test_plain_questions(rows, tmp_path: Path) -> None:
    """Yes from 5 % on, no below, cannot tell where the interval holds 5 %; output from a half on."""
    generator = np.random.default_rng(5)
    for _ in range(100):
        rows.request(
            ("both", "retrieval", 30.0),
            ("both", "preprocess.wait", generator.choice([0.0, 50.0], p=[0.9, 0.1])),
            ("both", "prefill", 70.0),
            ("completion", "decode", 300.0),
        )
    (report,) = analyzed(rows, tmp_path).classes
    answers = {answer.question: answer for answer in report.answers}
    assert {question: answer.answer for question, answer in answers.items()} == {
        Question.DOWNLOAD: Answer.YES,
        Question.ENCODER_QUEUE: Answer.NO,
        Question.TRANSFER_WAIT: Answer.NO,
        Question.INPUT: Answer.CANNOT_TELL,
        Question.OUTPUT: Answer.YES,
    }
    assert "5 % in between" in answers[Question.INPUT].reason
    assert answers[Question.DOWNLOAD].mean_ns == pytest.approx(30 * MS)


def test_plain_questions_need_requests(rows, tmp_path: Path) -> None:
    """Of 40 requests nothing is answered, and it is said how many would do."""
    for _ in range(40):
        rows.request(("both", "retrieval", 30.0), ("both", "prefill", 70.0))
    (report,) = analyzed(rows, tmp_path).classes
    assert {(a.answer, a.reason) for a in report.answers} == {
        (Answer.CANNOT_TELL, "not estimable: needs at least 72 ok requests")
    }


def test_plain_questions_need_independent_requests(rows, tmp_path: Path) -> None:
    """A download that is slow in one long stretch says nothing of others, however many requests are in it."""
    for number in range(3000):
        slow = 1000 <= number < 2200
        rows.request(("both", "retrieval", 50.0 if slow else 1.0), ("both", "prefill", 50.0))
    (report,) = analyzed(rows, tmp_path).classes
    found = {a.question: a for a in report.answers if a.horizon is Horizon.TTFT}[Question.DOWNLOAD]
    assert found.answer is Answer.CANNOT_TELL
    assert found.share is not None
    assert found.share.low is None
    assert found.reason == report.dominant_wait.reason
    assert found.reason.startswith("not estimable: these 3,000 requests are worth ")


def test_phases_are_in_the_order_of_their_first_request(rows, tmp_path: Path) -> None:
    """It does not matter which class the first request of a phase is in."""
    for phase, modality, received in (
        ("third", 0, 2),
        ("third", 1, 8),
        ("second", 0, 9),
        ("second", 1, 1),
        ("first", 0, 0),
        ("first", 1, 9),
    ):
        rows.request(phase=phase, media_items=modality, received_unix_ns=10**18 + received)
    reports = analyzed(rows, tmp_path, by_phase=True).classes
    assert [report.phase for report in reports] == ["first", "first", "second", "second", "third", "third"]


def test_stages_that_do_not_add_up_are_counted_and_left_out(rows, tmp_path: Path) -> None:
    """One nanosecond is enough; the other requests' shares still add up to 1, and so do failed ones count."""
    for _ in range(20):
        rows.request(("both", "receive", 1.0), ("both", "prefill.wait", 3.0))
    rows.request(("both", "receive", 1000.0), ttft_ns=1000 * MS + 1)
    rows.request(("both", "receive", 1.0), ttft_ns=2 * MS, completion_ns=None, outcome="cancelled")
    rows.request(ttft_ns=MS, completion_ns=MS)
    analysis = analyzed(rows, tmp_path)
    (report,) = analysis.classes
    assert analysis.partition_mismatches == {Horizon.TTFT: 3, Horizon.COMPLETION: 1}
    assert report.partitioned == {Horizon.TTFT: 20, Horizon.COMPLETION: 21}
    assert times(report, Horizon.TTFT)["prefill.wait"].share.value == 0.75
    assert report.ttft.quantiles.reached == 22


def test_a_request_without_a_useful_byte_has_not_failed(rows, tmp_path: Path) -> None:
    """It may end well all the same; its time to first token is none."""
    for _ in range(20):
        rows.request(("completion", "prefill", 3.0), ttft_ns=None)
    (report,) = analyzed(rows, tmp_path).classes
    assert report.outcomes == {"ok": 20}
    assert report.ttft.quantiles.p50.reason == "not reached (100.0 % never got there)"
    assert report.completion.quantiles.p50.value_ns == 3 * MS


def test_a_wait_is_not_known_of_stages_that_do_not_add_up(rows, tmp_path: Path) -> None:
    """A request without records is not one that did not wait; failed ones count all the same."""
    for number in range(60):
        rows.request(("both", "prefill.wait", 20.0), ("both", "prefill", 40.0))
        rows.request(ttft_ns=60 * MS, completion_ns=60 * MS)
        if number < 6:
            rows.request(outcome="error")
    (report,) = analyzed(rows, tmp_path).classes
    waiting = report.waiting.quantiles
    assert (waiting.requests, waiting.reached) == (66, 60)
    assert waiting.p50.value_ns == 20 * MS


def test_a_negative_time_adds_up_to_nothing(rows, tmp_path: Path) -> None:
    """Such a request is set aside, even if its stages add up."""
    for _ in range(20):
        rows.request(("both", "receive", 1.0), ("both", "prefill", 3.0))
    rows.request(("both", "receive", -1.0), ("both", "prefill", 3.0))
    analysis = analyzed(rows, tmp_path)
    assert analysis.partition_mismatches == {Horizon.TTFT: 1, Horizon.COMPLETION: 1}
    assert analysis.classes[0].partitioned == {Horizon.TTFT: 20, Horizon.COMPLETION: 20}


def test_an_unknown_kind_of_stage_is_one_line(rows, tmp_path: Path) -> None:
    """Whether it is a wait cannot be guessed."""
    rows.request(("both", "receive", 1.0), ("both", "prefill", 3.0))
    rows.stages[1]["kind"] = "sleep"
    with pytest.raises(DataError, match="the stage 'prefill' is of the unknown kind 'sleep'"):
        analyzed(rows, tmp_path)


def test_absurd_media_do_not_end_an_analysis(rows, tmp_path: Path) -> None:
    """An image whose pixels no integer holds is still an item."""
    request = rows.request(("both", "prefill", 3.0), media_items=1)
    rows.media.append({"request": request, "item": 0, "width": 2**40, "height": 2**40})
    (report,) = analyzed(rows, tmp_path).classes
    assert report.media is not None
    assert report.media.mean_pixels == 2.0**80


def test_a_class_without_a_good_request(rows, tmp_path: Path) -> None:
    """All failed: no stage, no share, and every estimable quantile is not reached."""
    for _ in range(6):
        rows.request(outcome="lost", joined="api")
    analysis = analyzed(rows, tmp_path)
    (report,) = analysis.classes
    assert (report.stages, report.unattributed) == ((), {Horizon.TTFT: None, Horizon.COMPLETION: None})
    assert report.ttft.quantiles.p50.reason == "not reached (100.0 % never got there)"
    assert report.ttft.survivors.requests == 0
    assert report.dominant_wait == Dominant(reason=TOO_FEW)
    assert report.answers[0].reason == "no ok request reached ttft"
    assert analysis.joins == {"api": 6}


def test_unclassified_requests_are_counted(rows, tmp_path: Path) -> None:
    """A request whose modality is unknown meets no default rule, and comes last."""
    rows.request(media_items=None)
    rows.request()
    analysis = analyzed(rows, tmp_path)
    assert [report.traffic_class for report in analysis.classes] == ["text/short", "other"]
    assert analysis.unclassified == 1


def test_a_request_with_media_is_an_image_request(rows, tmp_path: Path) -> None:
    """The modality is derived from the number of media items; rules of one's own see it."""
    for items in (0, 1, 3):
        rows.request(media_items=items)
    rules = parse_rules('[[class]]\nname = "seen"\nwhere = { modality = "image" }', source="test")
    (seen, other) = analyze([rows.write(tmp_path)], rules).classes
    assert (seen.traffic_class, seen.requests, other.requests) == ("seen", 2, 1)


def test_datasets_are_analyzed_as_one(rows, tmp_path: Path) -> None:
    """The same request id in two datasets is two requests, each with its own stages."""
    rows.request(("both", "receive", 1.0), ("both", "prefill", 3.0), request_id="same")
    rows.ingest.append({"name": "records", "reason": "", "count": 10})
    folders = [rows.write(tmp_path / "a"), rows.write(tmp_path / "b")]
    analysis = analyze(folders, load_rules())
    (report,) = analysis.classes
    assert report.requests == 2
    assert times(report, Horizon.TTFT)["prefill"].mean_ns == pytest.approx(3 * MS)
    assert analysis.partition_mismatches[Horizon.TTFT] == 0
    assert analysis.ingest.records == 20


def test_an_empty_dataset_has_no_class(rows, tmp_path: Path) -> None:
    """No rows give no classes and no error."""
    analysis = analyzed(rows, tmp_path)
    assert (analysis.requests, analysis.warm_up, analysis.classes, analysis.joins) == (0, 0, (), {})


def test_names_from_the_data_are_only_data(rows, tmp_path: Path) -> None:
    """Quotes in phases, stages and reasons reach the result unchanged."""
    evil = "'; DROP TABLE requests; --"
    for _ in range(200):
        rows.request(("both", "prefill.wait", 5.0, evil), phase=evil, joined=evil)
    analysis = analyzed(rows, tmp_path, by_phase=True)
    assert analysis.classes[0].phase == evil
    assert analysis.classes[0].dominant_wait.reasons == {"prefill.wait": {evil: 1.0}}
    assert analysis.joins == {evil: 200}


def test_broken_pages_are_one_line(two_classes, tmp_path: Path) -> None:
    """Damage behind an intact footer is a DataError that names the dataset."""
    folder = two_classes.write(tmp_path)
    part = folder / "stages/part-0.parquet"
    content = bytearray(part.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    part.write_bytes(content)
    with pytest.raises(DataError, match=f"cannot read {tmp_path}") as caught:
        analyze([folder], load_rules())
    assert "\n" not in caught.value.message


interval = st.tuples(
    st.sampled_from(["both", "ttft", "completion"]),
    st.sampled_from([stage.value for stage in Stage]),
    st.integers(0, 50_000).map(lambda us: us / 1000),
)
request = st.tuples(
    st.lists(interval, min_size=1, max_size=8), st.sampled_from(["ok", "ok", "ok", "error", "cancelled"])
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(requests=st.lists(request, min_size=1, max_size=12), copies=st.sampled_from([1, 7, 30]))
def test_figures_agree_with_a_direct_count(new_rows, requests, copies: int) -> None:
    """Shares, stage quantiles, waiting and latency quantiles equal those of a count in plain Python.

    The shares of each horizon add up to 1.
    """
    rows = new_rows()
    for stages, outcome in requests * copies:
        rows.request(*stages, outcome=outcome)
    with TemporaryDirectory() as folder:
        (report,) = analyzed(rows, Path(folder)).classes
    for horizon in Horizon:
        spent = [_spent(stages, horizon) for stages, _ in requests * copies]
        good = [s for s, (_, outcome) in zip(spent, requests * copies, strict=True) if outcome == "ok"]
        _check_stages(times(report, horizon), good)
        latency = report.ttft if horizon is Horizon.TTFT else report.completion
        _check_quantiles(latency.quantiles, len(spent), [sum(s.values()) for s in good])
        if horizon is Horizon.TTFT:
            waits = [sum(ns for stage, ns in s.items() if stage.endswith(".wait")) for s in good]
            _check_quantiles(report.waiting.quantiles, len(spent), waits)


def _spent(stages, horizon: Horizon) -> dict[str, int]:
    spent: dict[str, int] = defaultdict(int)
    for of, stage, ms in stages:
        if of in {horizon.value, "both"}:
            spent[stage] += round(ms * MS)
    return spent


def _check_stages(found: dict[str, StageTime], good: list[dict[str, int]]) -> None:
    assert set(found) == {stage for spent in good for stage, ns in spent.items() if ns}
    total = sum(sum(spent.values()) for spent in good)
    if total:
        assert math.fsum(time.share.value for time in found.values()) == pytest.approx(1, abs=1e-9)
    for stage, time in found.items():
        values = [spent.get(stage, 0) for spent in good]
        assert time.share.value == pytest.approx(sum(values) / total)
        if len(values) >= 72:
            expected = np.quantile(values, [0.5, 0.95], method="inverted_cdf")
            assert [time.p50.value_ns, time.p95.value_ns] == pytest.approx(expected.tolist(), rel=0.005)


def _check_quantiles(found, requests: int, values: list[int]) -> None:
    everyone = np.array(values + [math.inf] * (requests - len(values)))
    for q, needed, quantile in ((50, 6, found.p50), (95, 72, found.p95), (99, 368, found.p99)):
        expected = np.sort(everyone)[-(-q * requests // 100) - 1]
        if requests < needed:
            assert quantile == Quantile(None, reason=NOT_ESTIMABLE[needed])
        elif quantile.value_ns is None:
            assert quantile.reason.startswith("not estimable" if math.isfinite(expected) else "not ")
        else:
            assert quantile.value_ns == expected
            assert quantile.low_ns is None or quantile.low_ns <= expected
            assert (quantile.high_ns is None) == (quantile.reason is not None)
