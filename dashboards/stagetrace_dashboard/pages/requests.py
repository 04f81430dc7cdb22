"""Requests: a list of millions, and one or two of them interval by interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from stagetrace_analyzer.figures.palette import Theme
from stagetrace_analyzer.queries.requests import Listed, listed_rows
from stagetrace_dashboard.elements import Static
from stagetrace_dashboard.figures.waterfall import WaterfallOptions, waterfall
from stagetrace_dashboard.page import Page, Table
from stagetrace_dashboard.parts import (
    card,
    download,
    facts,
    graph,
    link,
    nothing,
    picture_buttons,
    stack,
    table,
)
from stagetrace_dashboard.story import Story, read_story
from stagetrace_dashboard.theme import GRID_OPTIONS
from stagetrace_dashboard.view import RequestKey, View
from stagetrace_dashboard.words import NOTHING, clock_time, count, date_time, duration

if TYPE_CHECKING:
    from stagetrace_dashboard.data import Data

GRID: Final = "requests-grid"
DETAILS: Final = "request-details"
FOUND: Final = "requests-found"
CSV: Final = "requests-csv"

_GRID_HEIGHT: Final = "min(46vh, 620px)"
_CSV_BLOCK: Final = 10_000
_NS_PER_MS: Final = 1_000_000
_MILLISECONDS: Final = ("ttft_ns", "completion_ns", "waited_ns")
_COLUMNS: Final = {
    "received_unix_ns": ("received, UTC", 165),
    "traffic_class": ("class", 120),
    "phase": ("phase", 105),
    "outcome": ("outcome", 90),
    "ttft_ns": ("TTFT, ms", 110),
    "completion_ns": ("completion, ms", 140),
    "waited_ns": ("waited, ms", 115),
    "longest_wait": ("waited longest in", 150),
    "media_items": ("media", 90),
    "pixels": ("pixels", 100),
    "prompt_tokens": ("prompt", 90),
    "output_tokens": ("output", 90),
    "max_tokens": ("at most", 90),
    "request_id": ("request", 220),
}
_TEXTS: Final = ("traffic_class", "phase", "outcome", "longest_wait", "request_id")


def layout(view: View, data: Data, theme: Theme) -> Component:
    """Return the list, and room for the requests that were chosen."""
    below = html.Div(details(view, data, theme), id=DETAILS)
    if has_none(view, data):
        return stack(nothing("No request is like this", "Take back some of the choices above."), below)
    grid = dag.AgGrid(
        id=GRID,
        columnDefs=_column_definitions(view),
        rowModelType="infinite",
        defaultColDef={"resizable": True, "sortable": True, "suppressMovable": True},
        getRowId="params.data.key",
        dashGridOptions={
            **GRID_OPTIONS,
            "cacheBlockSize": data.limits.rows,
            "maxBlocksInCache": 20,
            "rowSelection": {"mode": "multiRow", "enableClickSelection": True, "headerCheckbox": False},
            # Rows that say that they are loading take as long to draw as those that come at once.
            "infiniteInitialRowCount": 1,
            "rowBuffer": 2,
        },
        style={"height": _GRID_HEIGHT, "width": "100%"},
    )
    return stack(
        card(
            html.Span(in_words(_count(view, data)), id=FOUND),
            grid,
            actions=[download("CSV", PAGE.csv_href(view, "list"), id=CSV)],
            note="A row shows the request below; with Ctrl, or its box, a second one beside it.",
        ),
        below,
    )


def has_none(view: View, data: Data) -> bool:
    """Whether there is no list, which would ask for new rows itself."""
    return not _count(view, data)


def _count(view: View, data: Data) -> int:
    return len(data.order(view.filter, view.sort, descending=view.descending))


def in_words(found: int) -> str:
    """Return the heading of the list."""
    return f"{found:,} requests"


def _column_definitions(view: View) -> list[dict[str, Any]]:
    definitions = []
    for name, (title, width) in _COLUMNS.items():
        definition: dict[str, Any] = {"field": name, "headerName": title, "width": width}
        if name not in {*_TEXTS, "received_unix_ns"}:
            definition |= {"type": "rightAligned", "sortingOrder": ["desc", "asc", None]}
        if name == "request_id":
            definition |= {"sortable": False, "flex": 1, "minWidth": width}
        if (name == view.sort and name != "received_unix_ns") or (name == view.sort and view.descending):
            definition["initialSort"] = "desc" if view.descending else "asc"
        definitions.append(definition)
    return definitions


def block(view: View, data: Data, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the rows that the grid asks for.

    Args:
        view: With the conditions.
        data: Where from.
        wanted: ``startRow``, ``endRow`` and ``sortModel``, as the grid sends them.
    """
    sort, descending = sorting(wanted)
    order = data.order(view.filter, sort, descending=descending)
    first = max(0, int(wanted.get("startRow") or 0))
    last = min(int(wanted.get("endRow") or 0), first + data.limits.rows)
    rows = [int(row) for row in order[first:last]]
    return {"rowData": [_cells(row) for row in _listed(data, rows)], "rowCount": len(order)}


