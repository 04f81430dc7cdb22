from __future__ import annotations

import json

import pytest
from dash._utils import to_json
from dashboarding import BEGIN_UNIX_NS, MS, client_of, opened, request_row, write

from stagetrace_analyzer.figures.palette import Theme
from stagetrace_dashboard.pages import quality
from stagetrace_dashboard.view import View


def reading(process, at_s, ahead_ms=0, **facts):
    """A reading of both clocks, after some seconds, the wall clock ahead of what it was at first."""
    row = {"process": process, "role": "api", "host": "node", "clock": "c", "stagetrace_version": "1"}
    at_unix_ns = BEGIN_UNIX_NS + at_s * 1000 * MS + ahead_ms * MS
    return row | {"records": 1234, "at_unix_ns": at_unix_ns, "monotonic_ns": at_s * 1000 * MS} | facts


def sections(data):
    """The texts of each card on the page of data quality, by its title."""

    def texts(node):
        if isinstance(node, str):
            yield node
        for item in node if isinstance(node, list) else ():
            yield from texts(item)
        if isinstance(node, dict):
            for name in ("children", "rows"):
                yield from texts(node.get("props", {}).get(name))

    def parts(node):
        if isinstance(node, dict) and node.get("type") == "Section":
            title, *rest = texts(node)
            yield title, " | ".join(rest)
        elif isinstance(node, dict):
            yield from parts(node.get("props", {}).get("children"))
        for item in node if isinstance(node, list) else ():
            yield from parts(item)

    return dict(parts(json.loads(to_json(quality.layout(View("quality"), data, Theme.LIGHT)))))


def test_every_process_is_listed(tmp_path):
    """A worker, which told no request and no step, stands there with where it ran and what it is."""
    engine = reading("e", 0, role="engine+worker", pid=42, model="tiny", version="0.32.0")
    folder = write(
        tmp_path, requests=[request_row(0)], clocks=[engine, reading("w", 1, role="worker", pid=43)]
    )
    with opened(folder) as source:
        found = sections(source.data)["Processes that reported"]
        told = client_of(source).get("/api/quality").json["processes"]
    assert "engine + worker | e, pid 42 | node | 0.32.0 | 1 | 1,234" in found
    assert "worker | w, pid 43 | node | - | 1 | 1,234 | - | - | - | -" in found
    assert "API server | server | - | - | - | - | 1 requests" in found
    assert [(process["role"], process["pid"]) for process in told] == [
        ("api", None),
        ("engine+worker", 42),
        ("worker", 43),
    ]


def test_a_jump_is_told_with_its_time(tmp_path):
    """How far the wall clock moved, where it jumped, and what that means stand there, and in the JSON."""
    steps = [(0, 0), (60, 0), (120, -7_200_000)]
    folder = write(tmp_path, clocks=[reading("ab"[s % 2], s, ahead) for s, ahead in steps])
    with opened(folder) as source:
        found = sections(source.data)["Clocks"]
        told = client_of(source).get("/api/quality").json
    assert "node | c | 1 | 3 |" in found
    assert "-7,200 s | - | -7,200 s" in found
    (clock,) = told["clocks"]
    assert (clock["moved_ns"], clock["jump_ns"], clock["ppm"]) == (-7200 * 10**9, -7200 * 10**9, None)
    assert clock["jump_before_unix_ns"] == BEGIN_UNIX_NS + (120 - 7200) * 10**9
    assert all(text in found for text in told["clocks_in_words"])
    assert "no skew between them" in found
    assert "The wall clock of node jumped by -7,200 s" in found
    assert "not known" not in found


def test_a_steady_clock_did_not_jump(tmp_path):
    """What two readings differ by for their inaccuracy is shown and is no jump."""
    folder = write(tmp_path, clocks=[reading("a", n * 3600, ahead_ms=10 * n) for n in range(3)])
    with opened(folder) as source:
        found = sections(source.data)["Clocks"]
    assert "+20.0 ms | +2.8 | +10.0 ms" in found
    assert "jumped" not in found


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ([reading("b", 0, clock="d", host="other")], ["There are 2 clocks", "how far those were apart"]),
        ([reading("b", 60, ahead_ms=5)], ["Several datasets"]),
        ([], ["Some datasets"]),
    ],
)
def test_what_is_not_known_of_several_datasets_is_said(tmp_path, second, said):
    """Datasets of several hosts, of one, or of none are compared by what was read, and the rest is said."""
    folders = [
        write(tmp_path / name, requests=[request_row(0)], clocks=clocks)
        for name, clocks in (("one", [reading("a", 0)]), ("two", second))
    ]
    with opened(*folders) as source:
        found = sections(source.data)["Clocks"]
    every = ("There are 2 clocks", "how far those were apart", "Several datasets", "Some datasets")
    assert [text for text in every if text in found] == said


def test_simulated_data_have_no_clock(tmp_path):
    """Without a reading the card says so, and shows no empty table."""
    with opened(write(tmp_path, requests=[request_row(0)])) as source:
        assert sections(source.data)["Clocks"] == "No clock was read: no process recorded these data."
