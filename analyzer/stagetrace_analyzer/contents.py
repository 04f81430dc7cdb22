"""What the data hold that a selection can choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stagetrace_analyzer.classes import ClassRules
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.statements import sql

_NS: Final = 10**9
_LISTED: Final = 6
_LONGEST: Final = 60


@dataclass(frozen=True, slots=True)
class Contents:
    """What can be selected: times of receipt, and names.

    ``faults`` counts, by what is wrong with them, requests that cannot; ``oldest_unix_ns``
    and ``newest_unix_ns`` are None without others.
    """

    requests: int
    faults: Mapping[str, int]
    oldest_unix_ns: int | None
    newest_unix_ns: int | None
    classes: tuple[str, ...]
    models: tuple[str, ...]
    arms: tuple[str, ...]
    instances: tuple[str, ...]

    def __str__(self) -> str:
        """Say it on one line; the times can be given to ``--since`` and ``--until`` as they are."""
        names = (
            _listed("class", "classes", self.classes),
            _listed("model", "models", self.models),
            _listed("arm", "arms", self.arms),
            _listed("instance", "instances", self.instances),
            *(f"{count:,} requests {fault} cannot be used" for fault, count in self.faults.items()),
        )
        if self.oldest_unix_ns is None or self.newest_unix_ns is None:
            return "; ".join(names)
        # Whole seconds that hold all of them.
        begin, end = _utc(self.oldest_unix_ns // _NS), _utc(self.newest_unix_ns // _NS + 1)
        return "; ".join([f"{begin} to {end}", *names])


def read_contents(datasets: Sequence[Path], rules: ClassRules) -> Contents:
    """Read what datasets hold.

    Raises:
        DataError: A table is missing, broken, or of another major schema version.
        UsageError: No dataset is given.
    """
    case, parameters = rules.case_expression()
    with open_dataset(datasets) as connection:
        query = sql("contents").format(traffic_class=case)
        (found,) = connection.execute(query, parameters).fetchall()
    requests, faults, oldest, newest, classes, *names = found
    models, arms, instances = (tuple(values or ()) for values in names)
    in_order = tuple(name for name in rules.names if name in (classes or ()))
    return Contents(requests, faults or {}, oldest, newest, in_order, models, arms, instances)


def _utc(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _listed(one: str, many: str, names: Sequence[str]) -> str:
    if not names:
        return f"no {one}"
    shown = ", ".join(_shown(name) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{one if len(names) == 1 else many} {shown}{more}"


def _shown(name: str) -> str:
    """Return a name as it may go to a terminal: clients choose some of them."""
    plain = name if name.isprintable() else ascii(name)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."
