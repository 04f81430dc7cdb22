from __future__ import annotations

import itertools
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetrace_analyzer.toml_lines import lines_of


def paths(value, path=()):
    """Every path of a parsed document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from paths(part, (*path, key))


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1", ("a",), 1),
        ("# a = 0\n\na = 1", ("a",), 3),
        ("\r\n\r\na = 1\r\n", ("a",), 3),
        ('x = """\na = 1\n"""\na = 2', ("a",), 4),
        ('x = """\\"""\na = 1\n"""\na = 2', ("a",), 4),
        ('x = """a"""""\na = 2', ("a",), 2),
        ('x = """"""\na = 2', ("a",), 2),
        ('x = """a""""\na = 2\nb = "c"', ("b",), 3),
        ("x = '''a''''\na = 2\nb = 'c'", ("b",), 3),
        ("x = '''\n[a]\n'''''\n[a]", ("a",), 4),
        ('x = "# \\" #"\na = 2', ("a",), 2),
        ("x = '\\'\na = 2", ("a",), 2),
        ("# \u2028 \x85 \u2029\na = '\u2028'\nb = 1", ("b",), 3),
        ("[[t]]\nn = 1\n[[t]]\nn = 1", ("t", 1, "n"), 4),
        ("[[t]]\n[t.w]\n[[t]]\n[t.w]\nk = 1", ("t", 1, "w", "k"), 5),
        ("[[t]]\n[[t.u]]\n[[t.u]]\n[[t]]\n[[t.u]]\nk = 1", ("t", 1, "u", 0, "k"), 6),
        ("[[t]]\nw.k = 1\nw.l = 2", ("t", 0, "w", "l"), 3),
        ("[[t]]\nw = {k = 1, l = [\n1, # ]\n], m = 2}", ("t", 0, "w", "m"), 4),
        ("t = [\n{n = 1},\n\n{n = 2}\n]", ("t", 1, "n"), 4),
        ("t = [1979-05-27 07:32:00, 1.5e+3,\n'x']", ("t", 2), 2),
        ('"a.b" . "\\u00e9" = 1\n\'c d\' = 2', ("a.b", "é"), 1),
        ('"a.b" . "\\u00e9" = 1\n\'c d\' = 2', ("c d",), 2),
        ("[ x . 'y' ]\nk = 1", ("x", "y", "k"), 2),
        ("1.2 = 3\n-4 = -5", ("-4",), 2),
        ("[a.b]\n[a]\nk = 1", ("a",), 1),
    ],
)
def test_lines(text: str, path: tuple, line: int) -> None:
    """Comments, strings over several lines, dotted and quoted keys, arrays and tables do not mislead it."""
    assert lines_of(text)[path] == line
    assert set(lines_of(text)) == set(paths(tomllib.loads(text)))


SCALARS = st.sampled_from(
    [
        "1",
        "-1_000.5e-3",
        "true",
        "inf",
        "1979-05-27T07:32:00-08:00",
        "1979-05-27 07:32:00",
        '"# not [a] comment = \\" {"',
        "'\\'",
        '""',
        '"""\n[[fake]]\nfake = 1 \\""" "" #\n"""',
        '"""a"""""',
        "'''\n[fake] '' # ''''",
    ]
)
BREAKS = st.sampled_from(["", "\n", " # ] } , \u2028\n", "\r\n\t"])


def arrays(values):
    """Arrays, with line breaks and comments where they are allowed, and a trailing comma or none."""
    element = st.tuples(BREAKS, values, BREAKS).map("".join)
    return st.tuples(st.lists(element, max_size=3), st.sampled_from(["", ","]), BREAKS).map(
        lambda parts: "[" + ",".join(parts[0]) + (parts[1] if parts[0] else "") + parts[2] + "]"
    )


def inline_tables(values):
    return st.lists(values, max_size=3).map(
        lambda parts: "{" + ", ".join(f"KEY = {part}" for part in parts) + "}"
    )


VALUES = st.recursive(SCALARS, lambda values: arrays(values) | inline_tables(values), max_leaves=6)
PAIRS = VALUES.map(lambda value: f"KEY = {value}") | VALUES.map(lambda value: f'KEY."KEY" = {value}')
HEADERS = st.sampled_from(["[KEY]", "[ KEY.KEY ]", "[[t]]", "[[t]] # [[t]]", "[t.KEY]", "[[t.KEY]]"])
STATEMENTS = st.sampled_from(["", "# KEY = 0", "   "]) | PAIRS | HEADERS


@settings(deadline=None)
@given(st.lists(STATEMENTS, max_size=8))
def test_every_key_is_found_where_it_stands(statements: list[str]) -> None:
    """Of any document, exactly the paths that tomllib finds are found, each key on the line it is written."""
    numbers = itertools.count()
    pieces = "\n".join(["[[t]]", *statements]).split("KEY")
    text = "".join(piece + f"k{next(numbers)}_" for piece in pieces[:-1]) + pieces[-1]
    found = lines_of(text)
    assert set(found) == set(paths(tomllib.loads(text)))
    for path, line in found.items():
        if isinstance(path[-1], str) and path[-1] != "t":
            assert text.count("\n", 0, text.index(path[-1])) + 1 == line
