from __future__ import annotations

import importlib.resources
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.errors import UsageError
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.selection import Selection, parse_selection

S = 10**9
NEWEST = 1_000_000 * S


@pytest.fixture(scope="module")
def recorded():
    """The run that ships with the package, and when its newest request came."""
    source = importlib.resources.files("stagetrace_analyzer.demo") / "recorded" / "dataset"
    with importlib.resources.as_file(source) as folder, open_dataset([folder]) as connection:
        (newest,) = connection.execute("SELECT max(received_unix_ns) FROM requests").fetchone()
        yield connection, newest


def count(recorded, condition: str = "TRUE", parameters=None) -> int:
    query = f"SELECT count(*) FROM facts WHERE {condition}"
    return recorded[0].execute(query, parameters or {}).fetchone()[0]


def selected(recorded, **given) -> int:
    """How many requests of the recorded run a selection takes."""
    expression, parameters = parse_selection(**given).sql(recorded[1])
    taken = count(recorded, expression, parameters)
    assert taken + count(recorded, f"NOT ({expression})", parameters) == count(recorded) > 0
    return taken


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({}, "TRUE"),
        ({"since": "60s"}, "received_unix_ns >= (SELECT max(received_unix_ns) FROM requests) - 60000000000"),
        ({"until": "1m"}, "received_unix_ns < (SELECT max(received_unix_ns) FROM requests) - 60000000000"),
        ({"since": "1970-01-01"}, "TRUE"),
        ({"until": "9999-12-31T23:59:59-23:00"}, "TRUE"),
        ({"since": "0001-01-01T00:00+23:00"}, "TRUE"),
        ({"since": "999999999d"}, "TRUE"),
        ({"until": "999999999d"}, "FALSE"),
        ({"since": "2999-01-01"}, "FALSE"),
        ({"models": ["tiny"]}, "TRUE"),
        ({"models": ["other", "tiny", "tiny"]}, "TRUE"),
        ({"models": ["other"]}, "FALSE"),
        ({"arms": ["a"]}, "FALSE"),
        ({"instances": ["no such server"]}, "FALSE"),
        ({"where": ["modality=image"]}, "media_items > 0"),
        ({"where": ["label=text", "pixels>=0"]}, "FALSE"),
        ({"where": ["label=image", "media_bytes>=25000"]}, "media_bytes >= 25000"),
        ({"where": ['phase=["warm-up", "mixture"]']}, "phase IN ('warm-up', 'mixture')"),
        ({"where": ["prompt_tokens=1..30"]}, "prompt_tokens BETWEEN 1 AND 30"),
        ({"where": ["output_tokens=16", "stream=true", "outcome=ok"]}, "TRUE"),
        ({"where": ["stream=false"]}, "FALSE"),
        ({"where": ["arm=a"]}, "FALSE"),
        ({"since": "60s", "where": ["modality=text"], "models": ["tiny"]}, "media_items = 0 AND received_unix_ns >= (SELECT max(received_unix_ns) FROM requests) - 60000000000"),
    ],
)  # fmt: skip
def test_selections_of_a_recorded_run(recorded, given: dict, same: str) -> None:
    """Each selection takes the requests that a query of one's own takes, and the others are not selected."""
    assert selected(recorded, **given) == count(recorded, same)


def test_the_server_of_a_recorded_run(recorded) -> None:
    """It is called otherwise in every recording, and served all requests."""
    ((server,),) = recorded[0].execute("SELECT DISTINCT instance FROM requests").fetchall()
    assert selected(recorded, instances=[server]) == count(recorded)


def test_the_cases_above_are_not_all_or_nothing(recorded) -> None:
    """The recorded run has requests on both sides of the selections that split it."""
    for options in (
        {"since": "60s"},
        {"where": ["modality=image"]},
        {"where": ["label=image", "media_bytes>=25000"]},
    ):
        assert 0 < selected(recorded, **options) < count(recorded)


@pytest.mark.parametrize(
    ("text", "unix_s"),
    [
        ("2026-01-31T12:00:00Z", 1769860800),
        ("2026-01-31T12:00:00", 1769860800),
        ("2026-01-31 12:00", 1769860800),
        ("2026-01-31T13:00:00+01:00", 1769860800),
        ("2026-01-31T12:00:00.25+00:00", 1769860800.25),
        ("20260131T120000Z", 1769860800),
        ("2026-01-31", 1769817600),
        ("90s", 1_000_000 - 90),
        ("30m", 1_000_000 - 1800),
        ("2h", 1_000_000 - 7200),
        ("1d", 1_000_000 - 86_400),
        ("0s", 1_000_000),
    ],
)
def test_times(text: str, unix_s: float) -> None:
    """ISO 8601 is UTC without a zone; a span ends at the newest request."""
    selection = parse_selection(since=text)
    assert selection.since is not None
    assert selection.since.unix_ns(NEWEST) == round(unix_s * 10**6) * 1000


