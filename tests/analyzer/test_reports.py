from __future__ import annotations

import dataclasses
import importlib.resources
import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import analyses
import jsonschema
import pytest
from analyses import MS, compositions, dominant_wait, everything, not_estimable, poor, quantile, report

from stagetrace.stages import Horizon, Reason
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.reports import words
from stagetrace_analyzer.reports.document import document_of
from stagetrace_analyzer.reports.json_report import NO_INTERVAL, render_json, to_dict
from stagetrace_analyzer.reports.text import write_text
from stagetrace_analyzer.results import NOT_MATERIAL, Dominant, Question, Region, Share

if TYPE_CHECKING:
    from collections.abc import Iterator


def schema() -> dict[str, Any]:
    file = importlib.resources.files("stagetrace_analyzer") / "schemas/analyze.schema.json"
    return json.loads(file.read_text(encoding="utf-8"))


def text_of(analysis) -> str:
    file = io.StringIO()
    write_text(analysis, file)
    return file.getvalue()


def words_of(analysis) -> str:
    """The text with its lines joined."""
    return " ".join(text_of(analysis).split())


@pytest.fixture
def analysis(two_classes, tmp_path: Path):
    return analyze([two_classes.write(tmp_path / "data")], load_rules())


@pytest.fixture
def mixed(rows, tmp_path: Path):
    """Classes in phases, with failures, few requests, unknown facts, mismatches and hostile names."""
    for number in range(60):
        rows.request(
            ("both", "receive", 0.001),
            ("both", "media_decode.wait", 20.0),
            ("both", "unattributed", 5.0),
            ("completion", "decode.wait", 100.0, "a\x1b[31m[red]new[/red]"),
            phase="evil\x1b[2J",
            outcome="error" if number < 6 else "ok",
        )
    rows.request(ttft_ns=5, completion_ns=5, media_items=None, phase=None, joined="api")
    rows.request(outcome="lost", media_items=2)
    rows.media.append({"request": 61, "item": 0})
    return analyze([rows.write(tmp_path / "mixed")], load_rules(), by_phase=True)


