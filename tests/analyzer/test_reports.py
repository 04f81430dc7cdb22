from __future__ import annotations

import importlib.resources
import io
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.reports.json_report import render_json, to_dict
from stagetrace_analyzer.reports.text import answer, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TWO_CLASSES = """\
400 requests, 8 of warm-up left out

text/short   Nobody waits materially: the time is work.
image/short  Requests mostly wait in prefill.wait (40 % of TTFT), because a step
             was running (75 %).

text/short: 200 requests (200 ok)
all requests             p50 ms   p95 ms   p99 ms
  TTFT                     60.0     60.0        -
  completion              155.0    155.0        -
  waiting within TTFT       0.0      0.0        -
  p99: not estimable: needs at least 299 requests
ok requests (*: wait)    TTFT %   p50 ms   p95 ms compl. %   p50 ms   p95 ms
  receive                  16.7     10.0     10.0      6.5     10.0     10.0
  prefill                  75.0     45.0     45.0     29.0     45.0     45.0
  decode                                              61.3     95.0     95.0
  respond                   8.3      5.0      5.0      3.2      5.0      5.0

image/short: 200 requests (200 ok)
all requests             p50 ms   p95 ms   p99 ms
  TTFT                    100.0    100.0        -
  completion              195.0    195.0        -
  waiting within TTFT      40.0     40.0        -
  p99: not estimable: needs at least 299 requests
ok requests (*: wait)    TTFT %   p50 ms   p95 ms compl. %   p50 ms   p95 ms
  receive                  10.0     10.0     10.0      5.1     10.0     10.0
* prefill.wait             40.0     40.0     40.0     20.5     40.0     40.0
  prefill                  45.0     45.0     45.0     23.1     45.0     45.0
  decode                                              48.7     95.0     95.0
  respond                   5.0      5.0      5.0      2.6      5.0      5.0

Data quality
  unattributed  at most 0.0 % of TTFT, 0.0 % of completion
  joined        400 api+engine+worker
  records       5,000 read, 2 dropped, 1 faults
  set aside     3 torn record
  not sampled   3,600 requests
  removed       12 old segments (50.0 MB) to make room
  stopped       api 7 switched off from 2026-01-01T00:00:00Z to
                2026-01-01T00:01:00Z
  own cost      9.2 us a step, 0.2 % of engine 8's time with steps
  reconciled    NOT: queue: 100 against 90
  hooks off     1 vllm.engine:step
"""


def schema() -> dict[str, Any]:
    file = importlib.resources.files("stagetrace_analyzer") / "schemas/analyze.schema.json"
    return json.loads(file.read_text(encoding="utf-8"))


def text_of(analysis) -> str:
    file = io.StringIO()
    write_text(analysis, file)
    return file.getvalue()


@pytest.fixture
def analysis(two_classes, tmp_path: Path):
    return analyze([two_classes.write(tmp_path / "data")], load_rules())


@pytest.fixture
def poor(rows, tmp_path: Path):
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
    rows.media.append({"request_id": "request-61", "item": 0})
    return analyze([rows.write(tmp_path / "poor")], load_rules(), by_phase=True)


def test_text_report(analysis) -> None:
    """The whole report: answers first, then each class's table, then data quality."""
    assert text_of(analysis) == TWO_CLASSES


