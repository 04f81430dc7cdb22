"""Traffic classes: ordered rules over the facts known when a request arrives.

The rules are in a TOML file, so that they can change without new data::

    [[class]]
    name = "image/short"
    where = { modality = "image", max_tokens = "<=64" }

Rules are tried in the order of the file, and the first one whose conditions all
hold gives the class.  The same name may come twice ("or").  ``where = {}``
takes every request.  An unknown fact meets no condition.  A request that no
rule takes is in the class `OTHER`.

Fields and their conditions:

- ``media_items``, ``pixels``, ``media_bytes``, ``prompt_tokens``, ``max_tokens``:
  ``"<=64"``, ``"<64"``, ``">=64"``, ``">64"``, ``"=64"`` or ``64``, and
  ``"64..128"`` with both ends included.
- ``modality`` (``text``: no media item, ``image``: at least one), ``label``,
  ``phase``, ``model``, ``arm``: ``"a"``, or ``["a", "b"]`` for any of them.
- ``stream``: ``true`` or ``false``.
"""

from __future__ import annotations

import difflib
import importlib.resources
import operator
import re
import tomllib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagetrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from stagetrace.timeline import Item, RequestTimeline

OTHER: Final = "other"
"""The class of a request that no rule takes."""

Value: TypeAlias = int | str | bool
"""What a field is compared with."""


class _Type(Enum):
    NUMBER = "a number such as 64, '<=64' or '64..128'"
    TEXT = "a text or a list of texts"
    FLAG = "true or false"


_FIELDS: Final = {
    "modality": _Type.TEXT,
    "media_items": _Type.NUMBER,
    "pixels": _Type.NUMBER,
    "media_bytes": _Type.NUMBER,
    "prompt_tokens": _Type.NUMBER,
    "max_tokens": _Type.NUMBER,
    "label": _Type.TEXT,
    "phase": _Type.TEXT,
    "model": _Type.TEXT,
    "arm": _Type.TEXT,
    "stream": _Type.FLAG,
}

_FROM_RECORDS: Final = ("prompt_tokens", "max_tokens", "label", "phase", "model", "arm", "stream")
"""Fields that are in a request's records as they are; the others are made of its media items."""