def sorting(wanted: dict[str, Any]) -> tuple[str, bool]:
    """Return by which column the grid is sorted, and whether downwards; by receipt if by none that can be."""
    model = wanted.get("sortModel") or [{}]
    column, direction = model[0].get("colId"), model[0].get("sort")
    return (
        (column, direction == "desc")
        if column in _COLUMNS and column != "request_id"
        else ("received_unix_ns", False)
    )


def _cells(row: Listed) -> dict[str, str]:
    cells = {"key": str(RequestKey(row.dataset, row.request))}
    for name in _COLUMNS:
        value = getattr(row, name)
        if value is None:
            cells[name] = NOTHING
        elif name == "received_unix_ns":
            cells[name] = f"{date_time(value)[5:10]} {clock_time(value)}"
        elif name in _MILLISECONDS:
            cells[name] = f"{value / _NS_PER_MS:,.1f}"
        else:
            cells[name] = value if name in _TEXTS else f"{value:,}"
    return cells


def chosen(view: View, keys: Sequence[str]) -> tuple[RequestKey, ...]:
    """Return which requests are shown when these rows are selected: the last two, in the order of choice."""
    selected = [RequestKey(*map(int, str(key).split("-"))) for key in keys]
    kept = [key for key in view.requests if key in selected]
    return tuple([*kept, *(key for key in selected if key not in kept)][-2:])


def details(view: View, data: Data, theme: Theme) -> Component:
    """Return the chosen requests, one beside the other."""
    if not view.requests:
        return html.Div()
    stories = [read_story(data, key) for key in view.requests]
    until_ns = max((story.length_ns for story in stories if story is not None), default=None)
    options = WaterfallOptions(theme, until_ns)
    shown = [
        _missing(key) if story is None else _story(story, view, options)
        for key, story in zip(view.requests, stories, strict=True)
    ]
    return Static(dmc.SimpleGrid(shown, cols={"base": 1, "lg": len(shown)}, spacing="md"))


def _missing(key: RequestKey) -> Component:
    return nothing(
        "No such request", f"The data have no request {key}. It may have been removed, or be of other data."
    )


def _story(story: Story, view: View, options: WaterfallOptions) -> Component:
    name = f"request-{story.key}"
    others = tuple(key for key in view.requests if key != story.key)
    close = link("close", view.choose(requests=others).href, stays=True)
    figure = card(
        f"Request {story.facts['request_id']}",
        graph(name, waterfall(story, options), options.theme),
        actions=[*picture_buttons(name), _twin_link(story), close],
    )
    beside = [card("Facts", facts(_facts(story, view))), stack(*_media(story), *_mates(story, view))]
    if others:
        return stack(figure, *beside)
    return dmc.Grid(
        [
            dmc.GridCol(figure, span={"base": 12, "xl": 8}),
            dmc.GridCol(
                dmc.SimpleGrid(beside, cols={"base": 1, "md": 2, "xl": 1}), span={"base": 12, "xl": 4}
            ),
        ],
        gutter="md",
    )


def _twin_link(story: Story) -> Component:
    return html.A(
        "JSON", href=f"/api/requests?requests={story.key}", style={"color": "var(--mantine-color-anchor)"}
    )


