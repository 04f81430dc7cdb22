"""Lists of requests, and everything about one of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from stagetrace_analyzer.queries.reading import fetch, sql_of
from stagetrace_analyzer.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    import duckdb
    from numpy.typing import NDArray

    from stagetrace_analyzer.classes import ClassRules

SORTABLE: Final = (
    "received_unix_ns",
    "traffic_class",
    "phase",
    "outcome",
    "ttft_ns",
    "completion_ns",
    "waited_ns",
    "longest_wait",
    "media_items",
    "pixels",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
)
"""Columns that a list can be sorted by."""

_ALL: Final = Selection()


class Span(NamedTuple):
    """The time that requests cover, in ns since the epoch, None without any; and their phases."""

    requests: int
    phases: int
    first_unix_ns: int | None
    last_unix_ns: int | None
    newest_unix_ns: int | None


class Listed(NamedTuple):
    """A row of the list of requests, see ``listed.sql``."""

    row: int
    dataset: int
    request: int
    request_id: str
    external_id: str | None
    trace_id: str | None
    instance: str
    model: str | None
    phase: str | None
    label: str | None
    arm: str | None
    traffic_class: str
    received_unix_ns: int
    ttft_ns: int | None
    completion_ns: int | None
    ended_ns: int | None
    waited_ns: int | None
    longest_wait: str | None
    outcome: str
    error_code: str | None
    ended_stage: str | None
    media_items: int | None
    pixels: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    max_tokens: int | None


class Choice(NamedTuple):
    """A value that one can filter by, and how many requests have it."""

    field: str
    value: str
    requests: int


class StageInterval(NamedTuple):
    """An interval of one request, see ``request_stages.sql``."""

    horizon: str
    stage: str
    kind: str
    reason: str | None
    holder: str | None
    role: str
    begin_ns: int
    duration_ns: int
    item: int | None
    first_step: int | None
    last_step: int | None
    recompute: bool


class MediaItem(NamedTuple):
    """A media item of one request, see ``request_media.sql``."""

    item: int
    scheme: str | None
    host: str | None
    format: str | None
    bytes: int | None
    width: int | None
    height: int | None
    tokens: int | None
    hash: str | None
    fetch_attempts: int | None
    media_cache: str | None
    processor_cache: str | None
    encoder_cache: str | None
    begin_ns: int | None
    ready_ns: int | None
    slack_ns: int | None


class StepBeside(NamedTuple):
    """A step that a request was in (with ``own_tokens``) or that ran beside it, see ``request_steps.sql``."""

    engine: str
    step: int
    begin_unix_ns: int
    end_unix_ns: int
    encoder_begin_unix_ns: int | None
    encoder_end_unix_ns: int | None
    own_tokens: int | None
    requests: int
    tokens: int
    decodes: int
    encoder_items: int
    running: int
    waiting: int


class Mate(NamedTuple):
    """A request that shared steps with another one, see ``step_mates.sql``."""

    request: int
    request_id: str
    traffic_class: str
    engine: str
    first_step: int
    last_step: int
    steps: int


class Company(NamedTuple):
    """The others in one step, of one class, see ``step_company.sql``."""

    step: int
    traffic_class: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions that a request must all meet; None is no condition.

    Times are ns; requests received in [``since_unix_ns``, ``until_unix_ns``).  A
    request without a first token, or without a last byte, is above every number.
    ``id`` is any of a request's ids.
    """

    traffic_class: str | None = None
    phase: str | None = None
    model: str | None = None
    arm: str | None = None
    instance: str | None = None
    outcome: str | None = None
    longest_wait: str | None = None
    since_unix_ns: int | None = None
    until_unix_ns: int | None = None
    media_items: int | None = None
    min_ttft_ns: int | None = None
    max_ttft_ns: int | None = None
    min_completion_ns: int | None = None
    max_completion_ns: int | None = None
    id: str | None = None


def span(connection: duckdb.DuckDBPyConnection) -> Span:
    """Return the time that the requests cover."""
    return fetch(connection, "span", Span)[0]


