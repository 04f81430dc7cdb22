"""One line through parts that lie within and beside each other.

Parts without a media item nest: the one that began last says where the request
was.  Media items load beside each other: of them the path follows the one that
finished last, found backwards from where all were ready (as CRISP and Dapper's
critical path tools do), and the others only cost what that one cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from stagetrace.timeline import Part


class Stretch(NamedTuple):
    """What is visible of a part; nanoseconds of the monotonic clock.

    Attributes:
        begin: Begin.
        end: End, always after the begin.
        part: The part, cut to the time that is looked at.
    """

    begin: int
    end: int
    part: Part


def critical_path(parts: Iterable[Part], begin: int, end: int) -> list[Stretch]:
    """Find the line of parts that leads through ``[begin, end)``.

    Args:
        parts: Parts of one request, in any order; one without an end lasts until ``end``.
        begin: Begin of the time that is looked at.
        end: Its end.

    Returns:
        Stretches in order of time, without overlap; the time between them is in no part.
    """
    lanes: dict[int | None, list[Part]] = defaultdict(list)
    for part in parts:
        cut = Part(
            part.stage, max(part.begin, begin), end if part.end is None else min(part.end, end), part.item
        )
        if cut.begin < (cut.end or 0):
            lanes[part.item].append(cut)
    main = _flat(lanes.pop(None, []))
    items = {item: _flat(lane) for item, lane in lanes.items() if item is not None}
    if not items:
        return main
    return _over(main, list(_backwards(main, items, end))[::-1])


def _flat(parts: list[Part]) -> list[Stretch]:
    """Lay parts of one lane into a line: at every instant the one that began last."""
    line: list[Stretch] = []
    opened: list[Part] = []
    cursor = 0
    for part in sorted(parts, key=_outer_first):
        cursor = _advance(line, opened, cursor, part.begin)
        opened.append(part)
    _advance(line, opened, cursor, None)
    return line


def _outer_first(part: Part) -> tuple[int, int, str]:
    return part.begin, -_end(part), part.stage


def _end(part: Part) -> int:
    return part.begin if part.end is None else part.end


def _advance(line: list[Stretch], opened: list[Part], cursor: int, until: int | None) -> int:
    """Write down what is visible of the opened parts up to a time, or to their end; return where that is."""
    while opened and (until is None or cursor < until):
        top = opened[-1]
        stop = _end(top) if until is None else min(_end(top), until)
        first = max(cursor, top.begin)
        if first < stop:
            line.append(Stretch(first, stop, top))
            cursor = stop
        if _end(top) <= cursor:
            opened.pop()
    return cursor if until is None else max(cursor, until)


class _Lane:
    """A line, looked at from a time that only goes back."""

    def __init__(self, line: list[Stretch]) -> None:
        self._line = line
        self._place = len(line) - 1

    def before(self, time: int) -> Stretch | None:
        """Return the last stretch that begins before a time, cut to it."""
        while self._place >= 0 and self._line[self._place].begin >= time:
            self._place -= 1
        if self._place < 0:
            return None
        found = self._line[self._place]
        return found if found.end <= time else found._replace(end=time)


def _backwards(main: list[Stretch], items: dict[int, list[Stretch]], end: int) -> Iterator[Stretch]:
    """Go back from the end and return the stretches of items that what follows had to wait for."""
    trunk = _Lane(main)
    lanes = {item: _Lane(line) for item, line in items.items()}
    time, item = end, None
    while True:
        before = trunk.before(time)
        found = ((place, lane.before(time)) for place, lane in lanes.items())
        waited = {place: one for place, one in found if one is not None and _is_waited_for(one, before)}
        if item not in waited:
            # The one that finished last; of several the last one, as among the items that vLLM loads.
            item = max(waited, key=lambda place: (waited[place].end, place), default=None)
        if item is not None:
            yield waited[item]
            time = waited[item].begin
        elif before is None:
            return
        else:
            time = before.begin


def _is_waited_for(one: Stretch, main: Stretch | None) -> bool:
    """Whether the path leads through an item: it lasted longer than the main line, or lies within it."""
    if main is None or one.end > main.end:
        return True
    return main.part.begin <= one.part.begin and _end(one.part) <= _end(main.part)


def _over(below: list[Stretch], above: list[Stretch]) -> list[Stretch]:
    """Lay one line over another."""
    line: list[Stretch] = []
    for stretch in below:
        cursor = stretch.begin
        for other in above[bisect_left(above, cursor + 1, key=attrgetter("end")) :]:
            if other.begin >= stretch.end:
                break
            if cursor < other.begin:
                line.append(stretch._replace(begin=cursor, end=other.begin))
            cursor = max(cursor, other.end)
        if cursor < stretch.end:
            line.append(stretch._replace(begin=cursor))
    return sorted(line + above, key=attrgetter("begin"))