def _facts(story: Story, view: View) -> Iterator[tuple[str, Any]]:
    known = story.facts
    outcome = str(known["outcome"])
    if known["error_code"]:
        outcome += f" ({known['error_code']})"
    if known["ended_stage"]:
        outcome += f" in {known['ended_stage']}"
    yield "outcome", outcome
    yield "received", date_time(story.received_unix_ns)
    if isinstance(known["intended_unix_ns"], int):
        yield "after it was meant", duration(story.received_unix_ns - known["intended_unix_ns"])
    for title, column in (("TTFT", "ttft_ns"), ("completion", "completion_ns"), ("upload", "upload_ns")):
        yield title, duration(_number(known[column]))
    yield "tokens", _tokens(story)
    yield "media", f"{count(_number(known['media_items']))} items, {count(_number(known['pixels']))} pixels"
    for column in ("model", "phase", "label", "arm", "finish_reason", "status"):
        if known[column] is not None:
            yield column.replace("_", " "), str(known[column])
    yield "seen by", str(known["joined"])
    yield "server", str(known["instance"])
    if known["external_id"]:
        yield "id of the answer", str(known["external_id"])
    if known["trace_id"]:
        trace = str(known["trace_id"])
        yield "trace", link(trace, View("requests", id=trace, requests=view.requests).href)


def _tokens(story: Story) -> str:
    known = story.facts
    cached = known["cached_tokens"]
    of_cache = f" ({count(_number(cached))} cached)" if cached else ""
    prompt, output, most = (
        count(_number(known[column])) for column in ("prompt_tokens", "output_tokens", "max_tokens")
    )
    return f"{prompt} prompt{of_cache}, {output} output of at most {most}"


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _media(story: Story) -> Iterator[Component]:
    if story.media:
        columns = {
            "item": True,
            "size": False,
            "bytes": True,
            "tokens": True,
            "slack": True,
            "encoder cache": False,
        }
        yield card("Media items", table(columns, (_item(item) for item in story.media)))


def _item(item: Any) -> list[str]:
    size = f"{item.width} x {item.height}" if item.width and item.height else NOTHING
    return [
        str(item.item),
        f"{size} {item.format or ''}",
        count(item.bytes),
        count(item.tokens),
        duration(item.slack_ns),
        item.encoder_cache or NOTHING,
    ]


def _mates(story: Story, view: View) -> Iterator[Component]:
    if not story.mates:
        return
    columns = {"request": False, "class": False, "steps in common": True}
    rows: list[list[Any]] = []
    for mate in story.mates:
        key = RequestKey(story.key.dataset, mate.request)
        href = view.choose(requests=(story.key, key)).href
        rows.append([link(mate.request_id, href, stays=True), mate.traffic_class, count(mate.steps)])
    yield card(
        "Shared steps with",
        dmc.ScrollAreaAutosize(table(columns, rows), mah=280, type="auto"),
        note="A request shows up beside this one.",
    )


def twin(view: View, data: Data) -> Any:
    """Return the chosen requests whole, or else the first rows of the list."""
    if view.requests:
        return {"requests": [read_story(data, key) for key in view.requests]}
    order = data.order(view.filter, view.sort, descending=view.descending)
    rows = [int(row) for row in order[: data.limits.rows]]
    return {
        "found": len(order),
        "rows": _listed(data, rows),
    }


def list_table(view: View, data: Data) -> Table:
    """Return the list as a file, up to `Limits.csv_rows`."""
    order = data.order(view.filter, view.sort, descending=view.descending)[: data.limits.csv_rows]
    return Table(Listed._fields[1:], _blocks(data, [int(row) for row in order]))


def _blocks(data: Data, rows: Sequence[int]) -> Iterable[Sequence[object]]:
    for first in range(0, len(rows), _CSV_BLOCK):
        yield from (listed[1:] for listed in _listed(data, rows[first : first + _CSV_BLOCK]))


def _listed(data: Data, rows: Sequence[int]) -> list[Listed]:
    return data.ask_lists(lambda connection: listed_rows(connection, rows))


PAGE: Final = Page(
    name="requests",
    title="Requests",
    layout=layout,
    twin=twin,
    filters=(
        "traffic_class",
        "phase",
        "model",
        "arm",
        "instance",
        "outcome",
        "longest_wait",
        "min_ttft_ms",
        "min_completion_ms",
        "media_items",
        "id",
    ),
    tables={"list": list_table},
    parts=("sort", "descending", "requests"),
    is_static=False,
    is_live=has_none,
)
