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
from stagetrace_analyzer.analysis import (
    NOT_MATERIAL,
    P50,
    P95,
    P99,
    Analysis,
    Check,
    DominantWait,
    MediaFacts,
    Quantile,
    StageTime,
    analyze,
    requests_needed,
)
from stagetrace_analyzer.classes import load_rules, parse_rules

MS = 1_000_000
NOT_ESTIMABLE = {n: f"not estimable: needs at least {n} requests" for n in (5, 59, 299)}


def analyzed(rows, folder: Path, **options: bool) -> Analysis:
    return analyze([rows.write(folder)], load_rules(), **options)


def times(report, horizon: Horizon) -> dict[str, StageTime]:
    return {time.stage: time for time in report.stages if time.horizon is horizon}


def test_requests_needed_for_an_upper_bound() -> None:
    """0.5 ** 5, 0.95 ** 59 and 0.99 ** 299 are the first powers not over 5 %."""
    assert [requests_needed(q) for q in (P50, P95, P99)] == [5, 59, 299]
    for q in (P50, P95, P99):
        assert float(q) ** requests_needed(q) <= 0.05 < float(q) ** (requests_needed(q) - 1)


def test_two_classes(two_classes, tmp_path: Path) -> None:
    """Counts, shares, stage times and dominant waits of the fixture, worked out by hand."""
    analysis = analyzed(two_classes, tmp_path)
    text, image = analysis.classes
    assert (text.traffic_class, image.traffic_class) == ("text/short", "image/short")
    assert (analysis.requests, analysis.warm_up, analysis.unclassified) == (400, 8, 0)
    assert (text.requests, text.outcomes, text.phase) == (200, {"ok": 200}, None)

    assert {name: t.share for name, t in times(image, Horizon.TTFT).items()} == {
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
        Horizon.COMPLETION, "prefill.wait", Kind.WAIT, 40 / 195, 40 * MS, Quantile(40 * MS), Quantile(40 * MS)
    )
    assert image.dominant_wait == DominantWait(
        Horizon.TTFT, "prefill.wait", 0.4, {"step": 0.75, "encoder_budget": 0.25}
    )
    assert text.dominant_wait == DominantWait(Horizon.TTFT, reason=NOT_MATERIAL)
    assert (image.ttft.p95, image.completion.p95) == (Quantile(100 * MS), Quantile(195 * MS))
    assert (image.waiting.p50, text.waiting.p50) == (Quantile(40 * MS), Quantile(0))
    assert image.ttft.p99 == Quantile(None, NOT_ESTIMABLE[299])
    assert image.unattributed == {Horizon.TTFT: 0.0, Horizon.COMPLETION: 0.0}
    assert image.partitioned == {Horizon.TTFT: 200, Horizon.COMPLETION: 200}


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
    assert analysis.classes[3].dominant_wait.share == 0.4
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


def test_requests_without_a_phase_are_kept_by_phase(rows, tmp_path: Path) -> None:
    """An unknown phase is a key of its own, with its stages."""
    for phase in (None, "a"):
        for _ in range(20):
            rows.request(("both", "receive", 1.0), ("both", "prefill.wait", 3.0), phase=phase)
    reports = analyzed(rows, tmp_path, by_phase=True).classes
    assert [report.phase for report in reports] == [None, "a"]
    assert [report.dominant_wait.share for report in reports] == [0.75, 0.75]


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
    assert (report.ttft.requests, report.ttft.reached) == (100, 90)
    for quantiles in (report.ttft, report.completion):
        assert quantiles.p50 == Quantile(50 * MS)
        assert quantiles.p95 == Quantile(None, "not reached (10.0 % failed)")
        assert quantiles.p99 == Quantile(None, NOT_ESTIMABLE[299])
    assert report.waiting.p50 == Quantile(0)
    assert report.waiting.p95.reason == "not reached (10.0 % failed)"
    assert report.partitioned == {Horizon.TTFT: 90, Horizon.COMPLETION: 90}
    assert times(report, Horizon.TTFT)["receive"].p50 == Quantile(45 * MS)