_MODALITIES: Final = ("text", "image")
_DIGITS: Final = r"\d(?:_?\d){0,18}"
_BOUND: Final = re.compile(rf"(<=|>=|<|>|=)\s*({_DIGITS})", re.ASCII)
_RANGE: Final = re.compile(rf"({_DIGITS})\s*\.\.\s*({_DIGITS})", re.ASCII)
_LARGEST: Final = 2**63 - 1
_COMPARE: Final[dict[str, Callable[[Any, int], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}

Facts: TypeAlias = "Mapping[str, Value | None]"
"""What is known of a request, by field; a field that is None or absent is unknown."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number's conditions: each pair of a SQL comparison operator and a value must hold."""

    field: str
    bounds: tuple[tuple[str, int], ...]

    def sql(self, bind: Callable[[Value], str]) -> str:
        """Render as SQL; ``bind`` turns a value into a parameter."""
        return " AND ".join(f"{self.field} {sign} {bind(value)}" for sign, value in self.bounds)

    def holds(self, facts: Facts) -> bool:
        """Whether all of them hold; an unknown number meets none."""
        known = facts.get(self.field)
        return known is not None and all(_COMPARE[sign](known, value) for sign, value in self.bounds)


@dataclass(frozen=True, slots=True)
class OneOf:
    """A condition that a text or a flag is one of the values."""

    field: str
    values: tuple[Value, ...]

    def sql(self, bind: Callable[[Value], str]) -> str:
        """Render as SQL; ``bind`` turns a value into a parameter."""
        return f"{self.field} IN ({', '.join(bind(value) for value in self.values)})"

    def holds(self, facts: Facts) -> bool:
        """Whether it holds; an unknown text or flag meets none."""
        return facts.get(self.field) in self.values


@dataclass(frozen=True, slots=True)
class ClassRule:
    """A class and the conditions that must all hold for it."""

    name: str
    where: tuple[Bounds | OneOf, ...]

    def sql(self, bind: Callable[[Value], str]) -> str:
        """Render as a branch of a SQL ``CASE``; ``bind`` turns a value into a parameter."""
        conditions = " AND ".join(condition.sql(bind) for condition in self.where) or "TRUE"
        return f"WHEN {conditions} THEN {bind(self.name)}"

    def holds(self, facts: Facts) -> bool:
        """Whether all conditions hold."""
        return all(condition.holds(facts) for condition in self.where)


@dataclass(frozen=True, slots=True)
class ClassRules:
    """Rules in the order in which they are tried."""

    rules: tuple[ClassRule, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The classes in the order of the rules, each once, then `OTHER`."""
        return tuple(dict.fromkeys([*(rule.name for rule in self.rules), OTHER]))

    def case_expression(self) -> tuple[str, dict[str, Value]]:
        """Compile the rules to one SQL ``CASE`` and its parameters by name.

        The expression needs the columns of the requests, and ``modality``.  All
        values and names of the file are parameters; the SQL holds none of them.
        """
        parameters: dict[str, Value] = {}

        def bind(value: Value) -> str:
            name = f"class_{len(parameters)}"
            parameters[name] = value
            return f"${name}"

        branches = [rule.sql(bind) for rule in self.rules]
        return f"CASE {' '.join(branches)} ELSE {bind(OTHER)} END", parameters

    def class_of(self, facts: Facts) -> str:
        """Return the class of one request: what `case_expression` gives for the same facts.

        Args:
            facts: As `class_facts` returns them.
        """
        return next((rule.name for rule in self.rules if rule.holds(facts)), OTHER)


def class_facts(request: RequestTimeline) -> dict[str, Value | None]:
    """Return the fields that rules are about, for one request; None is unknown."""
    items = request.items.values()
    media_items = request.facts.get("media_items", len(items) or None)
    modality = None
    if isinstance(media_items, int):
        modality = "image" if media_items > 0 else "text"
    return {name: request.facts.get(name) for name in _FROM_RECORDS} | {
        "modality": modality,
        "media_items": media_items,
        "media_bytes": _sum(item.facts.get("bytes") for item in items),
        "pixels": _sum(_item_pixels(item) for item in items),
    }


def _item_pixels(item: Item) -> int | None:
    width, height = item.facts.get("width"), item.facts.get("height")
    return width * height if isinstance(width, int) and isinstance(height, int) else None


def _sum(values: Iterable[object]) -> int | None:
    """Add up what is known of every media item; None when there is none, or not of all."""
    found = list(values)
    known = [value for value in found if isinstance(value, int)]
    return sum(known) if known and len(known) == len(found) else None


def load_rules(path: Path | None = None) -> ClassRules:
    """Read the rules of a file, or the default ones.

    Raises:
        UsageError: The file cannot be read, or is not as the module says.
    """
    if path is None:
        default = importlib.resources.files(__package__) / "classes.toml"
        return parse_rules(default.read_text(encoding="utf-8"), source="the default classes")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="--classes takes a TOML file of class rules"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text", hint="--classes takes a TOML file") from error
    return parse_rules(text, source=str(path))


def parse_rules(text: str, *, source: str) -> ClassRules:
    """Parse rules; ``source`` names the text in errors.

    Raises:
        UsageError: The text is not as the module says.
    """
    try:
        document = tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{source}: {error}", hint="class rules are TOML: [[class]] entries") from error
    if unknown := sorted(set(document) - {"class"}):
        raise UsageError(f"{source}: unknown key {unknown[0]!r}", hint="only [[class]] entries are allowed")
    entries = document.get("class")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{source}: no class is defined", hint='begin with [[class]] and name = "..."')
    return ClassRules(tuple(_rule(entry, f"{source}: class {n}") for n, entry in enumerate(entries, 1)))


def _rule(entry: Any, place: str) -> ClassRule:
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is no table", hint="write [[class]], with two brackets")
    name = entry.get("name")
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"{place} has no name", hint='add name = "image/short"')
    place = f"{place} ({name!r})"
    if name == OTHER:
        raise UsageError(f"{place}: the name is reserved", hint="it holds the requests that no rule takes")
    where = entry.get("where")
    if not isinstance(where, dict):
        raise UsageError(
            f"{place} has no conditions", hint='add where = { modality = "image" }, or {} for all'
        )
    if unknown := sorted(set(entry) - {"name", "where"}):
        raise UsageError(f"{place}: unknown key {unknown[0]!r}", hint="conditions go inside where = { ... }")
    return ClassRule(name, tuple(_condition(field, value, place) for field, value in where.items()))


def _condition(field: str, value: Any, place: str) -> Bounds | OneOf:
    kind = _FIELDS.get(field)
    if kind is None:
        close = difflib.get_close_matches(field, _FIELDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"fields are {', '.join(_FIELDS)}"
        raise UsageError(f"{place}: unknown field {field!r}", hint=hint)
    condition = _PARSERS[kind](field, value)
    if condition is None:
        raise UsageError(
            f"{place}: {field} = {value!r} is not understood", hint=f"{field} takes {kind.value}"
        )
    if field == "modality" and isinstance(condition, OneOf) and not set(condition.values) <= set(_MODALITIES):
        raise UsageError(f"{place}: unknown modality {value!r}", hint=f"it is {' or '.join(_MODALITIES)}")
    return condition


def _bounds(field: str, value: Any) -> Bounds | None:
    bounds: tuple[tuple[str, int], ...]
    if isinstance(value, int) and not isinstance(value, bool):
        bounds = (("=", value),)
    elif not isinstance(value, str):
        return None
    elif bound := _BOUND.fullmatch(value.strip()):
        bounds = ((bound[1], int(bound[2])),)
    elif limits := _RANGE.fullmatch(value.strip()):
        bounds = ((">=", int(limits[1])), ("<=", int(limits[2])))
    else:
        return None
    in_order = bounds[0][1] <= bounds[-1][1]
    return Bounds(field, bounds) if in_order and all(0 <= n <= _LARGEST for _, n in bounds) else None


def _texts(field: str, value: Any) -> OneOf | None:
    texts = value if isinstance(value, list) else [value]
    valid = bool(texts) and all(isinstance(text, str) for text in texts)
    return OneOf(field, tuple(texts)) if valid else None


def _flag(field: str, value: Any) -> OneOf | None:
    return OneOf(field, (value,)) if isinstance(value, bool) else None


_PARSERS: Final[dict[_Type, Callable[[str, Any], Bounds | OneOf | None]]] = {
    _Type.NUMBER: _bounds,
    _Type.TEXT: _texts,
    _Type.FLAG: _flag,
}
