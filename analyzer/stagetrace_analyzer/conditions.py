"""Conditions on what is known of a request: one grammar for traffic classes and selections.

A number (``max_tokens``, ``pixels``) is compared with ``"<=64"``, ``"<64"``,
``">=64"``, ``">64"``, ``"=64"`` or ``64``, or with ``"64..128"``, both ends
included; digits may be grouped (``1_000_000``).  A text is ``"a"``, or any of
``["a", "b"]``.  A flag is ``true`` or ``false``.  A fact that is not known meets
no condition.

Each condition holds for facts in Python and compiles to SQL, with one meaning.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from stagetrace.errors import UsageError
from stagetrace.stages import Outcome

Value: TypeAlias = int | str | bool
"""What a field is compared with."""

Facts: TypeAlias = Mapping[str, Value | None]
"""What is known of a request, by field; a field that is None or absent is unknown."""

Bind: TypeAlias = Callable[[Value], str]
"""Takes a value as a parameter of a query; returns how the query names it."""

LARGEST: Final = 2**63 - 1
"""The largest number that a fact or a condition may have."""


class FieldType(Enum):
    """What a field holds, in the words of a hint."""

    NUMBER = "a number such as 64, '<=64' or '64..128'"
    TEXT = "a text or a list of texts"
    FLAG = "true or false"


class Field(NamedTuple):
    """A fact that conditions may be about.

    ``post``: it is known only when the request has ended, and depends on how it
    was served.  ``values``: the only ones it has; empty if there are others.
    """

    type: FieldType
    post: bool = False
    values: tuple[str, ...] = ()


CLASS_FIELDS: Final[Mapping[str, Field]] = MappingProxyType(
    {
        "modality": Field(FieldType.TEXT, values=("text", "image")),
        "media_items": Field(FieldType.NUMBER),
        "pixels": Field(FieldType.NUMBER),
        "media_bytes": Field(FieldType.NUMBER),
        "prompt_tokens": Field(FieldType.NUMBER),
        "max_tokens": Field(FieldType.NUMBER),
        "label": Field(FieldType.TEXT),
        "phase": Field(FieldType.TEXT),
        "arm": Field(FieldType.TEXT),
        "model": Field(FieldType.TEXT),
        "instance": Field(FieldType.TEXT),
        "stream": Field(FieldType.FLAG),
        "cached_tokens": Field(FieldType.NUMBER, post=True),
        "output_tokens": Field(FieldType.NUMBER, post=True),
        "finish_reason": Field(FieldType.TEXT, post=True),
    }
)
"""Fields of class rules, by the column of ``requests`` or `modality`."""

SELECTION_FIELDS: Final[Mapping[str, Field]] = MappingProxyType(
    {**CLASS_FIELDS, "outcome": Field(FieldType.TEXT, post=True, values=tuple(o.value for o in Outcome))}
)
"""Fields of selections."""

_DIGITS: Final = r"\d(?:_?\d){0,18}"
_BOUND: Final = re.compile(rf"(<=|>=|<|>|=)\s*({_DIGITS})", re.ASCII)
_RANGE: Final = re.compile(rf"({_DIGITS})\s*\.\.\s*({_DIGITS})", re.ASCII)
_COMPARISON: Final = re.compile(r"\s*([^\s<>=!]+)\s*(<=|>=|<|>|=)(.*)", re.DOTALL)
_LITERAL: Final = ("[", '"', "'")


@dataclass(frozen=True, slots=True)
class Bounds:
    """A condition that a number lies between two others, both included."""

    field: str
    low: int = 0
    high: int = LARGEST

    def sql(self, bind: Bind) -> str:
        """Render as SQL; ``bind`` turns a value into a parameter."""
        return f"{self.field} BETWEEN {bind(self.low)} AND {bind(self.high)}"

    def holds(self, facts: Facts) -> bool:
        """Whether it holds; an unknown number meets nothing."""
        known = facts.get(self.field)
        return isinstance(known, int) and self.low <= known <= self.high

    def excludes(self, other: Condition) -> bool:
        """Whether no request can meet both."""
        if not isinstance(other, Bounds) or other.field != self.field:
            return False
        return max(self.low, other.low) > min(self.high, other.high)

    def implies(self, other: Condition) -> bool:
        """Whether every request that meets this one meets the other one."""
        if not isinstance(other, Bounds) or other.field != self.field:
            return False
        return other.low <= self.low and self.high <= other.high


@dataclass(frozen=True, slots=True)
class OneOf:
    """A condition that a text or a flag is one of the values."""

    field: str
    values: tuple[Value, ...]

    def sql(self, bind: Bind) -> str:
        """Render as SQL; ``bind`` turns a value into a parameter."""
        return f"{self.field} IN ({', '.join(bind(value) for value in self.values)})"

    def holds(self, facts: Facts) -> bool:
        """Whether it holds; an unknown text or flag meets nothing."""
        return facts.get(self.field) in self.values

    def excludes(self, other: Condition) -> bool:
        """Whether no request can meet both."""
        if not isinstance(other, OneOf) or other.field != self.field:
            return False
        return not set(self.values) & set(other.values)

    def implies(self, other: Condition) -> bool:
        """Whether every request that meets this one meets the other one."""
        if not isinstance(other, OneOf) or other.field != self.field:
            return False
        return set(self.values) <= set(other.values)


Condition: TypeAlias = Bounds | OneOf


def parse_condition(name: str, value: Any, fields: Mapping[str, Field]) -> Condition:
    """Parse a condition as a class rule has it: a field, and a value of TOML.

    Raises:
        UsageError: There is no such field, or it does not take the value.
    """
    field = fields.get(name)
    if field is None:
        raise UsageError(f"unknown field {shown(name)}", hint=did_you_mean(name, fields, "fields are"))
    condition = _PARSERS[field.type](name, value)
    if condition is None:
        raise UsageError(f"{name} = {shown(value)} is not understood", hint=_hint(name, field, value))
    if field.values and isinstance(condition, OneOf):
        for found in condition.values:
            if found not in field.values:
                hint = did_you_mean(str(found), field.values, "it is one of")
                raise UsageError(f"unknown {name} {shown(found)}", hint=hint)
    return condition


def parse_comparison(text: str) -> Condition:
    """Parse ``FIELD OP VALUE``, such as ``pixels>=1000``, ``max_tokens=1..64`` or ``label=chat``.

    The value may be written as in a class rule: ``label=["chat", "assistant"]``.

    Raises:
        UsageError: It is not of that form, there is no such field, or it does not take the value.
    """
    parts = _COMPARISON.fullmatch(text)
    if parts is None:
        raise UsageError(
            f"{shown(text)} is no condition",
            hint="write FIELD OP VALUE, such as 'pixels>=1000000', 'stream=true' or 'label=chat'; "
            "OP is one of <= >= < > =",
        )
    name, sign, rest = parts[1], parts[2], parts[3].strip()
    field = SELECTION_FIELDS.get(name)
    if field is not None and field.type is not FieldType.NUMBER and sign != "=":
        raise UsageError(f"{name} does not take {sign}", hint=f"write {name}=VALUE")
    if field is not None and not rest:
        raise UsageError(f"{shown(text)} has no value", hint=f"{name} takes {field.type.value}")
    return parse_condition(name, _value(field, sign, rest), SELECTION_FIELDS)


def did_you_mean(given: str, known: Mapping[str, Any] | tuple[str, ...], otherwise: str) -> str:
    """Return a hint for a misspelt name: the one that is close, or all of them."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"{otherwise} {', '.join(known)}"


