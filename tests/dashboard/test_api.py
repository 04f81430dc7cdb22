from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest
from dashboarding import HOSTILE, RECORDED, client_of, opened, request_row, write

from stagetrace.errors import DataError
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.commands import analyze as command
from stagetrace_dashboard.pages import PAGES


def rows_of(text):
    """The rows of a file."""
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_overview_is_what_the_command_says(client, tmp_path):
    """Its JSON is that of ``stagetrace analyze --by-phase --json`` on the same data, figure by figure."""
    report = tmp_path / "report.json"
    assert command.main([str(RECORDED), "--by-phase", "--json", "-o", str(report)]) == 0
    assert client.get("/api/overview?by_phase=1").json == json.loads(report.read_text())


def test_a_chosen_time_is_what_the_command_says(client, data, tmp_path):
    """Limited to a time and with the phases together, it is that of ``--since`` and ``--until``."""
    since = (data.span.first_unix_ns + 30 * 10**9) // 1000 * 1000
    until = since + 60 * 10**9
    found = client.get(f"/api/overview?by_phase=0&since={since}&until={until}").json
    report = tmp_path / "report.json"
    times = [found["selection"]["since"][0], found["selection"]["until"][0]]
    arguments = [str(RECORDED), "--since", times[0], "--until", times[1], "--json", "-o", str(report)]
    assert command.main(arguments) == 0
    assert found == json.loads(report.read_text())
    assert 0 < found["requests"] < data.span.requests


def test_one_class_is_the_same_figures(client):
    """Choosing a class leaves its figures as they are among all."""
    whole = client.get("/api/overview").json["classes"]
    chosen = client.get("/api/overview?class=image/short").json["classes"]
    assert chosen == [found for found in whole if found["class"] == "image/short"]
    assert chosen


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_a_twin(client, page):
    """Each page has its JSON, which is valid: no number is NaN or infinite."""
    answer = client.get(f"/api/{page}")
    assert answer.status_code == 200
    json.loads(answer.text, parse_constant=pytest.fail)


@pytest.mark.parametrize("split", ["output", "media", "pixels"])
def test_a_class_taken_apart_is_whole(client, split):
    """The ranges of a fact hold every request of the class of which it is known, and no other."""
    found = client.get(f"/api/class?class=image/short&by_phase=0&split={split}").json
    parts = found["split"].values()
    assert sum(part["requests"] for part in parts) == found["class"]["requests"]


def test_the_list_as_a_file_is_sorted_and_filtered(client, data):
    """The file holds the requests that the page lists, in its order."""
    found = rows_of(client.get("/api/requests/list.csv?class=text/short&sort=ttft_ns&descending=1").text)
    assert len(found) == sum(
        choice.requests
        for choice in data.choices()
        if (choice.field, choice.value) == ("traffic_class", "text/short")
    )
    times = [int(row["ttft_ns"]) for row in found]
    assert times == sorted(times, reverse=True)


def test_files_stop_at_their_limit():
    """No file has more rows than the setting says."""
    with opened(RECORDED, csv_rows=5) as source:
        client = client_of(source)
        assert len(rows_of(client.get("/api/requests/list.csv").text)) == 5
        assert len(rows_of(client.get("/api/engine/steps.csv").text)) == 5


def test_one_request_whole(client, data):
    """A request's JSON has its intervals, which add up to both horizons."""
    (story,) = client.get("/api/requests?requests=0-300").json["requests"]
    facts, stages = story["facts"], story["stages"]
    for horizon in ("ttft", "completion"):
        spent = sum(stage["duration_ns"] for stage in stages if stage["horizon"] in {"both", horizon})
        assert spent == facts[f"{horizon}_ns"]


def test_a_request_that_is_not_there_is_null(client):
    """A number of no request is not an error of the server."""
    assert client.get("/api/requests?requests=0-99999999,7-1").json == {"requests": [None, None]}


def test_status_tells_what_there_is(client, data):
    """The first address to ask names all others, and how old the data are."""
    found = client.get("/api/status").json
    assert found["span"]["requests"] == data.span.requests
    assert found["age_ns"] is not None
    for address in found["addresses"]:
        assert client.get(address).status_code == 200


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/api/nothing", 400),
        ("/api/requests?since=x", 400),
        ("/api/requests/nothing.csv", 400),
        ("/api/requests/list.csv?sort=x", 400),
        ("/api/", 404),
        ("/api/a/b/c", 404),
        ("/api/requests/../../etc/passwd", 404),
    ],
)
def test_what_is_not_there_says_what_is(client, address, status):
    """A wrong address is one line with a hint, as JSON."""
    answer = client.get(address)
    assert answer.status_code == status
    assert answer.json["error"]
    assert answer.json["hint"]


@pytest.mark.parametrize("parameter", ["class", "phase", "model", "arm", "instance", "id", "engine"])
def test_texts_of_an_address_are_only_compared(client, data, parameter):
    """SQL in an address finds nothing, and changes nothing."""
    evil = "x' OR 1=1; DROP TABLE listed; --"
    answer = client.get("/api/requests", query_string={parameter: evil})
    assert answer.status_code == 200
    assert answer.json["found"] == (data.span.requests if parameter == "engine" else 0)
    assert client.get("/api/requests").json["found"] == data.span.requests


def test_spreadsheets_compute_nothing(hostile):
    """A text that a spreadsheet would take for a formula is marked as a text."""
    found = rows_of(client_of(hostile).get("/api/requests/list.csv").text)
    assert [row["request_id"][:3] for row in found] == ["'=r"] * 3
    assert {row["label"] for row in found} == {HOSTILE}


def test_a_question_that_takes_too_long_is_ended():
    """Beyond the time that the setting allows, the answer says so, and the next question is answered."""
    endless = "SELECT count(*) FROM range(1000000000000) AS a WHERE hash(range) = 1"
    with opened(RECORDED) as source:
        data = source.data
        data.limits = dataclasses.replace(data.limits, query_s=0.05)
        with pytest.raises(DataError, match=r"took longer than 0\.05 s"):
            data.ask(lambda connection: connection.execute(endless).fetchall())
        data.limits = dataclasses.replace(data.limits, query_s=60.0)
        assert client_of(source).get("/api/requests").status_code == 200


def test_classes_are_those_of_the_rules(tmp_path):
    """A list has the same classes as an analysis, request by request."""
    folder = write(
        tmp_path,
        requests=[request_row(n, media_items=n % 2, max_tokens=10 if n % 3 else 1000) for n in range(12)],
    )
    with opened(folder) as source:
        analysis = analyze([folder], load_rules())
        found = rows_of(client_of(source).get("/api/requests/list.csv").text)
    counted = {report.traffic_class: report.requests for report in analysis.classes}
    assert counted == {name: sum(row["traffic_class"] == name for row in found) for name in counted}
    assert sum(counted.values()) == 12
