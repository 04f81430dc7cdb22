from __future__ import annotations

import contextlib

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.errors import UsageError
from stagetrace.stages import Outcome
from stagetrace_analyzer.conditions import (
    CLASS_FIELDS,
    LARGEST,
    SELECTION_FIELDS,
    Bounds,
    FieldType,
    OneOf,
    parse_comparison,
    parse_condition,
)
from stagetrace_analyzer.dataset import REQUESTS

DUCKDB = duckdb.connect()
SQL_TYPES = {FieldType.NUMBER: "BIGINT", FieldType.TEXT: "VARCHAR", FieldType.FLAG: "BOOLEAN"}


def holds(condition, value) -> bool:
    """Whether a condition holds for a value of its field, in SQL and in Python; None is unknown."""
    parameters = {"value": value}

    def bind(bound):
        parameters[f"p{len(parameters)}"] = bound
        return f"$p{len(parameters) - 1}"

    kind = SQL_TYPES[SELECTION_FIELDS[condition.field].type]
    sql = f"SELECT coalesce({condition.sql(bind)}, FALSE) FROM (SELECT $value::{kind} AS {condition.field})"
    ((found,),) = DUCKDB.execute(sql, parameters).fetchall()
    assert condition.holds({condition.field: value}) == found
    return found


@pytest.mark.parametrize(
    ("field", "value", "meets", "fails"),
    [
        ("pixels", "<=64", [0, 64], [65, None]),
        ("pixels", "<64", [63], [64, None]),
        ("pixels", ">=64", [64, 65, LARGEST], [63, None]),
        ("pixels", ">64", [65], [64, None]),
        ("pixels", "=64", [64], [63, 65, None]),
        ("pixels", 64, [64], [63, 65, None]),
        ("pixels", " 1 .. 1_000 ", [1, 1000], [0, 1001, None]),
        ("pixels", "<0", [], [0, None]),
        ("pixels", f">{LARGEST}", [], [0, LARGEST, None]),
        ("label", "a", ["a"], ["A", "ab", "", None]),
        ("label", ["a", "b'"], ["a", "b'"], ["c", None]),
        ("label", "", [""], ["a", None]),
        ("stream", True, [True], [False, None]),
        ("stream", False, [False], [True, None]),
        ("finish_reason", "stop", ["stop"], ["length", None]),
        ("output_tokens", "0..0", [0], [1, None]),
        ("outcome", ["error", "lost"], ["error", "lost"], ["ok"]),
    ],
)
def test_conditions(field: str, value: object, meets: list, fails: list) -> None:
    """Bounds are as written, both ends of a range count, and an unknown fact meets nothing."""
    condition = parse_condition(field, value, SELECTION_FIELDS)
    assert [known for known in [*meets, *fails] if holds(condition, known)] == meets


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("pixels>=1000000", "pixels", ">=1000000"),
        ("pixels >= 1_000_000", "pixels", ">=1000000"),
        ("pixels<5", "pixels", "<5"),
        ("pixels=64", "pixels", 64),
        ("max_tokens=1..64", "max_tokens", "1..64"),
        ("stream=true", "stream", True),
        (" stream = false ", "stream", False),
        ("label=chat", "label", "chat"),
        ("label = two words ", "label", "two words"),
        ("label=a=b", "label", "a=b"),
        ("label=>b", "label", ">b"),
        ('label=["chat", "assistant"]', "label", ["chat", "assistant"]),
        ('label=""', "label", ""),
        ("label=' [x'", "label", " [x"),
        ("outcome=ok", "outcome", "ok"),
        ("output_tokens>100", "output_tokens", ">100"),
        ("instance=日本", "instance", "日本"),
    ],
)
def test_a_comparison_is_the_condition_of_a_class_rule(text: str, field: str, value: object) -> None:
    """FIELD OP VALUE has the grammar of class rules, with a value of TOML where one wants it."""
    assert parse_comparison(text) == parse_condition(field, value, SELECTION_FIELDS)


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "'' is no condition", "FIELD OP VALUE"),
        ("pixels", "'pixels' is no condition", "FIELD OP VALUE"),
        ("=1", "is no condition", "FIELD OP VALUE"),
        ("pixels!=1", "is no condition", "OP is one of <= >= < > ="),
        ("pixel>=1", "unknown field 'pixel'", "did you mean 'pixels'?"),
        ("z" * 5000 + "=1", r"unknown field 'z+\.\.\.", "fields are"),
        ("zzz>=1", "unknown field 'zzz'", "fields are modality, media_items"),
        ("pix\0els>1", r"unknown field 'pix\\x00els'", "pixels"),
        ("pixels>=", "'pixels>=' has no value", "a number"),
        ("label=", "'label=' has no value", "a text"),
        ("pixels==1", "pixels = '==1' is not understood", "a number"),
        ("pixels>=1.5", "pixels = '>=1.5' is not understood", "64..128"),
        ("pixels>=-1", "pixels = '>=-1' is not understood", "64..128"),
        ("pixels>=1MB", "pixels = '>=1MB' is not understood", "64..128"),
        ("pixels=9..1", "pixels = '9..1' is not understood", "smaller end comes first: '1..9'"),
        ("pixels>=9223372036854775808", "is not understood", "a number"),
        (f"pixels>={HUGE}", r"pixels = '>=9+\.\.\. is not understood", "a number"),
        ("pixels>=٣", "is not understood", "a number"),
        ("stream=yes", "stream = 'yes' is not understood", "true or false"),
        ("stream>=true", "stream does not take >=", "stream=VALUE"),
        ("label<a", "label does not take <", "label=VALUE"),
        ('label=["a"', r"'\[\"a\"' is not understood", "write a text"),
        ('label="a"\nx = 1', "is not understood", "write a text"),
        ("label=[]", r"label = \[\] is not understood", "list of texts"),
        ('label=["a", 1]', "is not understood", "list of texts"),
        ("label=" + "[" * 9999, r"'\[+\.\.\. is not understood", "write a text"),
        (f"label=[{HUGE}]", "is not understood", "write a text"),
        ("label=\udcff", r"label = '\\udcff' is not understood", "a text"),
        ("outcome=failed", "unknown outcome 'failed'", "it is one of ok, error, cancelled, lost"),
        ("outcome=eror", "unknown outcome 'eror'", "did you mean 'error'?"),
        ('modality=["image", "video"]', "unknown modality 'video'", "it is one of text, image"),
    ],
)
def test_a_wrong_comparison_is_one_line_with_a_hint(text: str, message: str, hint: str) -> None:
    """Whatever is typed, the error is short, on one line, names what is wrong and says what to write."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_comparison(text)
    assert hint in (caught.value.hint or "")
    assert str(caught.value).isprintable()
    assert len(caught.value.message) < 150


@settings(deadline=None)
@given(st.text() | st.from_regex(r"\s*(pixels|label|stream|outcome)\s*(<=|>=|<|>|=|!=)\s*.*"))
def test_any_text_is_a_condition_or_a_usage_error(text: str) -> None:
    """Nothing that is typed is a traceback, and what is taken compiles to SQL that runs."""
    with contextlib.suppress(UsageError):
        assert not holds(parse_comparison(text), None)


NUMBERS = st.integers(0, 8) | st.sampled_from([LARGEST - 1, LARGEST])
INTERVALS = st.builds(Bounds, st.just("pixels"), NUMBERS, NUMBERS)
LETTERS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map(tuple)
CHOICES = st.builds(OneOf, st.just("label"), LETTERS)


@given(st.tuples(INTERVALS, INTERVALS) | st.tuples(CHOICES, CHOICES))
def test_excluding_and_implying_are_as_sets(pair) -> None:
    """Conditions exclude each other if no value meets both, and one implies another if all its values meet it."""
    values = [*range(10), LARGEST - 1, LARGEST, *"abcde"]
    one, other = ({value for value in values if c.holds({c.field: value})} for c in pair)
    assert pair[0].excludes(pair[1]) == pair[1].excludes(pair[0]) == (not one & other)
    if one:
        assert pair[0].implies(pair[1]) == (one <= other)


def test_conditions_on_different_fields_say_nothing_of_each_other() -> None:
    """A number and a text neither exclude nor imply each other, nor do two numbers of different fields."""
    conditions = (
        Bounds("pixels", 1, 2),
        OneOf("label", ("a",)),
        Bounds("max_tokens", 5, 6),
        OneOf("arm", ("b",)),
    )
    for one in conditions:
        for other in conditions:
            if one is not other:
                assert not one.excludes(other)
                assert not one.implies(other)


def test_fields_are_columns() -> None:
    """Every field but modality is a column of requests; outcome is for selections only, and complete."""
    assert set(SELECTION_FIELDS) - {"modality"} <= set(REQUESTS.names)
    assert set(SELECTION_FIELDS) - set(CLASS_FIELDS) == {"outcome"}
    assert set(SELECTION_FIELDS["outcome"].values) == {outcome.value for outcome in Outcome}