def shown(value: Any) -> str:
    """Return a value as an error shows it: on one line, and not all of it if it is long."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not write out integers of thousands of digits.
        return "a huge number"
    longest = 60
    return text if len(text) <= longest else f"{text[:longest]}..."


def _value(field: Field | None, sign: str, rest: str) -> Any:
    """Turn what stands behind a field into what a class rule would have there."""
    if field is None:
        return rest
    if field.type is FieldType.NUMBER:
        return rest if sign == "=" and ".." in rest else sign + rest
    if field.type is FieldType.FLAG:
        return {"true": True, "false": False}.get(rest, rest)
    if not rest.startswith(_LITERAL):
        return rest
    try:
        ((_, value),) = tomllib.loads(f"value = {rest}").items()
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{shown(rest)} is not understood", hint="""write a text, "a text", or ["one", "other"]"""
        ) from error
    return value


def _hint(name: str, field: Field, value: Any) -> str:
    limits = _RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
    if field.type is FieldType.NUMBER and limits and int(limits[1]) > int(limits[2]):
        return f"the smaller end comes first: '{limits[2]}..{limits[1]}'"
    return f"{name} takes {field.type.value}"


def _bounds(field: str, value: Any) -> Bounds | None:
    ends: tuple[int, int] | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        ends = _ends("=", value)
    elif not isinstance(value, str):
        return None
    elif bound := _BOUND.fullmatch(value.strip()):
        ends = _ends(bound[1], int(bound[2]))
    elif limits := _RANGE.fullmatch(value.strip()):
        ends = _between(int(limits[1]), int(limits[2]))
    return None if ends is None else Bounds(field, *ends)


def _between(low: int, high: int) -> tuple[int, int] | None:
    return (low, high) if 0 <= low <= high <= LARGEST else None


def _ends(sign: str, number: int) -> tuple[int, int] | None:
    """Return the smallest and the largest whole number that a bound allows."""
    if not 0 <= number <= LARGEST:
        return None
    return {
        "<": (0, number - 1),
        "<=": (0, number),
        ">": (number + 1, LARGEST),
        ">=": (number, LARGEST),
        "=": (number, number),
    }[sign]


def _texts(field: str, value: Any) -> OneOf | None:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and _is_unicode(text) for text in texts):
        return None
    return OneOf(field, tuple(texts))


def _is_unicode(text: str) -> bool:
    """Whether a text can be compared with columns; bytes of an argument that are no UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(field: str, value: Any) -> OneOf | None:
    return OneOf(field, (value,)) if isinstance(value, bool) else None


_PARSERS: Final[dict[FieldType, Callable[[str, Any], Condition | None]]] = {
    FieldType.NUMBER: _bounds,
    FieldType.TEXT: _texts,
    FieldType.FLAG: _flag,
}