@pytest.mark.parametrize(
    "text",
    ["", " ", "yesterday", "30", "30min", "-1h", "1.5h", "1 h", "9999999999s", "12:00", "2026-13-01", "2026-01-31T25:00Z",
     "2026-01-31T10:00\0", "2026-01-31T10:00+25:00", "٣m", "2026-01-31T10:00z", "2026-01-31.5", "2026-01-31T12.5", "2026-01-31T12:00:00.", "2026-01-31T12:00:00.1234567890", "2026-01-31Z", "2026-02-30", "1" * 14, "\udcff", "1" * 9999],
)  # fmt: skip
@pytest.mark.parametrize("option", ["since", "until"])
def test_a_wrong_time_is_one_line_with_a_hint(option: str, text: str) -> None:
    """Whatever is typed, the error names the option, is one line, and shows what to write."""
    with pytest.raises(UsageError, match=f"^--{option}: .* is no time") as caught:
        parse_selection(**{option: text})
    assert "30m" in (caught.value.hint or "")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("since", "until"),
    [("2026-01-02", "2026-01-01"), ("2026-01-01", "2026-01-01"), ("1h", "2h"), ("1h", "60m")],
)
def test_reversed_times_are_told_at_once(since: str, until: str) -> None:
    """Times that leave nothing are an error before any data are read."""
    with pytest.raises(UsageError, match=f"--since {since} is not before --until {until}") as caught:
        parse_selection(since=since, until=until)
    assert "exchange" in (caught.value.hint or "")


def test_a_time_is_exact_to_the_nanosecond() -> None:
    """A time that a log has written with nine digits is taken as it is."""
    selection = parse_selection(since="2026-01-31T13:00:00.123456789+01:00")
    assert selection.since is not None
    assert selection.since.ns == 1769860800123456789


def test_a_time_and_a_span_are_compared_with_the_data() -> None:
    """Which of the two is the later one shows only when the newest request is known."""
    selection = parse_selection(since="1970-01-12", until="1d")
    with pytest.raises(UsageError, match="--since 1970-01-12 is not before --until 1d"):
        selection.sql(NEWEST)
    assert selection.sql(NEWEST + 3 * 86_400 * S)[1]


def test_without_requests_nothing_is_near_the_newest() -> None:
    """A span before the newest request of none takes nothing; a time does not need to know it."""
    assert parse_selection(since="1h").sql(None) == ("FALSE", {})
    expression, parameters = parse_selection(since="1970-01-01T00:00:01Z").sql(None)
    assert expression == "received_unix_ns >= $selection_0"
    assert parameters == {"selection_0": S}


EVIL = [
    "' OR 1=1 --",
    '"; DROP TABLE requests; --',
    "$selection_0",
    "a\0b",
    "{traffic_class}",
    "%s",
    "?",
    "日本\u202e",
]


@pytest.mark.parametrize("evil", EVIL)
def test_values_are_parameters_only(recorded, evil: str) -> None:
    """Whatever a value is, the SQL is the same, and it is compared as it is."""
    given = {"models": [evil], "arms": [evil], "instances": [evil], "where": [f"label='''{evil}'''"]}
    if "\0" in evil:
        given["where"] = [f"label={evil}"]
    expression, parameters = parse_selection(**given).sql(recorded[1])
    harmless = {option: ["label=x" if option == "where" else "x"] for option in given}
    assert expression == parse_selection(**harmless).sql(recorded[1])[0]
    assert set(parameters.values()) == {evil}
    assert count(recorded, expression, parameters) == 0
    columns = ", ".join(f"$evil::VARCHAR AS {name}" for name in ("model", "arm", "instance", "label"))
    query = f"SELECT {expression} FROM (SELECT {columns})"
    assert recorded[0].execute(query, parameters | {"evil": evil}).fetchall() == [(True,)]


def test_names_of_parameters_do_not_clash_with_those_of_classes(recorded) -> None:
    """Both can be in one query."""
    expression, parameters = parse_selection(where=["modality=image"]).sql(recorded[1])
    case, of_classes = load_rules().case_expression()
    assert not set(parameters) & set(of_classes)
    found = recorded[0].execute(
        f"SELECT DISTINCT {case} FROM facts WHERE {expression}", parameters | of_classes
    )
    assert found.fetchall() == [("image/short",)]


ROWS = st.fixed_dictionaries(
    {
        "received_unix_ns": st.integers(0, 20),
        "model": st.none() | st.sampled_from("ab"),
        "label": st.none() | st.sampled_from("ab"),
        "pixels": st.none() | st.integers(0, 3),
    }
)
DUCKDB = duckdb.connect()