def list_requests(
    connection: duckdb.DuckDBPyConnection,
    rules: ClassRules,
    selection: Selection = _ALL,
    newest_unix_ns: int | None = None,
) -> None:
    """Make the table ``listed``, which the lists are read from.

    Args:
        connection: From `open_dataset`, or a cursor of it.
        rules: Traffic classes.
        selection: Which requests lists have; all are known as others in the steps of one.
        newest_unix_ns: When the newest request of the data was received, None without any.
    """
    classed, class_parameters = rules.case_expression()
    selected, parameters = selection.sql(newest_unix_ns)
    query = sql_of("listed").format(traffic_class=classed, selected=selected)
    classes = {"classes": list(selection.classes) or None}
    connection.execute(query, {**class_parameters, **parameters, **classes})


def choices(connection: duckdb.DuckDBPyConnection) -> list[Choice]:
    """Return what one can filter by; needs `list_requests`."""
    return fetch(connection, "counts", Choice)


def request_order(
    connection: duckdb.DuckDBPyConnection,
    wanted: RequestFilter,
    *,
    sort: str = "received_unix_ns",
    descending: bool = False,
) -> NDArray[np.int64]:
    """Return the numbers in ``listed`` of the requests that meet the conditions, in order.

    Unknown values come last, whichever the direction; equal ones are in the order of receipt.

    Raises:
        ValueError: ``sort`` is not in `SORTABLE`.
    """
    if sort not in SORTABLE:
        raise ValueError(f"cannot sort by {sort!r}")
    parameters = asdict(wanted) | {"sort": sort, "sign": -1 if descending else 1}
    found = connection.execute(sql_of("order"), parameters).fetchnumpy()
    return np.asarray(found["row"], dtype=np.int64)


def listed_rows(connection: duckdb.DuckDBPyConnection, rows: Sequence[int]) -> list[Listed]:
    """Return rows of ``listed`` in the order of ``rows``."""
    found = fetch(connection, "rows", Listed, {"rows": list(rows)})
    by_row = {listed.row: listed for listed in found}
    return [by_row[row] for row in rows]


def request_facts(
    connection: duckdb.DuckDBPyConnection, dataset: int, request: int
) -> dict[str, int | str | bool | None] | None:
    """Return the row of ``requests`` by column, None if there is no such request."""
    cursor = connection.execute(sql_of("request_facts"), _one(dataset, request))
    columns = [column[0] for column in cursor.description or ()]
    row = cursor.fetchone()
    return None if row is None else dict(zip(columns, row, strict=True))


def request_stages(connection: duckdb.DuckDBPyConnection, dataset: int, request: int) -> list[StageInterval]:
    """Return the intervals of a request, in time."""
    return fetch(connection, "request_stages", StageInterval, _one(dataset, request))


def request_media(connection: duckdb.DuckDBPyConnection, dataset: int, request: int) -> list[MediaItem]:
    """Return the media items of a request."""
    return fetch(connection, "request_media", MediaItem, _one(dataset, request))


def request_steps(
    connection: duckdb.DuckDBPyConnection, dataset: int, request: int, most: int
) -> list[StepBeside]:
    """Return the first ``most`` steps that its engines ran while a request was in the server."""
    return fetch(connection, "request_steps", StepBeside, _one(dataset, request) | {"most": most})


def step_company(
    connection: duckdb.DuckDBPyConnection,
    dataset: int,
    request: int,
    engine: str,
    steps: tuple[int, int],
) -> list[Company]:
    """Return who else was in the steps from the first to the last of ``steps``; needs `list_requests`."""
    parameters = {"engine": engine, "first_step": steps[0], "last_step": steps[1]}
    return fetch(connection, "step_company", Company, _one(dataset, request) | parameters)


def step_mates(connection: duckdb.DuckDBPyConnection, dataset: int, request: int, most: int) -> list[Mate]:
    """Return the ``most`` requests with most steps in common with one; needs `list_requests`."""
    return fetch(connection, "step_mates", Mate, _one(dataset, request) | {"most": most})


def _one(dataset: int, request: int) -> dict[str, Any]:
    return {"dataset": dataset, "request": request}
