"""How figures, times and texts are written on a page."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

NOTHING: Final = "-"
"""What stands where a fact is unknown."""

_NS_PER_US: Final = 1_000
_NS_PER_MS: Final = 1_000_000
_NS_PER_S: Final = 1_000_000_000
_DIGITS: Final = 3
_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_DAY_S: Final = 86_400


def duration(ns: float | None) -> str:
    """Write a duration with three digits and the unit that suits it."""
    if ns is None:
        return NOTHING
    for unit, size in (("s", _NS_PER_S), ("ms", _NS_PER_MS)):
        if abs(ns) >= size:
            return f"{_three_digits(ns / size)} {unit}"
    return f"{_three_digits(ns / _NS_PER_MS)} ms" if abs(ns) >= _NS_PER_US else f"{ns:,.0f} ns"


def _three_digits(value: float) -> str:
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, _DIGITS)}f}"


def count(value: float | None) -> str:
    """Write a number of things."""
    return NOTHING if value is None else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Write a share, between 0 and 1, in percent."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def age(ns: int) -> str:
    """Write how long ago something was."""
    seconds = max(0, ns // _NS_PER_S)
    for unit, size in (("d", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def iso_time(unix_ns: int) -> str:
    """Write a time as ISO 8601 in UTC, with as many digits as it has."""
    seconds, rest = divmod(unix_ns, _NS_PER_S)
    digits = f".{rest:09d}".rstrip("0") if rest else ""
    return f"{_datetime(seconds):%Y-%m-%dT%H:%M:%S}{digits}Z"


def clock_time(unix_ns: int) -> str:
    """Write a time of day in UTC, to the millisecond."""
    seconds, rest = divmod(unix_ns, _NS_PER_S)
    return f"{_datetime(seconds):%H:%M:%S}.{rest // _NS_PER_MS:03d}"


def date_time(unix_ns: int) -> str:
    """Write date and time in UTC, to the second."""
    return f"{_datetime(unix_ns // _NS_PER_S):%Y-%m-%d %H:%M:%S} UTC"


def _datetime(seconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=UTC)
