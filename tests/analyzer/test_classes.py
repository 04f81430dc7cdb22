from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace.errors import UsageError
from stagetrace.timeline import Item, RequestTimeline
from stagetrace_analyzer.classes import ClassRule, ClassRules, class_facts, load_rules, parse_rules
from stagetrace_analyzer.conditions import CLASS_FIELDS, LARGEST, Bounds, FieldType, OneOf

ROOT = Path(__file__).parents[2]
DUCKDB = duckdb.connect()
SQL_TYPES = {FieldType.NUMBER: "BIGINT", FieldType.TEXT: "VARCHAR", FieldType.FLAG: "BOOLEAN"}
FACTS = {name: SQL_TYPES[field.type] for name, field in CLASS_FIELDS.items()}


def facts_sql(facts) -> tuple[str, dict]:
    """A row of facts as a subquery, and its parameters; the others are unknown."""
    columns = ", ".join(f"${name}::{kind} AS {name}" for name, kind in FACTS.items())
    return f"(SELECT {columns})", {name: facts.get(name) for name in FACTS}


def classified(rules: ClassRules, **facts: object) -> str:
    """Return the class of a request with these facts, in SQL and in Python; the others are unknown."""
    expression, parameters = rules.case_expression()
    row, values = facts_sql(facts)
    found = DUCKDB.execute(f"SELECT {expression} FROM {row}", parameters | values).fetchall()
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


def bounds(field: str) -> st.SearchStrategy[Bounds]:
    """Conditions of a number."""
    return st.builds(Bounds, st.just(field), NUMBERS, NUMBERS)


def one_of(field: str) -> st.SearchStrategy[OneOf]:
    """Conditions of a text or a flag."""
    return st.lists(VALUES[FACTS[field]], min_size=1, max_size=3).map(lambda v: OneOf(field, tuple(v)))


NUMBERS = st.integers(0, 3) | st.integers(0, LARGEST)
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


def rules_of(fields: str, names: str = "abc") -> st.SearchStrategy[ClassRules]:
    """Rules that ask for few fields and few values, so that they meet often."""
    small = st.integers(0, 2)
    conditions = st.sampled_from(fields.split()).flatmap(
        lambda field: (
            st.builds(Bounds, st.just(field), small, small)
            if FACTS[field] == "BIGINT"
            else st.builds(OneOf, st.just(field), st.lists(st.booleans(), min_size=1, max_size=2).map(tuple))
        )
    )
    where = st.lists(conditions, max_size=3, unique_by=lambda condition: condition.field).map(tuple)
    rules = st.lists(st.builds(ClassRule, st.sampled_from(names), where), min_size=1, max_size=5)
    return rules.map(lambda found: ClassRules(tuple(found)))


@settings(deadline=None, max_examples=150)
@given(
    rules_of("pixels max_tokens stream output_tokens cached_tokens"),
    st.fixed_dictionaries(
        {name: st.none() | st.integers(0, 2) for name in ("pixels", "max_tokens")}
        | {"stream": st.none() | st.booleans()}
    ),
    st.lists(
        st.fixed_dictionaries(
            {name: st.none() | st.integers(0, 2) for name in ("output_tokens", "cached_tokens")}
        ),
        min_size=2,
        max_size=2,
    ),
)
def test_what_is_known_at_the_end_decides_nothing_else(rules, arrival, ends) -> None:
    """Whatever becomes of a request, it is in a class that is not post in either case, or in neither."""
    found = [rules.class_of(arrival | end) for end in ends]
    if found[0] != found[1]:
        assert set(found) <= set(rules.post_names)


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
    assert sorted(map(str, parameters.values())) == sorted([evil, evil, "4711", "4711", "other"])
    assert classified(rules, label=evil, pixels=4711) == evil


@pytest.mark.parametrize(
    ("rules", "post"),
    [
        (["a: modality = 'text'", "b:"], []),
        (["a: output_tokens = '<=64'", "b: modality = 'image'"], ["a", "b", "other"]),
        (["b: modality = 'image'", "a: output_tokens = '<=64'"], ["a", "other"]),
        (["a: output_tokens = '<=64', modality = 'text'", "b: modality = 'image'"], ["a", "other"]),
        (
            ["a: finish_reason = 'stop', modality = 'image'", "b: modality = 'image'", "c: stream = true"],
            ["a", "b"],
        ),
        (
            ["a: cached_tokens = '>0', modality = 'image'", "b: modality = 'image', pixels = '>9'", "c:"],
            ["a", "b", "c"],
        ),
        (
            ["a: output_tokens = 1, pixels = '<=9'", "b: pixels = '>9'", "c: pixels = '9..10'"],
            ["a", "c", "other"],
        ),
        (["a: output_tokens = 1", "b: stream = true", "b:"], ["a", "b"]),
        (["b:", "a: output_tokens = 1"], ["a"]),
    ],
)
def test_post_classes(rules: list[str], post: list[str]) -> None:
    """Post is what asks for the end of a request, and what may get a request that this has left over."""
    entries = [rule.partition(":") for rule in rules]
    text = "".join(f'[[class]]\nname = "{name}"\nwhere = {{ {where} }}\n' for name, _, where in entries)
    assert list(parse_rules(text, source="test").post_names) == post