@settings(deadline=None)
@given(
    st.lists(ROWS, min_size=1, max_size=5),
    st.none() | st.integers(0, 10),
    st.none() | st.integers(11, 20),
    st.lists(st.sampled_from("ab"), max_size=2),
    st.lists(
        st.sampled_from(["label=a", 'label=["a","b"]', "pixels>=1", "pixels<3", "pixels=1..2"]), max_size=3
    ),
)
def test_each_option_narrows(rows, since, until, models, where) -> None:
    """What is selected meets every option by itself, and the rest fails one of them."""
    as_time = [None if s is None else datetime.fromtimestamp(s, UTC).isoformat() for s in (since, until)]
    selection = parse_selection(since=as_time[0], until=as_time[1], models=models, where=where)
    expression, parameters = selection.sql(None)
    for row in rows:
        known = row | {"received_unix_ns": row["received_unix_ns"] * S}
        columns = "$received_unix_ns::BIGINT AS received_unix_ns, $model::VARCHAR AS model, "
        columns += "$label::VARCHAR AS label, $pixels::BIGINT AS pixels"
        used = known | parameters
        ((found,),) = DUCKDB.execute(f"SELECT {expression} FROM (SELECT {columns})", used).fetchall()
        assert found == (
            (since is None or row["received_unix_ns"] >= since)
            and (until is None or row["received_unix_ns"] < until)
            and (not models or row["model"] in models)
            and all(condition.condition.holds(row) for condition in selection.where)
        )


def test_the_empty_selection_takes_everything() -> None:
    """Without options there is no condition, and nothing to say about it."""
    assert Selection() == parse_selection()
    assert Selection().sql(NEWEST) == ("TRUE", {})
    assert Selection().sql(None) == ("TRUE", {})
    assert Selection().described() == {}
    Selection().check(load_rules())


def test_it_is_described_as_the_user_gave_it() -> None:
    """By option, the values as they were typed."""
    selection = parse_selection(
        since="2026-01-31T13:00+01:00",
        until="0s",
        classes=["image/long", "image/short"],
        models=["m"],
        arms=["a"],
        instances=["i"],
        where=["pixels >= 1_000", "label=x"],
    )
    assert selection.described() == {
        "since": ("2026-01-31T13:00+01:00",),
        "until": ("0s",),
        "class": ("image/long", "image/short"),
        "model": ("m",),
        "arm": ("a",),
        "instance": ("i",),
        "where": ("pixels >= 1_000", "label=x"),
    }
    assert parse_selection(models=["m"]).described() == {"model": ("m",)}


def test_a_class_that_no_rule_makes() -> None:
    """It is an error with the name that was meant, or all of them; other is a class."""
    parse_selection(classes=["image/short", "other"]).check(load_rules())
    with pytest.raises(UsageError, match="no rule makes the class 'image/shrt'") as caught:
        parse_selection(classes=["image/shrt"]).check(load_rules())
    assert caught.value.hint == "did you mean 'image/short'?"
    with pytest.raises(UsageError, match="no rule makes the class 'zzz'") as caught:
        parse_selection(classes=["zzz"]).check(load_rules())
    assert (caught.value.hint or "").startswith("classes are text/short, ")


@pytest.mark.parametrize("option", ["class", "model", "arm", "instance"])
@pytest.mark.parametrize(
    ("name", "message"), [("", "is empty"), (" ", "is empty"), ("\udcff", "is not UTF-8 text")]
)
def test_a_name_that_cannot_be_one(option: str, name: str, message: str) -> None:
    """An empty name, and bytes that are no text, are usage errors."""
    field = "classes" if option == "class" else f"{option}s"
    with pytest.raises(UsageError, match=f"^--{option}.* {message}") as caught:
        parse_selection(**{field: ["ok", name]})
    assert str(caught.value).isprintable()


def test_a_wrong_condition_names_the_option() -> None:
    """The grammar's error, with where it was typed."""
    with pytest.raises(UsageError, match=r"^--where: unknown field 'pixel'") as caught:
        parse_selection(where=["pixels>1", "pixel>1"])
    assert caught.value.hint == "did you mean 'pixels'?"


def test_the_page_says_what_is_so() -> None:
    """Each condition of the documentation's table is understood, and each option of its other table exists."""
    page = (Path(__file__).parents[2] / "docs/selection.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    conditions = [cell for cell in cells if not cell.startswith("--")]
    assert len(parse_selection(where=conditions).where) == len(conditions) == 7
    options = [cell.split()[0].removeprefix("--") for cell in cells if cell.startswith("--")]
    given = parse_selection(
        since="1h", until="0s", classes="c", models="m", arms="a", instances="i", where=conditions
    )
    assert options == list(given.described())
