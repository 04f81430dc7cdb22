"""What a dashboard was started with: the requests that all of it is about, and a view's part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stagetrace_analyzer.conditions import OneOf
from stagetrace_analyzer.selection import Moment, Selection, Where

if TYPE_CHECKING:
    from collections.abc import Callable

_ALL: Final = Selection()


@dataclass(frozen=True, slots=True)
class Scope:
    """Options that hold for every page.

    Attributes:
        selection: The requests that the dashboard is about.
        by_phase: Whether phases are apart unless a view says otherwise; else they are if there are several.
    """

    selection: Selection = _ALL
    by_phase: bool = False

    def __str__(self) -> str:
        """Say what was selected; empty if all was."""
        asked = [f"{name} {value}" for name, values in self.selection.described().items() for value in values]
        return f"Limited to {', '.join(asked)}." if asked else ""

    def since(self, chosen: Moment | None, newest_unix_ns: int | None) -> Moment | None:
        """Return the later begin of the scope's and a view's."""
        return _one(max, self.selection.since, chosen, newest_unix_ns)

    def until(self, chosen: Moment | None, newest_unix_ns: int | None) -> Moment | None:
        """Return the earlier end of the scope's and a view's."""
        return _one(min, self.selection.until, chosen, newest_unix_ns)

    def narrowed(self, chosen: Selection, newest_unix_ns: int | None) -> Selection:
        """Return the requests that are in the scope and in what a view has chosen of all.

        Args:
            chosen: Without classes, which views choose among the reports.
            newest_unix_ns: When the newest request of the data was received, None without any.
        """
        base = self.selection
        fields = {
            "model": (base.models, chosen.models),
            "arm": (base.arms, chosen.arms),
            "instance": (base.instances, chosen.instances),
        }
        # Values of one field are alternatives, and these must both hold.
        both = tuple(
            Where(f"{name}={', '.join(names)}", OneOf(name, names))
            for name, (ours, names) in fields.items()
            if ours and names
        )
        models, arms, instances = (ours or theirs for ours, theirs in fields.values())
        return Selection(
            since=self.since(chosen.since, newest_unix_ns),
            until=self.until(chosen.until, newest_unix_ns),
            classes=base.classes,
            models=models,
            arms=arms,
            instances=instances,
            where=(*base.where, *chosen.where, *both),
        )


def _one(
    which: Callable[..., Moment], ours: Moment | None, theirs: Moment | None, newest_unix_ns: int | None
) -> Moment | None:
    if ours is None or theirs is None:
        return ours or theirs
    return which(ours, theirs, key=lambda moment: moment.unix_ns(newest_unix_ns or 0))