def test_default_classes_are_decided_at_arrival() -> None:
    """The default classes may be compared and gated: none is post."""
    assert load_rules().post_names == ()


def test_fields_that_are_asked_for() -> None:
    """Each once, in the order of the rules."""
    assert load_rules().fields == ("modality", "max_tokens")
    assert parse_rules('[[class]]\nname = "all"\nwhere = {}', source="test").fields == ()


def test_unknown_facts_are_counted() -> None:
    """By field, the requests of which it is unknown; a text request does not lack the size of an image."""
    rules = parse_rules(
        """
        [[class]]
        name = "a"
        where = { pixels = ">1", stream = true }
        [[class]]
        name = "b"
        where = { media_bytes = 1, modality = "text", label = "x", stream = false }
        """,
        source="test",
    )
    rows = [
        {"media_items": 0, "modality": "text", "stream": True},
        {"media_items": 2, "modality": "image", "pixels": 7, "label": "x"},
        {},
    ]
    found = dict.fromkeys(rules.fields, 0)
    for facts in rows:
        row, values = facts_sql(facts)
        for field, expression in rules.unknown_expressions().items():
            found[field] += DUCKDB.execute(f"SELECT {expression} FROM {row}", values).fetchone()[0]
    assert found == {"pixels": 1, "stream": 2, "media_bytes": 2, "modality": 1, "label": 2}


def _entry(where: str) -> str:
    return f'[[class]]\nname = "ok"\nwhere = {{}}\n[[class]]\nname = "a"\nwhere = {where}\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[[class]\n", "my.toml, line 1: ", "TOML"),
        ("\n\n[[class]]\nname =\n", "my.toml, line 4: Invalid value", "TOML"),
        ("\x00", "my.toml, line 1: Invalid statement", "TOML"),
        ('a = "', "my.toml: Unterminated string", "TOML"),
        ("a = " + "[" * 99999, "my.toml: ", "TOML"),
        ("a = " + "9" * 5000, "my.toml: ", "TOML"),
        ("", "my.toml: no class is defined", "[[class]]"),
        ('# class\nclass = "a"', "my.toml, line 2: no class is defined", "[[class]]"),
        ("class = []", "my.toml, line 1: no class is defined", "[[class]]"),
        ("[class]", "my.toml, line 1: no class is defined", "[[class]]"),
        ("class = [\n1]", "my.toml, line 2: class 1 is no table", "[[class]]"),
        ("\n[[class]]\nwhere = {}", "my.toml, line 2: class 1 has no name", "name"),
        ('[[class]]\nname = " "\nwhere = {}', "my.toml, line 2: class 1 has no name", "name"),
        (
            '[[class]]\nname = "a\\nb"\nwhere = {}',
            r"line 2: class 1: the name 'a\\nb' is not printable",
            "name",
        ),
        (
            '[[class]]\nname = "other"\nwhere = {}',
            r"line 2: class 1 \('other'\): the name is reserved",
            "no rule",
        ),
        ('[[class]]\nname = "a"', r"line 1: class 1 \('a'\) has no conditions", "where"),
        ('[[class]]\nname = "a"\n[[class.where]]', r"line 1: class 1 \('a'\) has no conditions", "where"),
        (
            '[[class]]\nname = "a"\nmax_tokens = 1\nwhere = {}',
            r"line 3: class 1 \('a'\): unknown key 'max_tokens'",
            "where",
        ),
        ('[[klass]]\nname = "a"', "my.toml, line 1: unknown key 'klass'", "[[class]]"),
        ('[[class]]\nname = "a"\n[klass.x]', "my.toml, line 3: unknown key 'klass'", "[[class]]"),
        (_entry('{ modalty = "text" }'), r"line 6: class 2 \('a'\): unknown field 'modalty'", "'modality'"),
        (_entry('{ zzz = "text" }'), "unknown field 'zzz'", "fields are modality"),
        (_entry('{ outcome = "ok" }'), "unknown field 'outcome'", "fields are modality"),
        (_entry('{ modality = "video" }'), "unknown modality 'video'", "text, image"),
        (_entry('{ modality = ["text", "video"] }'), "unknown modality", "text, image"),
        (_entry('{ max_tokens = "<= many" }'), "max_tokens = '<= many'", "64..128"),
        (_entry('{ max_tokens = "9..1" }'), "max_tokens = '9..1'", "'1..9'"),
        (_entry('{ max_tokens = "-1..1" }'), "max_tokens = '-1..1'", "64..128"),
        (_entry('{ max_tokens = "<=٣" }'), "max_tokens", "64..128"),
        (_entry("{ max_tokens = -1 }"), "max_tokens = -1", "64..128"),
        (_entry("{ max_tokens = 9223372036854775808 }"), "max_tokens = 9223372036854775808", "64..128"),
        (_entry("{ max_tokens = true }"), "max_tokens = True", "64..128"),
        (_entry("{ max_tokens = 1.5 }"), "max_tokens = 1.5", "64..128"),
        (_entry("{ max_tokens = {} }"), "max_tokens = {}", "64..128"),
        (_entry("{ pixels.max = 1 }"), "pixels = {'max': 1}", "64..128"),
        (_entry("{ label = 1 }"), "label = 1", "list of texts"),
        (_entry("{ label = [] }"), r"label = \[\]", "list of texts"),
        (_entry("{ label = 1979-05-27 }"), "label = ", "list of texts"),
        (_entry('{ stream = "true" }'), "stream = 'true'", "true or false"),
    ],
)
def test_a_wrong_file_says_where_and_what_to_do(text: str, message: str, hint: str) -> None:
    """An error names the file, the line, the entry, and has a hint."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_rules(text, source="my.toml")
    assert caught.value.message.startswith("my.toml")
    assert hint in (caught.value.hint or "")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ('where = { modality = "image", pixel = 1 }', 16),
        ('where = { label = [\n"a",\n"b"], pixel = 1 }', 18),
        ('where.modality = "image"\nwhere.pixel = 1', 17),
        ('[class.where]\nlabel = "pixel = 1"\n# pixel = 1\npixel = 1', 19),
        ('[class.where]\nlabel = """\npixel = 1\n[[class]]\n"""\n"pixel" = 1', 21),
        ('[class.where]\r\nlabel = "\u2028"\r\n"pi\\u0078el" = 1', 18),
    ],
)
def test_the_line_of_a_field(where: str, line: int) -> None:
    """It is the line where the field is written, not where a comment, a text or another class has it."""
    text = f"""# pixel = 1
