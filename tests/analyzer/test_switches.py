"""What bounds recording is in the next report, as text and as JSON."""

from __future__ import annotations

import importlib.resources
import io
import json
import re
import time

import jsonschema
import pytest

from stagetrace import Recorder
from stagetrace.meter import CostMeter
from stagetrace.recorder import FAULT_LIMIT, OFF_FILE
from stagetrace.records import RECORD_BYTES, RecordKind
from stagetrace.segment import HEADER_BYTES
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.ingest import ingest_spool
from stagetrace_analyzer.reports.json_report import to_dict
from stagetrace_analyzer.reports.text import write_text

SMALL = HEADER_BYTES + 64 * RECORD_BYTES
UTC = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a server that met all of it: as text on one line, and the part of the JSON."""
    spool, dataset = tmp_path_factory.mktemp("run") / "spool", tmp_path_factory.mktemp("data") / "dataset"
    api, engine = Recorder(spool, SMALL, 4 * SMALL), Recorder(spool, SMALL, 4 * SMALL)
    for number in range(300):
        api.record(RecordKind.NOT_SAMPLED, 1000 + number)
        api.record(RecordKind.LOOP_LAG, 0)
    (spool / OFF_FILE).touch()
    api.look(time.monotonic_ns() + 2_000_000_000)
    (spool / OFF_FILE).unlink()
    api.look(time.monotonic_ns() + 4_000_000_000)
    for kind in (RecordKind.RECEIVED, RecordKind.LAST_BYTE, RecordKind.ENDED):
        api.record(kind, 1)
    engine.role = "engine"
    meter = CostMeter(engine)
    for step in range(1, 1101):
        meter.step(step * 10_000_000, 20_000, step)
    for _ in range(FAULT_LIMIT):
        engine.fault()
    ingest_spool(spool, dataset)
    analysis = analyze([dataset], load_rules())
    text = io.StringIO()
    write_text(analysis, text)
    document = to_dict(analysis)
    file = importlib.resources.files("stagetrace_analyzer") / "schemas/analyze.schema.json"
    jsonschema.validate(document, json.loads(file.read_text(encoding="utf-8")))
    return " ".join(text.getvalue().split()), document["ingest"]


def test_what_was_left_out_and_removed(report):
    """Requests that sampling left out are counted, as far as their records are there, and so is what made room."""
    text, ingest = report
    assert 0 < ingest["not_sampled"] <= 300
    assert f"not sampled {ingest['not_sampled']} requests" in text
    segments, size = ingest["removed"]["segments"], ingest["removed"]["bytes"]
    assert size == segments * SMALL > 0
    assert f"removed {segments} old segments ({size / 1e6:.1f} MB) to make room" in text


def test_who_did_not_record_when_and_why(report):
    """A process that was off, and one that stopped itself, are named with their times."""
    text, ingest = report
    off, fuse = ingest["stopped"]
    assert re.fullmatch(rf"api \d+ switched off from {UTC} to {UTC}", off)
    assert re.fullmatch(rf"engine \d+ stopped itself after too many internal faults since {UTC}", fuse)
    assert f"stopped {off}; {fuse}" in text


def test_own_cost(report):
    """The cost of recording is given a step and as a share."""
    text, ingest = report
    (cost,) = ingest["own_cost"]
    assert (cost["us_per_step"], cost["share"]) == (20.0, pytest.approx(0.002, rel=0.1))
    assert re.search(r"own cost 20\.0 us a step, 0\.2 % of engine \d+'s time with steps", text)