@pytest.mark.parametrize(
    ("count", "known"), [(4, ""), (5, "50"), (58, "50"), (59, "50 95"), (299, "50 95 99")]
)
def test_few_requests_give_no_quantile(rows, tmp_path: Path, count: int, known: str) -> None:
    """p50 needs 5 requests, p95 59 and p99 299; stages likewise."""
    for ms in range(1, count + 1):
        rows.request(("both", "receive", ms))
    (report,) = analyzed(rows, tmp_path).classes
    found = {"50": report.ttft.p50, "95": report.ttft.p95, "99": report.ttft.p99}
    expected = {
        q: Quantile(math.ceil(count * int(q) / 100) * MS)
        if q in known.split()
        else Quantile(None, NOT_ESTIMABLE[n])
        for q, n in (("50", 5), ("95", 59), ("99", 299))
    }
    assert found == expected
    stage = times(report, Horizon.COMPLETION)["receive"]
    assert (stage.p50, stage.p95) == (expected["50"], expected["95"])


def test_requests_without_a_stage_count_as_zero(rows, tmp_path: Path) -> None:
    """With 6 of 100 requests in a stage its p50 is 0, its p95 is the smallest of the 6."""
    for number in range(100):
        waits = [("both", "decode.wait", 10.0 + number)] if number < 6 else []
        rows.request(("both", "receive", 1.0), *waits)
    (report,) = analyzed(rows, tmp_path).classes
    wait = times(report, Horizon.TTFT)["decode.wait"]
    assert (wait.p50, wait.p95) == (Quantile(0), Quantile(10 * MS))
    assert wait.mean_ns == (10 + 11 + 12 + 13 + 14 + 15) * MS / 100
    assert wait.share == 75 / 175


def test_a_share_is_a_ratio_of_sums(rows, tmp_path: Path) -> None:
    """One long request outweighs a short one: 0 of 1 ms and 50 of 99 ms is a half, not a quarter."""
    rows.request(("both", "receive", 1.0))
    rows.request(("both", "receive", 49.0), ("both", "prefill.wait", 50.0))
    (report,) = analyzed(rows, tmp_path).classes
    assert times(report, Horizon.TTFT)["prefill.wait"].share == 0.5


@pytest.mark.parametrize(
    ("requests", "wait_and_total", "reason"),
    [
        (19, (50.0, 100.0), "not estimable: needs at least 20 ok requests"),
        (20, (50.0, 100.0), None),
        (20, (5.0, 100.0), None),
        (20, (4.9, 100.0), NOT_MATERIAL),
        (20, (1.0, 2.0), None),
        (20, (0.9, 2.0), NOT_MATERIAL),
    ],
)
def test_a_dominant_wait_is_material(rows, tmp_path, requests, wait_and_total, reason) -> None:
    """It has 20 requests behind it, at least 5 % of the horizon and at least 1 ms a request."""
    wait_ms, total_ms = wait_and_total
    for _ in range(requests):
        rows.request(("both", "prefill.wait", wait_ms), ("both", "prefill", total_ms - wait_ms))
    (report,) = analyzed(rows, tmp_path).classes
    expected = None if reason else "prefill.wait"
    assert [(w.horizon, w.stage, w.reason) for w in report.dominant_waits] == [
        (horizon, expected, reason) for horizon in Horizon
    ]


def test_the_dominant_wait_is_the_largest_of_each_horizon(rows, tmp_path: Path) -> None:
    """Until the first token media wait, afterwards decoding does; work is never a wait."""
    for _ in range(20):
        rows.request(
            ("both", "media_decode.wait", 20.0),
            ("both", "prefill.wait", 10.0, "step"),
            ("both", "prefill", 70.0),
            ("completion", "decode.wait", 60.0, "seats"),
            ("completion", "decode.wait", 20.0),
            ("completion", "decode.wait", 20.0, "unknown"),
        )
    (report,) = analyzed(rows, tmp_path).classes
    assert report.dominant_waits == (
        DominantWait(Horizon.TTFT, "media_decode.wait", 0.2, None),
        DominantWait(Horizon.COMPLETION, "decode.wait", 0.5, {"seats": 0.6, "unknown": 0.4}),
    )


