"""What is around every page: header, menu, and the callbacks that tie pages to the address."""

from __future__ import annotations

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, dcc, html, no_update, set_props
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate
from plotly.io.json import to_json_plotly

from stagetrace.errors import StagetraceError, UsageError
from stagetrace_analyzer.figures.palette import Theme
from stagetrace_dashboard import brush
from stagetrace_dashboard.elements import Static
from stagetrace_dashboard.filters import changed, filter_bar
from stagetrace_dashboard.page import Page
from stagetrace_dashboard.pages import PAGES, requests
from stagetrace_dashboard.parts import nothing, problem, spoken
from stagetrace_dashboard.theme import HEADER_PX, MANTINE, NAVBAR_PX, theme_of
from stagetrace_dashboard.view import View, parse_view
from stagetrace_dashboard.words import age, date_time

if TYPE_CHECKING:
    from stagetrace_dashboard.data import Data
    from stagetrace_dashboard.source import Source

_AGE_MS: Final = 30_000
"""How often the age of data that nobody follows is written anew."""

_MS_PER_S: Final = 1000


def frame(source: Source, *, follow: bool) -> Component:
    """Return what stays while pages come and go."""
    every_ms = int(source.limits.poll_s * _MS_PER_S) if follow else _AGE_MS
    targets: Any = {"page": "children"}
    page = dcc.Loading(
        html.Div(id="page"),
        delay_show=250,
        target_components=targets,
        custom_spinner=dmc.Loader(size="lg", **spoken("loading")),
        overlay_style={"visibility": "visible", "opacity": 0.5},
    )
    return dmc.MantineProvider(
        [
            html.A("to the page", href="#page", className="st-skip"),
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Interval(id="tick", interval=every_ms),
            dcc.Store(id="generation", data=source.data.generation),
            dcc.Store(id="theme"),
            dcc.Store(id="shown"),
            dcc.Store(id="pointed"),
            dcc.Store(id="wanted"),
            dmc.AppShell(
                [
                    _header(),
                    dmc.AppShellNavbar(html.Nav(id="menu", **spoken("pages")), p="xs"),
                    dmc.AppShellMain(page, className="st-main"),
                ],
                header={"height": HEADER_PX},
                # On a narrow or enlarged screen too: beneath a breakpoint the menu covers the page.
                navbar={"width": NAVBAR_PX, "breakpoint": 0},
                padding="md",
            ),
        ],
        theme=MANTINE,
        defaultColorScheme="auto",
    )


def _header() -> Component:
    return dmc.AppShellHeader(
        dmc.Group(
            [
                dmc.Group(
                    [dmc.Title("stagetrace", order=1, size="h4"), html.Div(id="about")],
                    gap="md",
                    wrap="nowrap",
                ),
                dmc.Group(
                    [
                        html.Div(id="age", role="status"),
                        dmc.ColorSchemeToggle(
                            id="scheme",
                            lightIcon="☀",
                            darkIcon="☾",
                            variant="default",
                            size="md",
                            **spoken("light or dark"),
                        ),
                    ],
                    gap="md",
                    wrap="nowrap",
                ),
            ],
            justify="space-between",
            h="100%",
            px="md",
            wrap="nowrap",
        )
    )


def menu(view: View) -> list[Component]:
    """Return the links to all pages; choices go along."""
    return [
        dmc.NavLink(
            label=page.title,
            href=view.on(page.name).href,
            active=page.name == view.page,
            **({"aria-current": "page"} if page.name == view.page else {}),
        )
        for page in PAGES.values()
    ]


def view_of(pathname: str | None, search: str | None) -> View:
    """Read a view from the parts of an address.

    Raises:
        UsageError: There is no such page, or a choice cannot be.
    """
    name = (pathname or "/").strip("/") or next(iter(PAGES))
    if name not in PAGES:
        raise UsageError(f"there is no page {name[:40]!r}", hint=f"pages are {', '.join(PAGES)}")
    return parse_view(name, search or "")


def render(view: View, data: Data, theme: Theme) -> Component:
    """Return a page: its title, what can be chosen, and what there is."""
    page = PAGES[view.page]
    heading = dmc.Group(
        [
            dmc.Title(page.title, order=1, size="h3"),
            html.A(
                "JSON",
                id=f"{page.name}-json",
                href=f"/api/{page.name}{view.search}",
                style={"color": "var(--mantine-color-anchor)"},
            ),
        ],
        justify="space-between",
    )
    if page.needs_requests and not data.span.requests:
        body = nothing("No requests yet", "The data hold no request.", "stagetrace doctor")
        return dmc.Stack([heading, body], gap="md")
    body = page.layout(view, data, theme)
    shown = Static(body) if page.is_static else body
    return dmc.Stack([heading, filter_bar(page, view, data), shown], gap="md")


