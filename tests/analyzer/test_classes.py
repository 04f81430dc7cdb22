from __future__ import annotations

import operator
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.errors import UsageError
from stagetrace.timeline import Item, RequestTimeline
from stagetrace_analyzer.classes import (
    Bounds,
    ClassRule,
    ClassRules,
    OneOf,
    class_facts,
    load_rules,
    parse_rules,
)

DUCKDB = duckdb.connect()
FACTS = {
    "modality": "VARCHAR",
    "media_items": "BIGINT",
    "pixels": "BIGINT",
    "media_bytes": "BIGINT",
    "prompt_tokens": "BIGINT",
    "max_tokens": "BIGINT",
    "label": "VARCHAR",
    "phase": "VARCHAR",
    "model": "VARCHAR",
    "arm": "VARCHAR",
    "stream": "BOOLEAN",
}


def classified(rules: ClassRules, **facts: object) -> str:
    """Return the class of a request with these facts, in SQL and in Python; the others are unknown."""
    expression, parameters = rules.case_expression()
    columns = ", ".join(f"${name}::{kind} AS {name}" for name, kind in FACTS.items())
    values = {name: facts.get(name) for name in FACTS}
    sql = f"SELECT {expression} FROM (SELECT {columns})"
    found = DUCKDB.execute(sql, {**parameters, **values}).fetchall()
    assert rules.class_of(facts) == found[0][0]
    return found[0][0]


def rules_where(where: str) -> ClassRules:
    return parse_rules(f'[[class]]\nname = "hit"\nwhere = {{ {where} }}', source="test")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"modality": "text", "max_tokens": 256}, "text/short"),
        ({"modality": "text", "max_tokens": 257}, "text/long"),
        ({"modality": "text"}, "text/unknown-length"),
        ({"modality": "image", "max_tokens": 1}, "image/short"),
        ({"modality": "image", "max_tokens": 5000}, "image/long"),
        ({"modality": "image"}, "image/unknown-length"),
        ({"max_tokens": 1}, "other"),
    ],
)
def test_default_classes(facts: dict[str, object], expected: str) -> None:
    """Over 256 max_tokens is long; an unknown length is its own class; unknown modality is other."""
    assert classified(load_rules(), **facts) == expected


def test_names_are_in_the_order_of_the_rules() -> None:
    """Reports sort by this order; other comes last."""
    assert load_rules().names == (
        "text/short",
        "text/long",
        "text/unknown-length",
        "image/short",
        "image/long",
        "image/unknown-length",
        "other",
    )


@pytest.mark.parametrize(
    ("condition", "holds", "fails"),
    [
        ('pixels = "<=64"', [0, 64], [65, None]),
        ('pixels = "<64"', [63], [64, None]),
        ('pixels = ">=64"', [64, 65], [63, None]),
        ('pixels = ">64"', [65], [64, None]),
        ('pixels = "=64"', [64], [63, 65, None]),
        ("pixels = 64", [64], [63, 65, None]),
        ('pixels = " 1..1_000 "', [1, 1000], [0, 1001, None]),
        ('label = "a"', ["a"], ["A", "ab", "", None]),
        ('label = ["a", "b\'"]', ["a", "b'"], ["c", None]),
        ("stream = true", [True], [False, None]),
        ("stream = false", [False], [True, None]),
    ],
)
def test_conditions(condition: str, holds: list[object], fails: list[object]) -> None:
    """Bounds are as written, both ends of a range count, and an unknown fact meets nothing."""
    rules = rules_where(condition)
    field = condition.partition(" = ")[0]
    assert [classified(rules, **{field: value}) for value in holds] == ["hit"] * len(holds)
    assert [classified(rules, **{field: value}) for value in fails] == ["other"] * len(fails)


def bounds(field: str) -> st.SearchStrategy[Bounds]:
    """Conditions of a number: one or two bounds."""
    signs = st.sampled_from(["<", "<=", ">", ">=", "="])
    return st.lists(st.tuples(signs, NUMBERS), min_size=1, max_size=2).map(lambda b: Bounds(field, tuple(b)))