def test_a_piped_report_is_plain_and_narrow(poor, monkeypatch: pytest.MonkeyPatch) -> None:
    """No control character, no padding, at most 80 columns, whatever the environment and the data say."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    lines = text_of(poor).splitlines()
    assert all(line.isascii() and (line.isprintable() or not line) for line in lines)
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


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


def test_text_says_what_is_poor(poor) -> None:
    """Failures, unknown classes, mismatches and a large unattributed share are said in words."""
    text = text_of(poor)
    assert text.startswith("62 requests, 1 match no class rule\n")
    assert "(54 ok, 6 error)" in text
    assert "  p95: not reached (10.0 % failed)\n" in text
    assert "  p50: not estimable: needs at least 5 requests\n" in text
    assert "<0.1" in text
    assert "2 horizons whose stages do not add up; left out of shares" in text
    assert "at most 20.0 % of TTFT ([evil?[2J] text/short; should be under 2 %)" in " ".join(text.split())
    assert "set aside     nothing" in text


def test_text_names_the_quantiles_without_a_value(rows, tmp_path: Path) -> None:
    """A reason that is not that of all three latencies says whose it is."""
    for number in range(60):
        rows.request(("both", "receive", 1.0), **({"completion_ns": None} if number < 45 else {}))
    lines = text_of(analyze([rows.write(tmp_path)], load_rules())).splitlines()
    assert "  p50 of completion: not reached (75.0 % failed)" in lines
    assert "  p99: not estimable: needs at least 299 requests" in lines


def test_answers_in_words(poor) -> None:
    """A wait after the first token is named beside the one before it; unknown reasons are quoted."""
    by_class = {report.traffic_class: answer(report) for report in poor.classes}
    assert by_class == {
        "text/short": "Requests mostly wait in media_decode.wait (80 % of TTFT). Until completion they "
        "mostly wait in decode.wait (80 % of completion), because a?[31m[red]new[/red] (100 %).",
        "other": "Not estimable: needs at least 20 ok requests.",
        "image/short": "Not estimable: needs at least 20 ok requests.",
    }


def test_json_is_as_its_schema_says(analysis, poor) -> None:
    """Real reports, rich and poor ones, meet the schema, and survive being text."""
    validator = jsonschema.Draft202012Validator(schema())
    for result in (analysis, poor):
        document = json.loads(render_json(result))
        validator.validate(document)
        assert document == to_dict(result)


def test_json_holds_the_figures(analysis) -> None:
    """Milliseconds and shares of the fixture, under the documented keys."""
    document = to_dict(analysis)
    image = document["classes"][1]
    assert (document["requests"], document["warm_up"], document["schema_version"]) == (400, 8, "1.0")
    assert (image["class"], image["phase"], image["outcomes"]) == ("image/short", None, {"ok": 200})
    assert image["ttft_ms"] == {
        "p50": 100.0,
        "p95": 100.0,
        "p99": None,
        "reason": {"p99": "not estimable: needs at least 299 requests"},
        "n": 200,
        "not_reached": 0,
    }
    assert image["dominant_wait"] == {
        "stage": "prefill.wait",
        "share": 0.4,
        "reasons": {"step": 0.75, "encoder_budget": 0.25},
    }
    assert image["dominant_wait_reason"] is None
    assert image["stages"][1] == {
        "stage": "prefill.wait",
        "kind": "wait",
        "horizon": "ttft",
        "share": 0.4,
        "mean_ms": 40.0,
        "p50_ms": 40.0,
        "p95_ms": 40.0,
        "reason": None,
    }
    assert image["unattributed_share"] == {"ttft": 0.0, "completion": 0.0}
    assert document["ingest"] == {
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


def test_every_null_has_a_reason(poor) -> None:
    """A quantile, a stage time or a dominant wait that is null says why."""
    for report in to_dict(poor)["classes"]:
        for metric in ("ttft_ms", "completion_ms", "waiting_ms"):
            quantiles = report[metric]
            missing = {name for name in ("p50", "p95", "p99") if quantiles[name] is None}
            assert set(quantiles["reason"] or {}) == missing
        for stage in report["stages"]:
            missing = {name for name in ("p50", "p95") if stage[f"{name}_ms"] is None}
            assert set(stage["reason"] or {}) == missing
        assert (report["dominant_wait"] is None) == isinstance(report["dominant_wait_reason"], str)
        for wait in report["dominant_waits"]:
            assert (wait["stage"] is None) == isinstance(wait["reason"], str)


def _properties(part: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(part, dict):
        yield from part.get("properties", {}).items()
        for value in part.values():
            yield from _properties(value)
    elif isinstance(part, list):
        for value in part:
            yield from _properties(value)


def test_the_schema_describes_every_property() -> None:
    """Each property has a description, and a time names its unit; unknown keys are refused."""
    jsonschema.Draft202012Validator.check_schema(schema())
    properties = list(_properties(schema()))
    assert len(properties) > 50
    for name, definition in properties:
        described = (
            schema()["$defs"][definition["$ref"].split("/")[-1]] if "$ref" in definition else definition
        )
        assert "description" in definition or "description" in described, name
        if name.endswith("_ms"):
            assert "ms." in definition["description"], name
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema_version": "1.0"}, schema())
