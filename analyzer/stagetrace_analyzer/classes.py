"""Traffic classes: ordered rules over what is known of a request.

The rules are in a TOML file, so that they can change without new data::

    [[class]]
    name = "image/short"
    where = { modality = "image", max_tokens = "<=64" }

Rules are tried in the order of the file, and the first one whose conditions all
hold gives the class.  The same name may come twice ("or").  ``where = {}``
takes every request.  An unknown fact meets no condition.  A request that no
rule takes is in the class `OTHER`.

Fields and their conditions are those of `stagetrace_analyzer.conditions`.  Most
are known when a request has arrived.  Some are known only at its end and depend
on how it was served: a class that asks for them is *post* (see
`ClassRules.post_names`).
"""

from __future__ import annotations

import importlib.resources
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stagetrace.errors import UsageError
from stagetrace.timeline import Item, RequestTimeline
from stagetrace_analyzer.conditions import (
    CLASS_FIELDS,
    Bind,
    Condition,
    Facts,
    Value,
    parse_condition,
)
from stagetrace_analyzer.toml_lines import lines_of

LARGEST_FILE: Final = 1_000_000
"""Bytes of the longest file of rules that is read."""

OTHER: Final = "other"
"""The class of a request that no rule takes."""

_FROM_RECORDS: Final = (
    "prompt_tokens",
    "max_tokens",
    "label",
    "phase",
    "arm",
    "model",
    "stream",
    "cached_tokens",
    "output_tokens",
    "finish_reason",
)
"""Fields that are in a request's records as they are."""

_OF_MEDIA: Final = ("pixels", "media_bytes")
"""Fields that a request without media items does not have; that is not unknown."""

