"""A selection given to the command holds for all that is shown, and pages choose within it."""

from __future__ import annotations

import contextlib
import csv
import io
import json

import pytest
from dash._utils import to_json
from dashboarding import BEGIN_UNIX_NS, MS, RECORDED, client_of, request_row, write

from stagetrace.cli import main
from stagetrace_analyzer.commands import analyze as command
from stagetrace_analyzer.commands.options import CommandParser, add_data_options, read_data_options
from stagetrace_dashboard import shell
from stagetrace_dashboard.limits import Limits
from stagetrace_dashboard.scope import Scope
from stagetrace_dashboard.source import Source


@contextlib.contextmanager
def limited(*arguments):
    """A source as the command makes it of paths and options."""
    parser = CommandParser()
    add_data_options(parser)
    wanted = read_data_options(parser.parse_args([*map(str, arguments)]))
    scope = Scope(wanted.selection, wanted.by_phase)
    with contextlib.closing(Source(wanted.paths, wanted.rules, Limits(), scope)) as source:
        yield source


def analyzed(folder, *arguments):
    """What ``stagetrace analyze --json`` says."""
    report = folder / "report.json"
    assert command.main([*map(str, arguments), "--json", "--force", "-o", str(report)]) == 0
    return json.loads(report.read_text())


@pytest.mark.parametrize(
    ("arguments", "search"),
    [
        (["--since", "60s"], "?by_phase=0"),
        (["--since", "2m", "--until", "30s", "--by-phase"], ""),
        (["--class", "image/short", "--where", "max_tokens<=16"], "?by_phase=0"),
        (["--where", "pixels>=1000", "--where", "outcome=ok"], "?by_phase=0"),
    ],
)
def test_all_is_what_the_command_says_with_the_same_options(tmp_path, arguments, search):
    """The overview is the command's report, and the list has the requests that it is of, warm-up included."""
    with limited(RECORDED, *arguments) as source:
        client = client_of(source)
        found = client.get(f"/api/overview{search}").json
        listed = client.get("/api/requests").json["found"]
        counted = [c.requests for c in source.data.choices() if c.field == "outcome"]
        status = client.get("/api/status").json
    assert found == analyzed(tmp_path, RECORDED, *arguments)
    left_out = sum(warm_up["requests"] for warm_up in found["warm_ups"])
    assert listed == sum(counted) == found["requests"] + left_out < status["span"]["requests"]
    assert status["selection"] == found["selection"]


ROWS = [
    request_row(n, model=f"m{n % 2}", arm=f"a{n % 3}", media_items=n % 2, instance="server", output_tokens=n)
    for n in range(12)
]


@pytest.fixture
def folder(tmp_path):
    """Twelve requests of two models and three arms, 100 ms apart."""
    return write(tmp_path / "data", requests=ROWS)


@pytest.mark.parametrize(
    ("arguments", "search", "numbers"),
    [
        (["--model", "m0", "--model", "m1"], "model=m1", range(1, 12, 2)),
        (["--model", "m0"], "model=m1", ()),
        (["--model", "m0"], "arm=a0", (0, 6)),
        (["--since", "1s"], f"until={BEGIN_UNIX_NS + 500 * MS}", range(1, 5)),
        (["--since", "1s"], f"since={BEGIN_UNIX_NS}", range(1, 12)),
        (["--since", "1s"], f"since={BEGIN_UNIX_NS + 900 * MS}", (9, 10, 11)),
        (["--until", "1s"], f"until={BEGIN_UNIX_NS + 900 * MS}", (0,)),
        (["--where", "output_tokens>=6"], "class=text/short", (6, 8, 10)),
        (["--class", "image/short"], "class=text/short", ()),
    ],
)
def test_a_view_is_within_it(folder, arguments, search, numbers):
    """What an address chooses is limited further, never widened; lists and figures agree."""
    with limited(folder, *arguments) as source:
        client = client_of(source)
        file = client.get(f"/api/requests/list.csv?{search}").text
        found = client.get(f"/api/overview?{search}").json
    assert [int(row["request"]) for row in csv.DictReader(io.StringIO(file))] == [*numbers]
    assert sum(report["requests"] for report in found["classes"]) == len(numbers)


