"""What a reader pointed at in a figure, as a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from stagetrace_dashboard.view import View

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NS_PER_US: Final = 1_000
_MICROSECOND_DIGITS: Final = 6


def limited(view: View, layout: dict[str, Any] | None) -> View:
    """Return the view limited to the time that was dragged over; all of it after a double click."""
    layout = layout or {}
    for axis in ("xaxis", "xaxis2", "xaxis3"):
        if layout.get(f"{axis}.autorange"):
            return view.choose(since_unix_ns=None, until_unix_ns=None)
        begin, end = _range(layout, axis)
        if begin is not None and end is not None and begin < end:
            return view.choose(since_unix_ns=begin, until_unix_ns=end)
    return view


def _range(layout: dict[str, Any], axis: str) -> tuple[int | None, int | None]:
    both = layout.get(f"{axis}.range")
    if isinstance(both, list) and len(both) == 2:  # noqa: PLR2004 - a begin and an end
        return _unix_ns(both[0]), _unix_ns(both[1])
    return _unix_ns(layout.get(f"{axis}.range[0]")), _unix_ns(layout.get(f"{axis}.range[1]"))


def _unix_ns(text: object) -> int | None:
    """Read a time of a date axis, UTC; to the microsecond, as the command line takes it."""
    if not isinstance(text, str):
        return None
    whole, _, fraction = text.partition(".")
    try:
        time = datetime.fromisoformat(whole).replace(tzinfo=UTC)
        micros = int(fraction[:_MICROSECOND_DIGITS].ljust(_MICROSECOND_DIGITS, "0") or 0)
    except ValueError:
        return None
    return max(0, ((time - _EPOCH) // timedelta(microseconds=1) + micros) * _NS_PER_US)


def picked(view: View, click: dict[str, Any] | None, bars: Sequence[Mapping[str, str]]) -> View:
    """Return the view with what a bar that was clicked stands for; a second click takes it back.

    Args:
        view: Before.
        click: What was clicked on; ``y`` is the bar's place.
        bars: What each bar chooses, by place.
    """
    place = (click or {}).get("y")
    if not isinstance(place, int) or not 0 <= place < len(bars):
        return view
    new = view.choose(**bars[place])
    return view.choose(**dict.fromkeys(bars[place])) if new == view else new