_PLACE: Final = re.compile(r"(.*) \(at line (\d+), column \d+\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ClassRule:
    """A class and the conditions that must all hold for it."""

    name: str
    where: tuple[Condition, ...]

    def sql(self, bind: Bind) -> str:
        """Render as a branch of a SQL ``CASE``; ``bind`` turns a value into a parameter."""
        conditions = " AND ".join(condition.sql(bind) for condition in self.where) or "TRUE"
        return f"WHEN {conditions} THEN {bind(self.name)}"

    def holds(self, facts: Facts) -> bool:
        """Whether all conditions hold."""
        return all(condition.holds(facts) for condition in self.where)

    @property
    def at_arrival(self) -> tuple[Condition, ...]:
        """The conditions on what does not depend on how a request is served."""
        return tuple(condition for condition in self.where if not CLASS_FIELDS[condition.field].post)

    @property
    def is_post(self) -> bool:
        """Whether a condition is on what is known only at the end."""
        return len(self.at_arrival) < len(self.where)


@dataclass(frozen=True, slots=True)
class ClassRules:
    """Rules in the order in which they are tried."""

    rules: tuple[ClassRule, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The classes in the order of the rules, each once, then `OTHER`."""
        return tuple(dict.fromkeys([*(rule.name for rule in self.rules), OTHER]))

    @property
    def post_names(self) -> tuple[str, ...]:
        """The classes that may depend on how requests were served, in the order of `names`.

        A rule is post if it asks for what is known only at the end; so is a later
        one that may get a request because such a condition failed.  Of all other
        classes, what is known only at the end decides nothing.
        """
        rules = [*self.rules, ClassRule(OTHER, ())]
        post = {
            rule.name
            for place, rule in enumerate(rules)
            if rule.is_post or any(_leaves(earlier, rule, rules[:place]) for earlier in rules[:place])
        }
        return tuple(name for name in self.names if name in post)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the rules ask for, in the order of the rules, each once."""
        return tuple(dict.fromkeys(condition.field for rule in self.rules for condition in rule.where))

    def unknown_expressions(self) -> dict[str, str]:
        """Return, by field of `fields`, a SQL aggregate that counts the requests of which it is not known.

        It needs the columns of the requests, and ``modality``; it has no
        parameters.  A request without media items lacks no size of them.
        """
        return {
            field: f"count(*) FILTER (WHERE {field} IS NULL"
            f"{' AND media_items IS DISTINCT FROM 0' if field in _OF_MEDIA else ''})"
            for field in self.fields
        }

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


def _leaves(post: ClassRule, rule: ClassRule, before: list[ClassRule]) -> bool:
    """Whether a rule may get a request because a condition of a post rule failed.

    Not if no request can be in both by what is known at arrival, and not if a
    rule before it takes all that are, whatever becomes of them.
    """
    if not post.is_post:
        return False
    both = (*post.at_arrival, *rule.at_arrival)
    if any(one.excludes(other) for one in both for other in both):
        return False
    return not any(
        all(any(known.implies(wanted) for known in both) for wanted in taking.where) for taking in before
    )


def class_facts(request: RequestTimeline) -> dict[str, Value | None]:
    """Return the fields that rules are about, for one request; None is unknown."""
    items = request.items.values()
    media_items = request.facts.get("media_items", len(items) or None)
    modality = None
    if isinstance(media_items, int):
        modality = "image" if media_items > 0 else "text"
    return {name: request.facts.get(name) for name in _FROM_RECORDS} | {
        "instance": request.instance,
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
        with path.open("rb") as file:
            read = file.read(LARGEST_FILE + 1)
        text = read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text", hint="--classes takes a TOML file") from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', error)}",
            hint="--classes takes a TOML file of class rules",
        ) from error
    if len(read) > LARGEST_FILE:
        raise UsageError(
            f"{path} is over {LARGEST_FILE:,} bytes", hint="--classes takes a TOML file of rules"
        )
    return parse_rules(text, source=str(path))


def parse_rules(text: str, *, source: str) -> ClassRules:
    """Parse rules; ``source`` names the text in errors, which also tell the line.

    Raises:
        UsageError: The text is not as the module says.
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        message, place = str(error), source
        if found := _PLACE.fullmatch(message):
            message, place = found[1], f"{source}, line {found[2]}"
        raise UsageError(f"{place}: {message}", hint="class rules are TOML: [[class]] entries") from error
    return _Reader(source, lines_of(text)).rules(document)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes rules of a TOML document; every error names the source and the line."""

    source: str
    lines: dict[tuple[str | int, ...], int]

    def rules(self, document: dict[str, Any]) -> ClassRules:
        for key in document:
            if key != "class":
                raise self._error((key,), f"unknown key {key!r}", "only [[class]] entries are allowed")
        entries = document.get("class")
        if not isinstance(entries, list) or not entries:
            raise self._error(("class",), "no class is defined", 'begin with [[class]] and name = "..."')
        return ClassRules(tuple(self._rule(number, entry) for number, entry in enumerate(entries)))

    def _error(self, path: tuple[str | int, ...], message: str, hint: str | None) -> UsageError:
        line = self.lines.get(path)
        place = self.source if line is None else f"{self.source}, line {line}"
        return UsageError(f"{place}: {message}", hint=hint)

    def _rule(self, number: int, entry: Any) -> ClassRule:
        path, name = ("class", number), f"class {number + 1}"
        if not isinstance(entry, dict):
            raise self._error(path, f"{name} is no table", "write [[class]], with two brackets")
        found = self._name(number, entry)
        name = f"{name} ({found!r})"
        for key in entry:
            if key not in {"name", "where"}:
                hint = "conditions go inside where = { ... }"
                raise self._error((*path, key), f"{name}: unknown key {key!r}", hint)
        where = entry.get("where")
        if not isinstance(where, dict):
            hint = 'add where = { modality = "image" }, or {} for all'
            raise self._error(path, f"{name} has no conditions", hint)
        return ClassRule(found, tuple(self._conditions(number, name, where)))

    def _name(self, number: int, entry: dict[str, Any]) -> str:
        path, place = ("class", number, "name"), f"class {number + 1}"
        name = entry.get("name")
        if not isinstance(name, str) or not name.strip():
            raise self._error(path if "name" in entry else path[:2], f"{place} has no name", _NAMED)
        if not name.isprintable():
            raise self._error(path, f"{place}: the name {name!r} is not printable", _NAMED)
        if name == OTHER:
            hint = "it holds the requests that no rule takes"
            raise self._error(path, f"{place} ({name!r}): the name is reserved", hint)
        return name

    def _conditions(self, number: int, name: str, where: dict[str, Any]) -> Iterable[Condition]:
        for field, value in where.items():
            try:
                yield parse_condition(field, value, CLASS_FIELDS)
            except UsageError as error:
                path = ("class", number, "where", field)
                raise self._error(path, f"{name}: {error.message}", error.hint) from error


_NAMED: Final = 'add name = "image/short"'