[[class]]
name = "thumb"
where = {{ pixels = 1, label = "pixel" }}

[[class]]
# [[class]]
name = "thumb"
[class.where]
pixels = 1
label = '''
[[class]]
pixel = 1'''
[[class]]
name = "thumb"
{where}
[[class]]
name = "thumb"
where = {{ pixel = 1 }}
"""
    with pytest.raises(UsageError) as caught:
        parse_rules(text, source="my.toml")
    assert str(caught.value) == (
        f"my.toml, line {line}: class 3 ('thumb'): unknown field 'pixel' (hint: did you mean 'pixels'?)"
    )


def test_rules_are_read_from_a_file(tmp_path: Path) -> None:
    """The file's path is in its errors; text that is no UTF-8 and a missing file are usage errors."""
    path = tmp_path / "classes.toml"
    path.write_text('[[class]]\nname = "all"\nwhere = {}')
    assert load_rules(path).names == ("all", "other")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_rules(path).names == ("all", "other")
    path.write_text("[[class]")
    with pytest.raises(UsageError, match=r"classes\.toml, line 1: "):
        load_rules(path)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_rules(path)
    with pytest.raises(UsageError, match=r"cannot read .*missing"):
        load_rules(tmp_path / "missing")
    with pytest.raises(UsageError, match="Is a directory"):
        load_rules(tmp_path)
    with pytest.raises(UsageError, match="embedded null byte"):
        load_rules(tmp_path / "a\0b")


def test_fields_of_a_request() -> None:
    """Sizes are summed over the items, and unknown when that of one of them is; no items is no size."""
    request = RequestTimeline("request", "api", received=0)
    assert set(class_facts(request)) == set(FACTS)
    assert {name: fact for name, fact in class_facts(request).items() if fact is not None} == {
        "instance": "api"
    }
    request.facts = {"media_items": 0, "max_tokens": 16, "stream": False, "label": "chat"}
    request.facts |= {"output_tokens": 9, "cached_tokens": 0, "finish_reason": "stop"}
    assert {name: fact for name, fact in class_facts(request).items() if fact is not None} == {
        "modality": "text",
        "media_items": 0,
        "max_tokens": 16,
        "stream": False,
        "label": "chat",
        "output_tokens": 9,
        "cached_tokens": 0,
        "finish_reason": "stop",
        "instance": "api",
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


def test_the_page_names_every_field() -> None:
    """The table of the documentation has every field, in order, and says which are known only at the end."""
    page = (ROOT / "docs/classes.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == list(CLASS_FIELDS)
    post = [row[1].strip(" `") for row in rows if "at the end" in row[2]]
    assert post == [name for name, field in CLASS_FIELDS.items() if field.post]


def test_the_examples_of_the_page_are_what_it_says() -> None:
    """The first file has no post class; of the second one, what its comments say."""
    page = (ROOT / "docs/classes.md").read_text(encoding="utf-8")
    plain, post = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert parse_rules(plain, source="page").post_names == ()
    said = [re.search('"(.*)"', line)[1] for line in post.splitlines() if "# post: " in line]
    assert list(parse_rules(post, source="page").post_names) == said == ["image/brief", "image"]


def test_an_endless_file_is_refused(tmp_path):
    """A device, or a file that is no list of rules by its size, is one line."""
    with pytest.raises(UsageError, match="over 1,000,000 bytes"):
        load_rules(Path("/dev/zero"))
