"""Which requests of the data are looked at: time, class, model, arm, instance, and what is known of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from stagetrace.errors import UsageError
from stagetrace_analyzer.classes import ClassRules
from stagetrace_analyzer.conditions import Condition, OneOf, Value, did_you_mean, parse_comparison, shown

_SPAN: Final = re.compile(r"(\d{1,9})(s|m|h|d)", re.ASCII)
_SPAN_NS: Final = {"s": 10**9, "m": 60 * 10**9, "h": 3_600 * 10**9, "d": 86_400 * 10**9}
_TIME: Final = re.compile(
    r"""(?P<begin> \d{4}-?\d\d-?\d\d (?: [T ] \d\d (?: :?\d\d (?: :?(?P<s>\d\d) )? )? )? )
    (?(s) (?: [.,] (?P<fraction> \d{1,9} ) )? )
    (?P<zone> Z | [+-] \d\d (?: :?\d\d )? )?""",
    re.ASCII | re.VERBOSE,
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES: Final = "write 2026-01-31T12:00:00Z, or a span before the newest request such as 30m, 2h or 1d"


class Moment(NamedTuple):
    """A time as the user gave it.

    ``ns`` is since the epoch, or, if ``is_span``, before the newest request.
    """

    text: str
    ns: int
    is_span: bool

    def unix_ns(self, newest_unix_ns: int) -> int:
        """Return the time in ns since the epoch."""
        return newest_unix_ns - self.ns if self.is_span else self.ns


class Where(NamedTuple):
    """A condition, and how the user wrote it."""

    text: str
    condition: Condition


@dataclass(frozen=True, slots=True)
class Selection:
    """Which requests are looked at; without arguments, all.

    Values of one field are alternatives; the fields, and all of ``where``, must
    hold together.  What is not known of a request meets no condition on it.

    Attributes:
        since: Receipt not before.
        until: Receipt before.
        classes: Names of traffic classes; empty for all.
        models: Served model names; empty for all.
        arms: Arms of an experiment; empty for all.
        instances: Servers; empty for all.
        where: Further conditions.
    """

    since: Moment | None = None
    until: Moment | None = None
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    where: tuple[Where, ...] = ()

    def sql(self, newest_unix_ns: int | None) -> tuple[str, dict[str, Value]]:
        """Compile all but ``classes`` to a SQL expression and its parameters by name.

        The expression needs the columns of the requests, and ``modality``; it is
        true or false, never null.  All values are parameters; the SQL holds none.

        Args:
            newest_unix_ns: When the newest request of the data was received, None
                if there is none.

        Raises:
            UsageError: ``since`` is not before ``until``.
        """
        parameters: dict[str, Value] = {}

        def bind(value: Value) -> str:
            name = f"selection_{len(parameters)}"
            parameters[name] = value
            return f"${name}"

        conditions = [condition.sql(bind) for condition in self._conditions()]
        known = [f"coalesce({' AND '.join(conditions)}, FALSE)"] if conditions else []
        return " AND ".join([*self._times(newest_unix_ns, bind), *known]) or "TRUE", parameters

    def _times(self, newest_unix_ns: int | None, bind: Callable[[Value], str]) -> Iterator[str]:
        if newest_unix_ns is None:
            if any(moment and moment.is_span for moment in (self.since, self.until)):
                yield "FALSE"
                return
            newest_unix_ns = 0
        _check_order(self.since, self.until, newest_unix_ns)
        if self.since:
            yield f"received_unix_ns >= {bind(self.since.unix_ns(newest_unix_ns))}"
        if self.until:
            yield f"received_unix_ns < {bind(self.until.unix_ns(newest_unix_ns))}"

    def _conditions(self) -> Iterator[Condition]:
        for field, values in (("model", self.models), ("arm", self.arms), ("instance", self.instances)):
            if values:
                yield OneOf(field, values)
        yield from (condition for _, condition in self.where)

    def check(self, rules: ClassRules) -> None:
        """Check that the rules have the selected classes.

        Raises:
            UsageError: A class is unknown.
        """
        for name in self.classes:
            if name not in rules.names:
                hint = did_you_mean(name, rules.names, "classes are")
                raise UsageError(f"no rule makes the class {shown(name)}", hint=hint)

    def described(self) -> dict[str, tuple[str, ...]]:
        """Return the values as the user gave them, by option without its dashes; only those given."""
        given = {
            "since": (self.since.text,) if self.since else (),
            "until": (self.until.text,) if self.until else (),
            "class": self.classes,
            "model": self.models,
            "arm": self.arms,
            "instance": self.instances,
            "where": tuple(text for text, _ in self.where),
        }
        return {option: values for option, values in given.items() if values}


def parse_selection(
    *,
    since: str | None = None,
    until: str | None = None,
    classes: Sequence[str] = (),
    models: Sequence[str] = (),
    arms: Sequence[str] = (),
    instances: Sequence[str] = (),
    where: Sequence[str] = (),
) -> Selection:
    """Make a selection of what a user typed.

    Args:
        since: ISO 8601, UTC unless it has a zone; or a span before the newest
            request, such as ``30m``, ``2h``, ``1d``.
        until: The same.
        classes: Names; the rules that have them may be chosen later.
        models: Names.
        arms: Names.
        instances: Names.
        where: Each ``FIELD OP VALUE``, see `stagetrace_analyzer.conditions`.

    Raises:
        UsageError: A value is not understood, or ``since`` is not before ``until``.
    """
    begin, end = _moment("since", since), _moment("until", until)
    if begin and end and begin.is_span == end.is_span:
        _check_order(begin, end, 0)
    return Selection(
        since=begin,
        until=end,
        classes=_names("class", classes),
        models=_names("model", models),
        arms=_names("arm", arms),
        instances=_names("instance", instances),
        where=tuple(_where(text) for text in where),
    )


def _moment(option: str, text: str | None) -> Moment | None:
    if text is None:
        return None
    if span := _SPAN.fullmatch(text):
        return Moment(text, int(span[1]) * _SPAN_NS[span[2]], is_span=True)
    parts = _TIME.fullmatch(text)
    try:
        time = datetime.fromisoformat(parts["begin"] + (parts["zone"] or "") if parts else "")
    except ValueError as error:
        raise UsageError(f"--{option}: {shown(text)} is no time", hint=_TIMES) from error
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    fraction = (parts and parts["fraction"]) or ""
    ns = (time - _EPOCH) // timedelta(seconds=1) * 10**9 + int(fraction.ljust(9, "0"))
    return Moment(text, ns, is_span=False)


def _check_order(since: Moment | None, until: Moment | None, newest_unix_ns: int) -> None:
    if since and until and since.unix_ns(newest_unix_ns) >= until.unix_ns(newest_unix_ns):
        raise UsageError(
            f"--since {since.text} is not before --until {until.text}", hint="exchange them, or give one"
        )


def _names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    for value in values:
        if not value.strip():
            raise UsageError(f"--{option} is empty", hint="give a name, or leave it out for all")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"--{option}: {shown(value)} is not UTF-8 text", hint="type the name again"
            ) from error
    return tuple(dict.fromkeys(values))


def _where(text: str) -> Where:
    try:
        return Where(text, parse_comparison(text))
    except UsageError as error:
        raise UsageError(f"--where: {error.message}", hint=error.hint) from error
