"""The lines of a TOML document on which its keys stand: what `tomllib` does not tell.

Only for text that `tomllib` has taken: this follows the structure of valid TOML
and checks none of it.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from itertools import accumulate
from typing import Final, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys from the root; a number is a place in an array."""

_TOKEN: Final = re.compile(
    r"""
    (?: [ \t\r] | \#[^\n]* )+                   # blanks and comments
    | [\n\[\]{}=,.]                             # signs
    | \"{3} (?: [^\\] | \\. )*? \"{3,5}         # strings; up to two quotes may stand before the last three
    | '{3} .*? '{3,5}
    | " (?: [^"\\] | \\. )* "
    | '[^']*'
    | [^\s\[\]{}=,.\#"']+                       # bare keys, numbers, dates
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTES: Final = ('"', "'")


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, on which each table, key and array element of a document begins.

    A table that is opened more than once is where it was first named.

    Args:
        text: A document that `tomllib.loads` takes.
    """
    return _Reader(text).read()


class _Reader:
    """Walks over the tokens of a document and notes the line of every path."""

    def __init__(self, text: str) -> None:
        tokens = _TOKEN.findall(text)
        lines = accumulate((token.count("\n") for token in tokens), initial=1)
        kept = [pair for pair in zip(tokens, lines, strict=False) if pair[0][0] not in " \t\r#"]
        self._tokens: list[tuple[str, int]] = kept[::-1]
        self._lines: dict[KeyPath, int] = {}
        self._entries: Counter[KeyPath] = Counter()

    def read(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._next(skip="\n"):
            if self._next() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self._lines

    def _next(self, skip: str = "") -> str:
        """Return the next token, which stays; "" at the end."""
        while self._tokens and skip and self._tokens[-1][0] == skip:
            self._tokens.pop()
        return self._tokens[-1][0] if self._tokens else ""

    def _take(self) -> str:
        return self._tokens.pop()[0]

    def _note(self, path: KeyPath, line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)

    def _header(self) -> KeyPath:
        """Read ``[a.b]`` or ``[[a.b]]``; return the path of the table that it opens."""
        line = self._tokens[-1][1]
        self._take()
        is_array = self._next() == "["
        if is_array:
            self._take()
        path: KeyPath = ()
        *parents, last = self._key()
        for key in parents:
            path = self._newest((*path, key))
        path = (*path, last)
        self._entries[path] += is_array
        path = self._newest(path)
        self._note(path, line)
        while self._next() == "]":
            self._take()
        return path

    def _newest(self, path: KeyPath) -> KeyPath:
        """Return the path of an array's newest entry, or the path itself if it is no array of tables."""
        entries = self._entries[path]
        return (*path, entries - 1) if entries else path

    def _key(self) -> list[str]:
        parts = [_plain(self._take())]
        while self._next() == ".":
            self._take()
            parts.append(_plain(self._take()))
        return parts

    def _pair(self, table: KeyPath) -> None:
        line = self._tokens[-1][1]
        path = (*table, *self._key())
        self._note(path, line)
        self._take()  # the equals sign
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._take()
        if opening == "{":
            while self._next(skip="\n") != "}":
                if self._next() == ",":
                    self._take()
                else:
                    self._pair(path)
            self._take()
        elif opening == "[":
            self._elements(path)
        else:
            while self._next() not in {"", "\n", ",", "]", "}"}:
                self._take()

    def _elements(self, path: KeyPath) -> None:
        number = 0
        while self._next(skip="\n") != "]":
            if self._next() == ",":
                self._take()
                continue
            self._note((*path, number), self._tokens[-1][1])
            self._value((*path, number))
            number += 1
        self._take()


def _plain(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0"))) if key.startswith(_QUOTES) else key