def one_of(field: str) -> st.SearchStrategy[OneOf]:
    """Conditions of a text or a flag."""
    return st.lists(VALUES[FACTS[field]], min_size=1, max_size=3).map(lambda v: OneOf(field, tuple(v)))


NUMBERS = st.integers(0, 3) | st.integers(0, 2**63 - 1)
VALUES = {
    "BIGINT": NUMBERS,
    "VARCHAR": st.sampled_from(["text", "image"]) | st.text(max_size=2),
    "BOOLEAN": st.booleans(),
}
CONDITIONS = st.sampled_from(sorted(FACTS)).flatmap(
    lambda field: bounds(field) if FACTS[field] == "BIGINT" else one_of(field)
)
RULES = st.lists(
    st.builds(ClassRule, st.text(min_size=1, max_size=2), st.lists(CONDITIONS, max_size=3).map(tuple)),
    min_size=1,
    max_size=4,
).map(lambda rules: ClassRules(tuple(rules)))


@settings(deadline=None)
@given(
    RULES,
    st.fixed_dictionaries({}, optional={name: st.none() | VALUES[kind] for name, kind in FACTS.items()}),
)
def test_python_and_sql_agree(rules: ClassRules, facts: dict[str, object]) -> None:
    """The same rules give a request the same class in a live process and in the analysis, unknown facts included."""
    assert classified(rules, **facts) in rules.names


