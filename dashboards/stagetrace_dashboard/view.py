"""What a page shows, as its address says it: everything that a reader chose stands in the URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from stagetrace.errors import UsageError
from stagetrace.stages import Horizon, Outcome, Stage
from stagetrace_analyzer.conditions import OneOf
from stagetrace_analyzer.queries.requests import SORTABLE, RequestFilter
from stagetrace_analyzer.selection import Moment, Selection, Where
from stagetrace_dashboard.splits import SPLITS
from stagetrace_dashboard.words import iso_time

HOME: Final = "overview"
"""The page at ``/``."""

_LONGEST: Final = 200
_MOST_REQUESTS: Final = 2
_LARGEST: Final = 2**63 - 1
_NS_PER_MS: Final = 1_000_000


class RequestKey(NamedTuple):
    """A request: number of the dataset, number in it."""

    dataset: int
    request: int

    def __str__(self) -> str:
        """As it stands in an address."""
        return f"{self.dataset}-{self.request}"


@dataclass(frozen=True, slots=True)
class View:
    """A page and what was chosen on it; None is no choice.

    Times are ns since the epoch, in [``since_unix_ns``, ``until_unix_ns``).
    ``by_phase`` None is as the data are; ``requests`` are shown one beside the other.
    """

    page: str = HOME
    traffic_class: str | None = None
    phase: str | None = None
    model: str | None = None
    arm: str | None = None
    instance: str | None = None
    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    by_phase: bool | None = None
    horizon: Horizon = Horizon.TTFT
    outcome: str | None = None
    longest_wait: str | None = None
    media_items: int | None = None
    min_ttft_ms: int | None = None
    min_completion_ms: int | None = None
    id: str | None = None
    sort: str = "received_unix_ns"
    descending: bool = False
    engine: str | None = None
    split: str | None = None
    requests: tuple[RequestKey, ...] = ()

    @property
    def search(self) -> str:
        """The query string, with its question mark; empty if nothing was chosen."""
        texts = {
            name: field.write(value)
            for name, field in _FIELDS.items()
            if (value := getattr(self, field.name)) != _DEFAULTS[field.name]
        }
        return f"?{urlencode(texts)}" if texts else ""

    @property
    def href(self) -> str:
        """The address of the view."""
        return f"/{'' if self.page == HOME else self.page}{self.search}"

    @property
    def filter(self) -> RequestFilter:
        """The requests that a list of this view has."""
        return RequestFilter(
            traffic_class=self.traffic_class,
            phase=self.phase,
            model=self.model,
            arm=self.arm,
            instance=self.instance,
            outcome=self.outcome,
            longest_wait=self.longest_wait,
            since_unix_ns=self.since_unix_ns,
            until_unix_ns=self.until_unix_ns,
            media_items=self.media_items,
            min_ttft_ns=None if self.min_ttft_ms is None else self.min_ttft_ms * _NS_PER_MS,
            min_completion_ns=None if self.min_completion_ms is None else self.min_completion_ms * _NS_PER_MS,
            id=self.id,
        )

    def selection(self, *, with_phase: bool) -> Selection:
        """Return the requests that an analysis for this view is of; all classes of them."""
        phases = _some(self.phase) if with_phase else ()
        return Selection(
            since=_moment(self.since_unix_ns),
            until=_moment(self.until_unix_ns),
            models=_some(self.model),
            arms=_some(self.arm),
            instances=_some(self.instance),
            where=tuple(Where(f"phase={phase}", OneOf("phase", (phase,))) for phase in phases),
        )

    def on(self, page: str) -> View:
        """Return the same choices on another page, without what belongs to one page only."""
        kept = {name: getattr(self, name) for name in _EVERYWHERE}
        return View(page=page, **kept)

    def choose(self, **changes: Any) -> View:
        """Return the view with other choices."""
        return replace(self, **changes)


_EVERYWHERE: Final = (
    "traffic_class",
    "phase",
    "model",
    "arm",
    "instance",
    "since_unix_ns",
    "until_unix_ns",
    "by_phase",
    "horizon",
)
"""Choices that go along from page to page."""


def _moment(unix_ns: int | None) -> Moment | None:
    return None if unix_ns is None else Moment(iso_time(unix_ns), unix_ns, is_span=False)


def _some(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _LARGEST:
        raise ValueError(text)
    return int(text)


def _milliseconds(text: str) -> int:
    number = _number(text)
    if number > _LARGEST // _NS_PER_MS:
        raise ValueError(text)
    return number


def _stage(text: str) -> str:
    return Stage(text).value


def _outcome(text: str) -> str:
    return Outcome(text).value


def _sort(text: str) -> str:
    if text not in SORTABLE:
        raise ValueError(text)
    return text


def _split(text: str) -> str:
    if text not in SPLITS:
        raise ValueError(text)
    return text


def _flag(text: str) -> bool:
    return {"1": True, "0": False}[text]


def _requests(text: str) -> tuple[RequestKey, ...]:
    keys = tuple(dict.fromkeys(RequestKey(*map(_number, key.split("-", 1))) for key in text.split(",")))
    if len(keys) > _MOST_REQUESTS:
        raise ValueError(text)
    return keys


def _write_requests(keys: tuple[RequestKey, ...]) -> str:
    return ",".join(map(str, keys))


_FIELDS: Final[Mapping[str, _Field]] = {
    "class": _Field("traffic_class", str),
    "phase": _Field("phase", str),
    "model": _Field("model", str),
    "arm": _Field("arm", str),
    "instance": _Field("instance", str),
    "since": _Field("since_unix_ns", _number),
    "until": _Field("until_unix_ns", _number),
    "by_phase": _Field("by_phase", _flag, lambda value: str(int(value))),
    "horizon": _Field("horizon", Horizon),
    "outcome": _Field("outcome", _outcome),
    "wait": _Field("longest_wait", _stage),
    "media_items": _Field("media_items", _number),
    "min_ttft_ms": _Field("min_ttft_ms", _milliseconds),
    "min_completion_ms": _Field("min_completion_ms", _milliseconds),
    "id": _Field("id", str),
    "sort": _Field("sort", _sort),
    "descending": _Field("descending", _flag, lambda value: str(int(value))),
    "engine": _Field("engine", str),
    "split": _Field("split", _split),
    "requests": _Field("requests", _requests, _write_requests),
}
"""Fields of a view by the parameter of the address."""

_DEFAULTS: Final = {field.name: field.default for field in fields(View)}

PARAMETERS: Final = tuple(_FIELDS)
"""Names of the parameters of an address."""


def parse_view(page: str, search: str) -> View:
    """Read the address of a view.

    Args:
        page: Name of the page, empty for `HOME`.
        search: The query string, with or without its question mark.  Parameters that are
            not ours are left alone.

    Raises:
        UsageError: A parameter has a value that it cannot have.
    """
    chosen: dict[str, Any] = {}
    for name, text in _pairs(search):
        field = _FIELDS.get(name)
        if field is None or not text:
            continue
        try:
            chosen[field.name] = field.read(text)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"the address has {name}={text[:40]!r}, which is not understood",
                hint="open the page from its menu and choose again",
            ) from error
    return View(page=page or HOME, **chosen)


def _pairs(search: str) -> list[tuple[str, str]]:
    try:
        pairs = parse_qsl(search.removeprefix("?"), max_num_fields=len(_FIELDS) * 2, errors="strict")
    except (ValueError, UnicodeError) as error:
        raise UsageError("the address is not understood", hint="open the page from its menu") from error
    for name, text in pairs:
        if len(text) > _LONGEST and name in _FIELDS:
            raise UsageError(
                f"the address has a value of {name} that is too long", hint="open the page from its menu"
            )
    return pairs