def test_reasons_are_those_of_the_same_requests_and_horizon(rows, tmp_path: Path) -> None:
    """Reasons of the other horizon, of failed requests and of those that do not add up do not count."""
    for _ in range(20):
        rows.request(
            ("ttft", "prefill.wait", 10.0, "step"),
            ("completion", "prefill.wait", 10.0, "seats"),
        )
    rows.request(("both", "prefill.wait", 90.0, "tokens"), outcome="error")
    rows.request(("both", "prefill.wait", 90.0, "tokens"), ttft_ns=1, completion_ns=1)
    (report,) = analyzed(rows, tmp_path).classes
    assert [wait.reasons for wait in report.dominant_waits] == [{"step": 1.0}, {"seats": 1.0}]


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
        rows.request(phase=phase, media_items=modality, received_unix_ns=received)
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
    assert times(report, Horizon.TTFT)["prefill.wait"].share == 0.75
    assert report.ttft.reached == 22


def test_a_class_without_a_good_request(rows, tmp_path: Path) -> None:
    """All failed: no stage, no share, and every estimable quantile is not reached."""
    for _ in range(5):
        rows.request(outcome="lost", joined="api")
    analysis = analyzed(rows, tmp_path)
    (report,) = analysis.classes
    assert (report.stages, report.unattributed) == ((), {Horizon.TTFT: None, Horizon.COMPLETION: None})
    assert report.ttft.p50 == Quantile(None, "not reached (100.0 % failed)")
    assert report.dominant_wait.reason == "not estimable: needs at least 20 ok requests"
    assert analysis.joins == {"api": 5}


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
    assert times(report, Horizon.TTFT)["prefill"].mean_ns == 3 * MS
    assert analysis.partition_mismatches[Horizon.TTFT] == 0
    assert analysis.ingest.records == 20


def test_an_empty_dataset_has_no_class(rows, tmp_path: Path) -> None:
    """No rows give no classes and no error."""
    analysis = analyzed(rows, tmp_path)
    assert (analysis.requests, analysis.warm_up, analysis.classes, analysis.joins) == (0, 0, (), {})


def test_names_from_the_data_are_only_data(rows, tmp_path: Path) -> None:
    """Quotes in phases, stages and reasons reach the result unchanged."""
    evil = "'; DROP TABLE requests; --"
    for _ in range(20):
        rows.request(("both", "prefill.wait", 5.0, evil), phase=evil, joined=evil)
    analysis = analyzed(rows, tmp_path, by_phase=True)
    assert analysis.classes[0].phase == evil
    assert analysis.classes[0].dominant_wait.reasons == {evil: 1.0}
    assert analysis.joins == {evil: 20}


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
        _check_quantiles(latency, len(spent), [sum(s.values()) for s in good])
        if horizon is Horizon.TTFT:
            waits = [sum(ns for stage, ns in s.items() if stage.endswith(".wait")) for s in good]
            _check_quantiles(report.waiting, len(spent), waits)


def _spent(stages, horizon: Horizon) -> dict[str, int]:
    spent: dict[str, int] = defaultdict(int)
    for of, stage, ms in stages:
        if of in {horizon.value, "both"}:
            spent[stage] += round(ms * MS)
    return spent


def _check_stages(found: dict[str, StageTime], good: list[dict[str, int]]) -> None:
    assert set(found) == {stage for spent in good for stage in spent}
    total = sum(sum(spent.values()) for spent in good)
    if total:
        assert math.fsum(time.share for time in found.values()) == pytest.approx(1, abs=1e-9)
    for stage, time in found.items():
        values = [spent.get(stage, 0) for spent in good]
        assert time.share == (sum(values) / total if total else 0)
        if len(values) >= 59:
            expected = np.quantile(values, [0.5, 0.95], method="inverted_cdf")
            assert [time.p50.value_ns, time.p95.value_ns] == expected.tolist()


def _check_quantiles(found, requests: int, values: list[int]) -> None:
    everyone = np.array(values + [math.inf] * (requests - len(values)))
    for q, needed, quantile in ((50, 5, found.p50), (95, 59, found.p95), (99, 299, found.p99)):
        expected = np.sort(everyone)[-(-q * requests // 100) - 1]
        if requests < needed:
            assert quantile == Quantile(None, NOT_ESTIMABLE[needed])
        elif math.isinf(expected):
            assert quantile.reason is not None
            assert quantile.reason.startswith("not reached")
        else:
            assert quantile == Quantile(expected)