def kept(view: View, data: Data, theme: Theme) -> Any:
    """Return a page as it is sent to the browser, which is made once."""
    return data.page((view.href, theme), lambda: _as_sent(render(view, data, theme)))


def _as_sent(component: Component) -> Any:
    return json.loads(to_json_plotly(component))


def frozen_part(view: View, page: Page) -> str:
    """Return the address without the choices that the page's parts follow themselves."""
    defaults = View()
    return view.choose(**{name: getattr(defaults, name) for name in page.parts}).href


def is_live(view: View, data: Data) -> bool:
    """Whether a page is shown anew when there is new data; one that cannot be shown is tried again."""
    try:
        return PAGES[view.page].is_live(view, data)
    except StagetraceError:
        return True


def register(app: Dash, source: Source, *, follow: bool) -> None:
    """Tie pages to the address, the controls to the view, and all to the data."""
    source.data.ahead = [
        functools.partial(kept, View(page), source.data, theme) for page in PAGES for theme in Theme
    ]
    _register_pages(app, source)
    _register_choices(app, source)
    _register_requests(app, source)
    _register_links(app)
    _register_refresh(app)
    _register_age(app, source, follow=follow)
    _register_theme(app)


def _register_pages(app: Dash, source: Source) -> None:
    @app.callback(
        Output("page", "children"),
        Output("menu", "children"),
        Output("shown", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        Input("theme", "data"),
        Input("generation", "data"),
        State("shown", "data"),
    )
    def show(
        pathname: str | None, search: str | None, scheme: str | None, generation: str, shown: list[Any] | None
    ) -> tuple[Any, Any, Any]:
        if scheme is None:
            raise PreventUpdate
        try:
            view = view_of(pathname, search)
        except UsageError as error:
            return problem(error.message, error.hint), menu(View()), None
        data = source.data
        key = [frozen_part(view, PAGES[view.page]), scheme, generation if is_live(view, data) else None]
        if key == shown:
            return no_update, menu(view), no_update
        return guarded(lambda: kept(view, data, theme_of(scheme))), menu(view), key


def guarded(make: Callable[[], Any]) -> Any:
    """Return what is made, or what stands there if it cannot be."""
    try:
        return make()
    except StagetraceError as error:
        return problem(error.message, error.hint)
    except Exception:  # noqa: BLE001 - a page with a fault says so, and the others work
        traceback.print_exc(file=sys.stderr)
        return problem("this page has a fault", "the terminal that the dashboard was started in says more")


def _register_choices(app: Dash, source: Source) -> None:
    _register_pointing(app)

    @app.callback(
        Output("url", "search"),
        Input("pointed", "data"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def choose(pointed: dict[str, Any], pathname: str, search: str) -> Any:
        view = view_of(pathname, search)
        new = _chosen(view, source.data, pointed)
        return no_update if new == view else new.search


def _register_pointing(app: Any) -> None:
    # Controls that come with a page are told too, all at once; nobody has to be asked what they change.
    app.clientside_callback(
        """() => {
            const {triggered, triggered_id: cause} = window.dash_clientside.callback_context;
            if (triggered.length !== 1) { return window.dash_clientside.no_update; }
            return {kind: "filter", name: cause.filter, value: triggered[0].value, at: Date.now()};
        }""",
        Output("pointed", "data"),
        Input({"filter": ALL}, "value"),
        Input({"filter": ALL}, "checked"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        """(rows) => {
            if (!rows?.length) { return window.dash_clientside.no_update; }
            return {kind: "rows", value: rows.map((row) => row.key), at: Date.now()};
        }""",
        Output("pointed", "data", allow_duplicate=True),
        Input(requests.GRID, "selectedRows"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        "(wanted) => wanted ?? window.dash_clientside.no_update",
        Output("wanted", "data"),
        Input(requests.GRID, "getRowsRequest"),
        prevent_initial_call=True,
    )


def _chosen(view: View, data: Data, pointed: dict[str, Any]) -> View:
    """Return the view with what somebody pointed at: a control, rows, or something in a figure."""
    kind: str = pointed["kind"]
    value: Any = pointed.get("value")
    if kind == "filter":
        return changed(view, pointed["name"], value)
    if kind == "rows":
        return view.choose(requests=requests.chosen(view, value))
    bars = PAGES[view.page].bars
    if kind == "bar" and bars is not None:
        return brush.picked(view, value, bars(view, data))
    return brush.limited(view, value)


def _register_requests(app: Dash, source: Source) -> None:
    @app.callback(
        Output(requests.GRID, "getRowsResponse"),
        Output(requests.FOUND, "children"),
        Output("url", "search", allow_duplicate=True),
        Input("wanted", "data"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def give_rows(wanted: dict[str, Any], pathname: str, search: str) -> tuple[Any, ...]:
        view = view_of(pathname, search)
        sort, descending = requests.sorting(wanted)
        sorted_view = view.choose(sort=sort, descending=descending)
        rows = requests.block(view, source.data, wanted)
        found = requests.in_words(rows["rowCount"])
        return rows, found, no_update if sorted_view == view else sorted_view.search

    @app.callback(
        Output(requests.DETAILS, "children"),
        Input("url", "search"),
        State("url", "pathname"),
        State("theme", "data"),
        prevent_initial_call=True,
    )
    def show_details(search: str, pathname: str, scheme: str | None) -> Any:
        try:
            view = view_of(pathname, search)
        except UsageError:
            return no_update
        data, theme = source.data, theme_of(scheme)
        make = functools.partial(requests.details, view, data, theme)
        return guarded(lambda: data.page((requests.DETAILS, view.href, theme), lambda: _as_sent(make())))


def _register_links(app: Any) -> None:
    # The page stays when rows are sorted or chosen, and its links follow.
    page = requests.PAGE
    for identity, address in (
        (f"{page.name}-json", f"/api/{page.name}"),
        (requests.CSV, page.csv_href(View(page.name), "list")),
    ):
        app.clientside_callback(
            f"(search) => {json.dumps(address)} + search",
            Output(identity, "href"),
            Input("url", "search"),
            prevent_initial_call=True,
        )


def _register_refresh(app: Any) -> None:
    app.clientside_callback(
        """(generation) => {
            const grid = window.dash_ag_grid?.getApi("requests-grid");
            if (grid) { grid.refreshInfiniteCache(); }
            return window.dash_clientside.no_update;
        }""",
        Output(requests.GRID, "className"),
        Input("generation", "data"),
        prevent_initial_call=True,
    )


def _register_age(app: Dash, source: Source, *, follow: bool) -> None:
    @app.callback(
        Output("age", "children"),
        Output("about", "children"),
        Input("tick", "n_intervals"),
        State("generation", "data"),
    )
    def tell(_ticks: int | None, generation: str) -> tuple[Any, Any]:
        data = source.data
        if data.generation != generation:
            # Not an output, for which the first page would wait.
            set_props("generation", {"data": data.generation})
        return data_age(data, source.problem, time.time_ns(), follow=follow), about(data)


def data_age(data: Data, trouble: str | None, now_unix_ns: int, *, follow: bool) -> Component:
    """Return how old the data are, and whether they are followed."""
    newest = data.span.newest_unix_ns
    said: list[Component] = []
    if trouble is not None:
        said.append(dmc.Badge(f"cannot be read again: {trouble}", color="red", variant="light", tt="none"))
    if follow:
        read = age(now_unix_ns - data.read_unix_ns)
        said.append(dmc.Badge(f"following, read {read}", color="teal", variant="light", tt="none"))
    words = (
        "no request yet" if newest is None else f"data until {date_time(newest)}, {age(now_unix_ns - newest)}"
    )
    said.append(dmc.Text(words, size="sm", c="dimmed"))
    return dmc.Group(said, gap="xs", wrap="nowrap")


def about(data: Data) -> Component:
    """Return what the dashboard is limited to, and the remarks that belong beside every figure."""
    remarks = [row.reason for row in data.ingested if row.name == "about"]
    return dmc.Text(
        " ".join(filter(None, dict.fromkeys([str(data.scope), *remarks]))), size="sm", c="dimmed", lineClamp=2
    )


def _register_theme(app: Any) -> None:
    # What the toggle itself tells is one click behind.
    app.clientside_callback(
        """() => {
            const root = document.documentElement;
            const name = "data-mantine-color-scheme";
            const dark = window.matchMedia("(prefers-color-scheme: dark)");
            const theme = () => root.getAttribute(name) || (dark.matches ? "dark" : "light");
            const tell = () => window.dash_clientside.set_props("theme", {data: theme()});
            new MutationObserver(tell).observe(root, {attributes: true, attributeFilter: [name]});
            return theme();
        }""",
        Output("theme", "data"),
        Input("theme", "id"),
    )