# --- text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed", "everything"])
def test_a_piped_report_is_plain_and_narrow(name: str, request, monkeypatch: pytest.MonkeyPatch) -> None:
    """No control character, no padding, at most 80 columns, whatever the environment and the data say."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    found = everything() if name == "everything" else request.getfixturevalue(name)
    lines = text_of(found).splitlines()
    assert all(line.isascii() and (line.isprintable() or not line) for line in lines)
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_long_times_and_names_lose_no_figure() -> None:
    """Where 80 columns are too few, figures go on in the next line; nothing is cut off."""
    long = report(mean_ms=9_876_543.0, name="a-class-of-a-very-long-name/" * 3)
    text = text_of(analyses.analysis(long))
    for figure in ("7,901,234", "[7,111,111,", "9,481,481]"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_terminal_gets_colour(analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, waits are coloured."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file = Terminal()
    write_text(analysis, file)
    assert "\x1b[33m* prefill.wait" in file.getvalue()


def test_what_must_be_known_comes_first() -> None:
    """Where the figures come from, the selection, alarms and the answers are the first lines, in this order."""
    text = words_of(everything())
    firsts = [
        "Simulated requests: nothing here was measured.",
        "8,003 requests, 1,040 of warm-up left out, 3 match no class rule",
        "Selected: class text/short, class image/long, since 30m; 1,200 other requests are not in here",
        "OVERLOADED [mixture]: only 81.0 % of the requests had ended by the last arrival",
        "STILL DRIFTING [mixture]: not settled after the 1,000 of 4,000 requests",
        "CHECK THE DATA: 1 of 2 counts that must agree do not",
        "[mixture] text/short",
        "Cheaper things to try first",
        "all requests",
    ]
    places = [text.index(first) for first in firsts]
    assert places == sorted(places)
    assert places[0] == 0


@pytest.mark.parametrize(("by_phase", "name"), [(True, "no phase"), (False, "all")])
def test_a_load_without_a_phase(by_phase, name) -> None:
    """Beside phases it is of the requests that have none, else of all."""
    load = dataclasses.replace(everything().loads[0], phase=None)
    document = document_of(analyses.analysis(report(), loads=(load,), by_phase=by_phase))
    assert [row.name for row in document.load.rows] == [name]


def test_an_overloaded_phase_in_large_company() -> None:
    """That 98 % of all requests had ended is no sign of it, so the alarm does not say so."""
    (load, *_) = everything().loads
    loads = (dataclasses.replace(load, phase=None, achieved=0.98),)
    (alarm, *_) = document_of(analyses.analysis(report(), loads=loads)).alarms
    assert alarm.startswith("OVERLOADED: many requests of a phase or dataset had not ended by its last")
    assert "98" not in alarm


def test_a_calm_report_has_no_alarm() -> None:
    """Nothing is said of overload, drift, the data or the selection when there is nothing to say."""
    sound = dataclasses.replace(
        analyses.INGEST, about=(), checks=(analyses.Check("in = out", 8, 8, holds=True),)
    )
    calm = analyses.analysis(
        report(),
        loads=(),
        warm_ups=(),
        selection={},
        not_selected=0,
        partition_mismatches=dict.fromkeys(Horizon, 0),
        unusable={},
        ingest=sound,
    )
    assert text_of(calm).startswith("4,000 requests, 3 match no class rule\n\n[mixture] text/short  ")


def test_text_says_what_is_poor(mixed) -> None:
    """Failures, unknown classes, mismatches and a large unattributed share are said in words."""
    text = words_of(mixed)
    assert "CHECK THE DATA: the stages of 2 horizons do not add up; up to 20.0 %" in text
    assert "62 requests, 1 match no class rule" in text
    assert "(54 ok, 6 error)" in text
    assert "10.0 % did not end well." in text
    assert "<0.1" in text
    assert "2 horizons whose stages do not add up; left out of shares" in text
    assert "at most 20.0 % of TTFT ([evil?[2J] text/short; should be under 2 %)" in text
    assert "up to 20.0 % of the time is unattributed" in text
    assert "set aside nothing" in text


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ((True, True), "gaps are between intended sends;"),
        ((True, False), "gaps are between intended sends where all were told, else receipts;"),
        ((False, False), "gaps are between receipts;"),
    ],
)
def test_what_gaps_are_between(told, words: str) -> None:
    """A phase whose clients told when they meant to send has gaps of its own kind."""
    (load, *_) = everything().loads
    loads = tuple(dataclasses.replace(load, open_loop=open_loop) for open_loop in told)
    assert words in words_of(analyses.analysis(report(), loads=loads))


def test_long_names_that_begin_alike_show_that_they_are_cut() -> None:
    """Beside an answer there is room for 32 characters; the whole name heads the tables."""
    name = "a-class-of-a-very-long-name/" * 2 + "end"
    text = text_of(analyses.analysis(report(name)))
    assert f"\n[mixture] {name[:19]}...  " in text
    assert f"\n[mixture] {name}:" in text


def test_a_class_that_is_decided_at_the_end_is_marked() -> None:
    """The mark is at its name wherever that stands, and its section says what it means."""
    text = words_of(analyses.analysis(report("long answers", None, post=True)))
    assert text.count("long answers (post)") == 3
    assert "decided by what was known only at the end: not for comparing or gating" in text


def test_survivors_are_second_and_labelled() -> None:
    """Quantiles over all requests come first; those of survivors say who is missing from them."""
    lines = [line.strip() for line in text_of(everything()).splitlines()]
    place = next(n for n, line in enumerate(lines) if line.startswith("all requests"))
    assert [line.split("  ")[0] for line in lines[place + 1 : place + 6]] == [
        "TTFT",
        "completion",
        "waiting in TTFT",
        "TTFT, survivors",
        "completion, survivors",
    ]
    assert "40 of 4,000 never reached TTFT, 240 of 4,000 never reached completion" in words_of(everything())


def test_reasons_for_missing_quantiles_say_whose_they_are() -> None:
    """A reason that is not that of all three latencies names those that it is of."""
    text = words_of(everything())
    assert "p95 of completion: not reached (6.0 % never got there)" in text
    assert "p50: not estimable: needs at least 6 requests" in text


# --- words -------------------------------------------------------------------------------------------


def test_a_named_wait_has_its_share_and_its_reason() -> None:
    """The answer names the wait until the first token, that of the tail and that until completion."""
    assert words.answer(report(answers=())) == (
        "Requests mostly wait in prefill.wait (45 % [40-50] of TTFT), because a step was running (75 %). "
        "The slowest 5 % mostly wait in prefill.wait or encode.wait "
        "(together 60 % [54-66] of TTFT; it is not sure which more). "
        "Until completion they mostly wait in decode.wait (20 % [18-22] of completion), "
        "because a step was running (75 %)."
    )


def test_nobody_waits() -> None:
    """Where nobody waits the answer says what takes the time instead."""

    def nobody(horizon, region):
        return Dominant(reason=NOT_MATERIAL, seen="prefill.wait")

    calm = report(answers=(), compositions=compositions(60.0, waits=nobody))
    assert words.answer(calm) == (
        "Nobody waits materially: the time is work, mostly prefill.wait (45 % [40-50] of TTFT)."
    )


def test_what_is_only_seen_is_marked() -> None:
    """Without enough requests the answer says what it would take, and what was seen as no more than that."""
    few = report(answers=(), compositions=compositions(60.0, waits=not_estimable))
    assert words.answer(few) == (
        "Dominant wait not estimable: needs at least 200 ok requests of the class. "
        "Only seen in these 3,760: the longest wait was prefill.wait (45 % of TTFT)."
    )
    assert words.answer(poor()) == "Dominant wait not estimable: needs at least 6 requests."


def test_every_yes_is_in_the_answer() -> None:
    """A plain question whose answer is yes is a sentence; no and cannot tell are in the table only."""
    sentences = words.answer(report()).split(". ")
    assert sentences[-2:] == [
        "Encoding queues (15 % [14-16] of TTFT)",
        "Output dominates (70 % [63-77] of completion).",
    ]


def test_every_reason_and_question_has_words() -> None:
    """Reasons of the stage model and plain questions are told in words; other reasons are quoted."""
    assert all(words.because(reason) != reason.value for reason in Reason)
    assert set(words.QUESTIONS) == set(Question)
    assert words.because("solar flare") == "solar flare"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (quantile(22.04, 20.1, 25.3), "22.0 [20.1, 25.3]"),
        (quantile(12345.6, 11000.0, 13000.4), "12,346 [11,000, 13,000]"),
        (quantile(0.01, 0.0, 0.04), "<0.1 [0.0, <0.1]"),
        (quantile(5.0), "5.0"),
        (quantile(5.0, None, 9.0), "5.0 [0.0, 9.0]"),
        (quantile(5.0, 4.0, None, reason="upper bound not reached"), "5.0 [4.0, inf]"),
        (quantile(None, reason="why"), "-"),
    ],
)
def test_quantiles_in_words(found, text: str) -> None:
    """About three figures; an unknown lower bound is 0, an upper one at the failed requests infinite."""
    assert words.quantile(found) == text


@pytest.mark.parametrize(
    ("share", "table", "sentence"),
    [
        (Share(0.601, 0.552, 0.659), "60.1 [55-66]", "60 % [55-66]"),
        (Share(0.841, 0.8401, 0.8423), "84.1 [84-84]", "84 %"),
        (Share(0.02, 0.018, 0.105), "2.0 [1.8-10]", "2 % [1.8-10]"),
        (Share(0.02), "2.0", "2 %"),
    ],
)
def test_shares_in_words(share: Share, table: str, sentence: str) -> None:
    """Tables have every interval; sentences leave out one that is narrower than a percent."""
    assert words.percent_with_interval(share) == table
    assert words.figure(share) == sentence


def test_a_remedy_is_told_once() -> None:
    """A remedy for several classes comes once, with all of them."""
    document = document_of(analyses.analysis(report("a"), report("b"), report("c", remedies=())))
    (advice,) = document.advice
    assert advice.classes == ("[mixture] a", "[mixture] b")


def test_horizons_that_share_a_reason_are_named_once() -> None:
    """What cannot be named on both horizons of a region is told by the region."""
    few = report(compositions=compositions(60.0, waits=not_estimable))
    (section,) = document_of(analyses.analysis(few)).classes
    assert section.tables[1].remarks[0] == (
        "? all: not estimable: needs at least 200 ok requests of the class"
    )

    def only_ttft(horizon, region):
        return not_estimable(horizon, region) if horizon is Horizon.TTFT else dominant_wait(horizon, region)

    (section,) = document_of(
        analyses.analysis(report(compositions=compositions(1.0, waits=only_ttft)))
    ).classes
    assert section.tables[1].remarks[0].startswith("? TTFT, all: not estimable")


def test_keys_of_json_in_the_documentation_exist() -> None:
    """The page names keys of a class that are in the schema, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    table = page[page.index("| key of a class |") :].splitlines()[2:]
    named = [key for line in table for key in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert len(named) > 8
    assert set(named) <= set(schema()["$defs"]["class"]["properties"])


# --- JSON --------------------------------------------------------------------------------------------


def test_json_is_as_its_schema_says(analysis, mixed) -> None:
    """Reports of all kinds meet the schema, and survive being text."""
    validator = jsonschema.Draft202012Validator(schema())
    for result in (analysis, mixed, everything(), analyses.analysis()):
        document = json.loads(render_json(result))
        validator.validate(document)
        assert document == to_dict(result)


def test_json_holds_the_figures(analysis) -> None:
    """Milliseconds and shares of the fixture, under the documented keys."""
    document = to_dict(analysis)
    image = document["classes"][1]
    assert (document["requests"], document["warm_up"], document["schema_version"]) == (400, 8, "1.0")
    assert (image["class"], image["phase"], image["outcomes"]) == ("image/short", None, {"ok": 200})
    ttft = image["ttft_ms"]
    assert (ttft["p50"], ttft["p95"], ttft["p99"], ttft["n"], ttft["not_reached"]) == (
        100.0,
        100.0,
        None,
        200,
        0,
    )
    assert ttft["interval"] == {"p50": [100.0, 100.0], "p95": [100.0, 100.0], "p99": None}
    assert set(ttft["reason"]) == {"p99"}
    assert (ttft["ecdf"]["p"][-1], ttft["ecdf"]["ms"][-1]) == (1.0, 100.0)
    assert image["dominant_wait"] == {
        "stages": ["prefill.wait"],
        "share": pytest.approx(0.4),
        "share_interval": [pytest.approx(0.4), pytest.approx(0.4)],
        "reasons": {"prefill.wait": {"step": pytest.approx(0.75), "encoder_budget": pytest.approx(0.25)}},
    }
    assert image["dominant_wait_reason"] is None
    assert [(wait["horizon"], wait["region"]) for wait in image["dominant_waits"]] == [
        (horizon.value, region.value) for horizon in Horizon for region in Region
    ]
    stage = next(s for s in image["stages"] if (s["stage"], s["horizon"]) == ("prefill.wait", "ttft"))
    assert (stage["kind"], stage["share"], stage["mean_ms"]) == (
        "wait",
        pytest.approx(0.4),
        pytest.approx(40.0),
    )
    assert stage["p50_ms"] == pytest.approx(40.0, rel=0.005)


def test_json_tells_what_the_data_were_made_from(analysis) -> None:
    """Everything that was counted while reading is in the document as it is."""
    assert to_dict(analysis)["ingest"] == {
        "about": [],
        "records": 5000,
        "requests": 408,
        "set_aside": {"torn record": 3},
        "dropped": 2,
        "faults": 1,
        "not_sampled": 3600,
        "removed": {"segments": 12, "bytes": 50_000_000},
        "stopped": ["api 7 switched off from 2026-01-01T00:00:00Z to 2026-01-01T00:01:00Z"],
        "own_cost": [{"process": "engine 8 0a1b", "us_per_step": 9.25, "share": 0.0021}],
        "hooks_off": {"vllm.engine:step": 1},
        "checks": [
            {"name": "in = out", "expected": 8.0, "found": 8.0, "holds": True},
            {"name": "queue", "expected": 100.0, "found": 90.0, "holds": False},
        ],
    }


def test_an_upper_bound_at_the_failed_requests_is_null() -> None:
    """The interval keeps its lower bound, and the reason says why there is no upper one."""
    missing = quantile(
        80.0, 70.0, None, n_eff=50.0, reason="upper bound not reached: too many never got there"
    )
    slow = analyses.latency(40.0, failed=40)
    quantiles = analyses.Quantiles(4000, 3960, slow.quantiles.p50, missing, slow.quantiles.p99)
    latency = analyses.Latency(quantiles, None, [], [])
    found = to_dict(analyses.analysis(report(ttft=latency)))["classes"][0]["ttft_ms"]
    assert (found["p95"], found["interval"]["p95"]) == (80.0, [70.0, None])
    assert found["reason"]["p95"] == "upper bound not reached: too many never got there"


def test_instants_are_told_in_utc() -> None:
    """Windows say when they begin and end; nanoseconds would not fit into the numbers of JSON."""
    window = to_dict(everything())["classes"][0]["windows"][0]
    assert (window["begin"], window["end"]) == ("2026-11-30T07:00:00.000000Z", "2026-11-30T07:00:10.000000Z")


def test_every_null_has_a_reason(mixed) -> None:
    """A figure that is null has its reason beside it, in all kinds of reports."""
    for result in (mixed, everything()):
        for found in to_dict(result)["classes"]:
            for latency in (found["ttft_ms"], found["completion_ms"], found["waiting_ms"]):
                for quantiles in filter(None, (latency, latency["survivors"])):
                    missing = {name for name in ("p50", "p95", "p99") if quantiles[name] is None}
                    assert missing <= set(quantiles["reason"] or {})
                    assert missing == {
                        name for name, bounds in quantiles["interval"].items() if bounds is None
                    }
                    unknown = {name for name, n_eff in quantiles["n_eff"].items() if n_eff is None}
                    assert unknown <= missing or "n_eff" in quantiles["reason"]
            for stage in found["stages"]:
                missing = {name for name in ("p50", "p95") if stage[f"{name}_ms"] is None}
                missing |= {"share_interval"} if stage["share_interval"] is None else set()
                assert set(stage["reason"] or {}) == missing
            for dominant in [*found["dominant_waits"], *found["dominant_stages"]]:
                assert (
                    bool(dominant["stages"])
                    == (dominant["reason"] is None)
                    == (dominant["share"] is not None)
                )
            assert (found["dominant_wait"] is None) == isinstance(found["dominant_wait_reason"], str)
            for answer in found["answers"]:
                assert (answer["answer"] == "cannot tell") == isinstance(answer["reason"], str)
            for window in found["windows"]:
                missing = {name for name in ("ttft_p50_ms", "completion_p50_ms") if window[name] is None}
                assert set(window["reason"] or {}) == missing
            for horizon in ("ttft", "completion"):
                assert (found["unattributed_share"][horizon] is None) == (
                    horizon in (found["unattributed_share"]["reason"] or {})
                )


def test_a_share_without_blocks_says_so() -> None:
    """A share that has no interval gives the reason."""
    time = analyses.StageTime(
        Horizon.TTFT,
        "prefill",
        analyses.Stage.PREFILL.kind,
        Share(0.5),
        5.0 * MS,
        quantile(5.0),
        quantile(9.0),
    )
    (stage,) = to_dict(analyses.analysis(report(stages=(time,))))["classes"][0]["stages"]
    assert (stage["share_interval"], stage["reason"]) == (None, {"share_interval": NO_INTERVAL})


def _properties(part: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(part, dict):
        yield from part.get("properties", {}).items()
        for value in part.values():
            yield from _properties(value)
    elif isinstance(part, list):
        for value in part:
            yield from _properties(value)


def _objects(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        if "object" in (part.get("type") or ()):
            yield part
        for value in part.values():
            yield from _objects(value)
    elif isinstance(part, list):
        for value in part:
            yield from _objects(value)


def test_the_schema_describes_every_property() -> None:
    """Each property has a description, and a time names its unit; unknown and missing keys are refused."""
    jsonschema.Draft202012Validator.check_schema(schema())
    properties = list(_properties(schema()))
    assert len(properties) > 100
    for name, definition in properties:
        described = (
            schema()["$defs"][definition["$ref"].split("/")[-1]] if "$ref" in definition else definition
        )
        assert "description" in definition or "description" in described, name
        if name.endswith("_ms") and "reason" not in name and "Why" not in definition["description"]:
            assert "ms" in definition["description"], name
    for part in _objects(schema()):
        assert "additionalProperties" in part
        if "required" in part:
            assert part["additionalProperties"] is False
            assert part["required"] == list(part["properties"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": "1.0"}, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(to_dict(analyses.analysis()) | {"colour": "red"}, schema())