@settings(deadline=None)
@given(st.sampled_from(["<", "<=", ">", ">=", "="]), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_bounds_compare_like_numbers(sign: str, bound: int, value: int) -> None:
    """Any 63-bit bound compares exactly."""
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
    found = classified(rules_where(f'pixels = "{sign}{bound}"'), pixels=value)
    assert (found == "hit") == compare[sign](value, bound)


def test_the_first_rule_wins_and_all_conditions_must_hold() -> None:
    """Order decides; a name may come twice; an empty where takes the rest."""
    rules = parse_rules(
        """
        [[class]]
        name = "big"
        where = { modality = "image", pixels = ">100" }
        [[class]]
        name = "streamed"
        where = { stream = true }
        [[class]]
        name = "big"
        where = { media_bytes = ">100" }
        [[class]]
        name = "rest"
        where = {}
        """,
        source="test",
    )
    assert rules.names == ("big", "streamed", "rest", "other")
    assert classified(rules, modality="image", pixels=101, stream=True) == "big"
    assert classified(rules, modality="text", pixels=101, stream=True) == "streamed"
    assert classified(rules, media_bytes=101) == "big"
    assert classified(rules) == "rest"


def test_no_value_of_the_file_is_in_the_sql() -> None:
    """Names, texts and numbers are parameters, so that quotes in them do no harm."""
    evil = "'; DROP TABLE requests; --"
    rules = parse_rules(
        f'[[class]]\nname = "{evil}"\nwhere = {{ label = "{evil}", pixels = 4711 }}', source="test"
    )
    expression, parameters = rules.case_expression()
    assert "DROP" not in expression
    assert "4711" not in expression
    assert sorted(map(str, parameters.values())) == sorted([evil, evil, "4711", "other"])
    assert classified(rules, label=evil, pixels=4711) == evil


def _entry(where: str) -> str:
    return f'[[class]]\nname = "ok"\nwhere = {{}}\n[[class]]\nname = "a"\nwhere = {where}\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[[class]\n", r"line 1", "TOML"),
        ("", "no class is defined", "[[class]]"),
        ('class = "a"', "no class is defined", "[[class]]"),
        ("class = [1]", "class 1 is no table", "[[class]]"),
        ("[[class]]\nwhere = {}", "class 1 has no name", "name"),
        ('[[class]]\nname = " "\nwhere = {}', "class 1 has no name", "name"),
        ('[[class]]\nname = "other"\nwhere = {}', "reserved", "no rule"),
        ('[[class]]\nname = "a"', r"class 1 \('a'\) has no conditions", "where"),
        ('[[class]]\nname = "a"\nmax_tokens = 1\nwhere = {}', "unknown key 'max_tokens'", "where"),
        ('[[klass]]\nname = "a"', "unknown key 'klass'", "[[class]]"),
        (_entry('{ modalty = "text" }'), r"class 2 \('a'\): unknown field 'modalty'", "'modality'"),
        (_entry('{ zzz = "text" }'), "unknown field 'zzz'", "fields are modality"),
        (_entry('{ modality = "video" }'), "unknown modality 'video'", "text or image"),
        (_entry('{ modality = ["text", "video"] }'), "unknown modality", "text or image"),
        (_entry('{ max_tokens = "<= many" }'), "max_tokens = '<= many'", "64..128"),
        (_entry('{ max_tokens = "9..1" }'), "max_tokens = '9..1'", "64..128"),
        (_entry('{ max_tokens = "-1..1" }'), "max_tokens = '-1..1'", "64..128"),
        (_entry('{ max_tokens = "<=٣" }'), "max_tokens", "64..128"),
        (_entry("{ max_tokens = -1 }"), "max_tokens = -1", "64..128"),
        (_entry("{ max_tokens = 9223372036854775808 }"), "max_tokens = 9223372036854775808", "64..128"),
        (_entry("{ max_tokens = true }"), "max_tokens = True", "64..128"),
        (_entry("{ max_tokens = 1.5 }"), "max_tokens = 1.5", "64..128"),
        (_entry("{ label = 1 }"), "label = 1", "list of texts"),
        (_entry("{ label = [] }"), r"label = \[\]", "list of texts"),
        (_entry('{ stream = "true" }'), "stream = 'true'", "true or false"),
    ],
)
def test_a_wrong_file_says_where_and_what_to_do(text: str, message: str, hint: str) -> None:
    """An error names the file, the line or the entry, and has a hint."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_rules(text, source="my.toml")
    assert caught.value.message.startswith("my.toml: ")
    assert hint in (caught.value.hint or "")


def test_rules_are_read_from_a_file(tmp_path: Path) -> None:
    """The file's path is in its errors; text that is no UTF-8 and a missing file are usage errors."""
    path = tmp_path / "classes.toml"
    path.write_text('[[class]]\nname = "all"\nwhere = {}')
    assert load_rules(path).names == ("all", "other")
    path.write_text("[[class]")
    with pytest.raises(UsageError, match=r"classes\.toml: .*line 1"):
        load_rules(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_rules(path)
    with pytest.raises(UsageError, match=r"cannot read .*missing"):
        load_rules(tmp_path / "missing")


def test_fields_of_a_request() -> None:
    """Sizes are summed over the items, and unknown when that of one of them is; no items is no size."""
    request = RequestTimeline("request", "api", received=0)
    assert set(class_facts(request)) == set(FACTS)
    assert set(class_facts(request).values()) == {None}
    request.facts = {"media_items": 0, "max_tokens": 16, "stream": False, "label": "chat"}
    assert {name: fact for name, fact in class_facts(request).items() if fact is not None} == {
        "modality": "text",
        "media_items": 0,
        "max_tokens": 16,
        "stream": False,
        "label": "chat",
    }
    del request.facts["media_items"]
    request.items = {n: Item(n, 0, facts={"bytes": 10, "width": 3, "height": 2}) for n in range(2)}
    facts = class_facts(request)
    assert (facts["modality"], facts["media_items"], facts["media_bytes"], facts["pixels"]) == (
        "image",
        2,
        20,
        12,
    )
    del request.items[1].facts["height"], request.items[0].facts["bytes"]
    facts = class_facts(request)
    assert (facts["media_items"], facts["media_bytes"], facts["pixels"]) == (2, None, None)
