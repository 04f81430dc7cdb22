"""A class taken apart by one fact: the same analysis, with finer rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagetrace_analyzer.classes import OTHER, ClassRule, ClassRules
from stagetrace_analyzer.conditions import LARGEST, Bounds


@dataclass(frozen=True, slots=True)
class Split:
    """Ranges of a fact, by their names; each begins after the one before."""

    title: str
    field: str
    upper: Mapping[str, int]


SPLITS: Final[Mapping[str, Split]] = {
    "output": Split(
        "by output tokens",
        "output_tokens",
        {
            "up to 16 output tokens": 16,
            "17 to 64": 64,
            "65 to 256": 256,
            "257 to 1,024": 1024,
            "more than 1,024": LARGEST,
        },
    ),
    "media": Split(
        "by media items",
        "media_items",
        {"none": 0, "1 item": 1, "2 items": 2, "3 or 4": 4, "5 to 8": 8, "more than 8": LARGEST},
    ),
    "pixels": Split(
        "by pixels",
        "pixels",
        {
            "up to 0.1 megapixels": 100_000,
            "0.1 to 0.5": 500_000,
            "0.5 to 1": 1_000_000,
            "1 to 4": 4_000_000,
            "more than 4 megapixels": LARGEST,
        },
    ),
}
"""How a class can be taken apart, by the name that stands in an address."""


def split_rules(rules: ClassRules, traffic_class: str, split: Split) -> ClassRules:
    """Return rules by which a class is the same requests as before, in a class for each range.

    All other rules stay in their places, so that they take the same requests.  The
    names of the ranges are those of `Split.upper`.
    """
    own = [rule for rule in rules.rules if rule.name == traffic_class]
    if traffic_class == OTHER:
        return ClassRules((*rules.rules, *_finer(ClassRule(OTHER, ()), split)))
    return ClassRules(
        tuple(
            finer
            for rule in rules.rules
            for finer in (_finer(rule, split) if rule in own else _kept(rule, split))
        )
    )


def split_classes(classes: Sequence[str], traffic_class: str, split: Split) -> tuple[str, ...]:
    """Return the names that selected classes have by `split_rules`."""
    others = (_beside(name, split) for name in classes if name != traffic_class)
    return (*split.upper, *others) if traffic_class in classes else tuple(others)


def _finer(rule: ClassRule, split: Split) -> Iterator[ClassRule]:
    low = 0
    for name, high in split.upper.items():
        yield ClassRule(name, (*rule.where, Bounds(split.field, low, high)))
        low = high + 1


def _kept(rule: ClassRule, split: Split) -> Iterator[ClassRule]:
    yield ClassRule(_beside(rule.name, split), rule.where)


def _beside(name: str, split: Split) -> str:
    """Return the name of another class, which must not be that of a range."""
    return f"{name} " if name in split.upper else name