def test_a_time_beside_it_has_nothing(folder):
    """A link to a time that the dashboard is not about is refused with a hint, not answered with other requests."""
    with limited(folder, "--since", "1s") as source:
        answer = client_of(source).get(f"/api/overview?until={BEGIN_UNIX_NS + MS}")
    assert answer.status_code == 400
    assert "is not before" in answer.json["error"]


@pytest.mark.parametrize("classes", [["image/short"], ["image/short", "text/short"]])
def test_a_class_taken_apart_is_whole(classes):
    """The ranges of a selected class have its requests, with the same warm-up left out."""
    options = [word for name in classes for word in ("--class", name)]
    with limited(RECORDED, *options) as source:
        found = client_of(source).get("/api/class?class=image/short&by_phase=0&split=pixels").json
    assert sum(part["requests"] for part in found["split"].values()) == found["class"]["requests"]


def test_others_in_a_step_are_all_there(tmp_path):
    """Who shared a request's steps is told whatever was selected: they were there."""
    engine = {
        "engine": "e",
        "requests": 2,
        "tokens": 2,
        "decodes": 2,
        "encoder_items": 0,
        "running": 2,
        "waiting": 0,
    }
    times = {
        "scheduled_unix_ns": BEGIN_UNIX_NS,
        "begin_unix_ns": BEGIN_UNIX_NS,
        "end_unix_ns": BEGIN_UNIX_NS + 9,
    }
    write(
        tmp_path,
        requests=ROWS[:2],
        steps=[engine | times | {"step": 1}],
        occupancy=[
            {"request": n, "engine": "e", "first_step": 1, "last_step": 1, "tokens": 1} for n in range(2)
        ],
    )
    with limited(tmp_path, "--model", "m0") as source:
        client = client_of(source)
        (story,) = client.get("/api/requests?requests=0-0").json["requests"]
        assert client.get("/api/requests").json["found"] == 1
    assert [mate["request"] for mate in story["mates"]] == [1]


def test_steps_are_those_of_its_time():
    """The engine's steps are limited to the time of the selection, and so is a wider view's."""
    with limited(RECORDED) as source:
        whole = client_of(source).get("/api/engine").json["steps"]
    begin = whole["until_unix_ns"] - 60 * 10**9
    since = f"{begin // 10**9 * 10**9}"
    moment = shell.date_time(int(since)).replace(" UTC", "Z").replace(" ", "T")
    with limited(RECORDED, "--since", moment) as source:
        for search in ("", f"?since={whole['since_unix_ns']}"):
            found = client_of(source).get(f"/api/engine{search}").json["steps"]
            assert found["since_unix_ns"] == int(since)
            assert 0 < found["steps"] < whole["steps"]


def test_every_page_says_it(folder):
    """What the dashboard is limited to stands in the header."""
    with limited(folder, "--where", "output_tokens>=6", "--model", "m0") as source:
        assert json.loads(to_json(shell.about(source.data)))["props"]["children"] == (
            "Limited to model m0, where output_tokens>=6."
        )
    with limited(folder) as source:
        assert "Limited" not in to_json(shell.about(source.data))


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["--where", "pixels"], "--where: ", 2),
        (["--class", "image/shrt"], "no rule makes the class", 2),
        (["--since", "1s", "--until", "1s"], "is not before", 2),
        (["--model", "m7"], "none of 12 requests is selected", 3),
    ],
)
def test_a_selection_that_selects_nothing_is_said(folder, arguments, said, code, capsys):
    """As for ``stagetrace analyze``, a mistake is a line with exit code 2, and nothing selected is 3."""
    assert main(["dashboard", str(folder), "--port", "0", *arguments]) == code
    assert said in capsys.readouterr().err
