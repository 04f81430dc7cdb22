from __future__ import annotations

import itertools
import json
import re

import pytest
from dash._utils import to_json
from dashboarding import BEGIN_UNIX_NS, HOSTILE, MS, client_of, opened, request_row, write

from stagetrace.errors import UsageError
from stagetrace_analyzer.figures.palette import Theme
from stagetrace_analyzer.figures.partition import PartitionOptions, stage_partition
from stagetrace_analyzer.reports.document import document_of
from stagetrace_dashboard import shell
from stagetrace_dashboard.pages import PAGES, classes, engine, overview, requests
from stagetrace_dashboard.view import RequestKey, View, parse_view


def tree(component):
    """A component tree as plain data."""
    return json.loads(to_json(component))


def texts(node):
    """All texts that a reader sees, outside of figures."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from texts(item)
    elif isinstance(node, dict):
        yield from texts(node.get("props", {}).get("children"))
        yield from texts(node.get("props", {}).get("label"))
        yield from texts(node.get("props", {}).get("title"))
        for name in ("content", "text", "columns", "rows"):
            yield from texts(node.get("props", {}).get(name))


def components(node, kind):
    """The properties of all components of a kind."""
    if isinstance(node, list):
        for item in node:
            yield from components(item, kind)
    elif isinstance(node, dict):
        if node.get("type") == kind:
            yield node["props"]
        for value in node.get("props", node).values():
            yield from components(value, kind)


def parts_of(node):
    """All components in a component."""
    if isinstance(node, list):
        for item in node:
            yield from parts_of(item)
    elif isinstance(node, dict):
        if "namespace" in node:
            yield node
        for value in node.values():
            yield from parts_of(value)


def shown(address, data, theme=Theme.LIGHT):
    """A page as plain data."""
    path, _, search = address.partition("?")
    return tree(shell.render(parse_view(path.strip("/"), search), data, theme))


def said(address, data):
    """What a page says."""
    return " ".join(texts(shown(address, data)))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("theme", Theme)
def test_every_page_shows(data, page, theme):
    """Each page has its title, its figures on the ground of the theme, and a link to its JSON."""
    found = shown(f"/{page}", data, theme)
    assert PAGES[page].title in list(texts(found))
    assert f"/api/{page}" in [link["href"] for link in components(found, "A")]
    grounds = {figure["figure"]["layout"]["paper_bgcolor"] for figure in components(found, "Graph")}
    assert grounds <= {"#ffffff" if theme is Theme.LIGHT else "#1c1e21"}


def test_overview_is_the_report(data):
    """It says the answers, tables and data quality of the report, word by word, and its bars are the report's."""
    analysis = data.analysis_of(View())
    document = document_of(analysis)
    words = said("/overview", data)
    for title, answer in document.answers:
        assert title in words
        assert answer in words
    for row in document.quality:
        assert row[1] in words
    bars = tree(stage_partition(analysis.classes, PartitionOptions()))["data"]
    (figure,) = components(shown("/overview", data), "Graph")
    assert figure["figure"]["data"] == bars


def test_overview_links_to_each_class(data):
    """A card leads to the page of its class and phase."""
    found = shown("/overview", data)
    hrefs = [link["href"] for link in components(found, "Link")]
    for report in data.analysis_of(View()).classes:
        href = View("class", traffic_class=report.traffic_class, phase=report.phase).href
        assert href in hrefs


def test_class_page_is_about_one_class(data):
    """Without a choice it is the class with most requests; with one it is that."""
    view = View("class")
    most = max(data.analysis_of(view).classes, key=lambda report: report.requests)
    assert classes.report_of(view, data) == most
    chosen = classes.report_of(view.choose(traffic_class="image/short", phase="mixture"), data)
    assert (chosen.traffic_class, chosen.phase) == ("image/short", "mixture")


def test_class_page_has_its_figures(data):
    """Typical against slow, both distributions, and both courses over time, which a time can be chosen in."""
    found = list(components(shown("/class?split=media", data), "Graph"))
    assert [(figure["name"], figure["tells"]) for figure in found] == [
        ("typical-against-tail", None),
        ("ttft-ecdf", None),
        ("ttft-histogram", None),
        ("completion-ecdf", None),
        ("completion-histogram", None),
        ("stages-over-time", "time"),
        ("load-over-time", "time"),
        ("split-media", None),
        ("split-media-ecdf", None),
    ]


def test_a_page_is_made_once(data):
    """It is sent again as it was, for each view and theme by itself; and that is what it would be made anew."""
    view = View("class", traffic_class="text/short", phase="mixture")
    made = shell.kept(view, data, Theme.LIGHT)
    assert shell.kept(parse_view("class", view.search), data, Theme.LIGHT) is made
    assert made == tree(shell.render(view, data, Theme.LIGHT))
    assert shell.kept(view, data, Theme.DARK) == tree(shell.render(view, data, Theme.DARK)) != made
    other = view.choose(traffic_class="image/short")
    assert shell.kept(other, data, Theme.LIGHT) == tree(shell.render(other, data, Theme.LIGHT)) != made


def test_pages_are_made_ahead(tmp_path):
    """When the first page's needs are made, the others are made as well."""
    with opened(write(tmp_path, requests=[request_row(0)])) as source:
        client_of(source)
        source.data.warm()
        for page, theme in itertools.product(PAGES, Theme):
            assert source.data.page((View(page).href, theme), lambda: None) is not None


def test_no_callback_reaches_into_what_is_static(data):
    """What Dash puts nothing around has no id and no control."""
    for page in PAGES:
        for static in components(shown(f"/{page}?requests=0-344", data), "Static"):
            assert static["content"] is not None
            found = [part["props"] for part in parts_of(static["content"])]
            assert found
            assert not [properties for properties in found if "id" in properties]


def test_nothing_like_this_says_so(data):
    """Choices that no request meets leave a page that says what to do."""
    for page in ("overview", "class", "requests"):
        assert "Take back some of the choices above." in said(f"/{page}?class=none", data)


def test_grid_asks_for_what_it_shows(data):
    """A block of rows has at most as many as the setting, sorted, and the number of all."""
    wanted = {"startRow": 0, "endRow": 10**6, "sortModel": [{"colId": "ttft_ns", "sort": "desc"}]}
    block = requests.block(View("requests"), data, wanted)
    assert block["rowCount"] == data.span.requests
    assert len(block["rowData"]) == data.limits.rows
    times = [float(row["ttft_ns"].replace(",", "")) for row in block["rowData"]]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("column", ["request_id", "no such column", None])
def test_grid_is_sorted_by_receipt_else(column):
    """A column that cannot be sorted by leaves the order of receipt."""
    assert requests.sorting({"sortModel": [{"colId": column, "sort": "desc"}]}) == ("received_unix_ns", False)


def test_two_requests_are_side_by_side(data):
    """Both have the same axis, and each can be closed."""
    found = shown("/requests?requests=0-344,0-343", data)
    ranges = {tuple(figure["figure"]["layout"]["xaxis"]["range"]) for figure in components(found, "Graph")}
    assert len(ranges) == 1
    closing = {link["href"] for link in components(found, "Link") if link["text"] == "close"}
    assert closing == {"/requests?requests=0-343", "/requests?requests=0-344"}


def test_one_request_twice_is_one(data):
    """An address that names a request twice shows it once."""
    assert shown("/requests?requests=0-344,0-344", data) == shown("/requests?requests=0-344", data)


def test_the_third_request_takes_the_place_of_the_first():
    """No more than two are shown: the last ones that were chosen."""
    view = View("requests", requests=(RequestKey(0, 1), RequestKey(0, 2)))
    rows = ["0-1", "0-2", "0-3"]
    assert requests.chosen(view, rows) == (RequestKey(0, 2), RequestKey(0, 3))
    assert requests.chosen(view, rows[2:]) == (RequestKey(0, 3),)


def test_a_request_that_is_gone_says_so(data):
    """A link to a request that is not there is no fault."""
    assert "No such request" in said("/requests?requests=5-1", data)


def test_engine_draws_steps_by_themselves_when_they_are_few(data):
    """All steps are put together; a short time shows each."""
    whole = engine.read_steps(View("engine"), data)
    assert not whole.are_single
    assert len(whole.stretches) <= data.limits.steps
    assert sum(stretch.steps for stretch in whole.stretches) == whole.steps
    second = View("engine", since_unix_ns=whole.since_unix_ns, until_unix_ns=whole.since_unix_ns + 10**9)
    closer = engine.read_steps(second, data)
    assert closer.are_single
    assert len(closer.stretches) == closer.steps > 0


def test_an_engine_of_other_data_says_so(data):
    """A link to an engine that is not there says that, not that nothing was recorded."""
    found = said("/engine?engine=0-gone", data)
    assert "No such engine" in found
    assert "vllm serve" not in found


def test_overview_says_how_many_requests_it_shows(data):
    """With a class or a phase chosen, the count of all is followed by that of the shown ones."""
    address = "/overview?phase=mixture"
    shown_ones = sum(
        report.requests
        for report in overview.shown(parse_view(*address[1:].split("?")), data.analysis_of(View()))
    )
    assert f"Shown here are {shown_ones:,} of them." in said(address, data)
    assert "Shown here" not in said("/overview", data)


def test_quality_shows_what_limits_it(tmp_path):
    """Each choice that the figures of data quality follow can be seen and taken back there."""
    rows = [request_row(n, phase=f"p{n}", model=f"m{n}", arm=f"a{n}", instance=f"s{n}") for n in range(2)]
    with opened(write(tmp_path, requests=rows)) as source:
        found = shown("/quality?by_phase=0&phase=p0&model=m0&arm=a0&instance=s0", source.data)
    chosen = {control["label"]: control["value"] for control in components(found, "Select")}
    assert chosen == {"phase": "p0", "model": "m0", "arm": "a0", "server": "s0"}


def test_nothing_recorded_says_what_would_record(tmp_path):
    """Without steps and without requests, pages say which command would bring some."""
    with opened(write(tmp_path, ingest=[{"name": "records", "reason": "", "count": 0}])) as source:
        assert "vllm serve" in said("/engine", source.data)
        assert "stagetrace doctor" in said("/overview", source.data)
        assert "records read" in said("/quality", source.data)


def test_a_page_that_is_not_there_names_those_that_are():
    """An unknown address is a usage error."""
    with pytest.raises(UsageError, match="no page 'nothing'") as caught:
        shell.view_of("/nothing", "")
    assert "overview, class" in caught.value.hint


def test_a_fault_stays_on_its_page(capsys):
    """A page that fails says so, and the terminal has the rest."""
    found = tree(shell.guarded(lambda: 1 / 0))
    assert "this page has a fault" in " ".join(texts(found))
    assert "ZeroDivisionError" in capsys.readouterr().err


# --- hostile data ------------------------------------------------------------------------------------


def strings(node):
    """Every text in a figure."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from strings(item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from strings(item)


PAGES_OF_HOSTILE_DATA = [
    "/overview",
    "/class",
    "/requests?requests=0-1,0-2",
    "/engine",
    f"/engine?since={BEGIN_UNIX_NS}&until={BEGIN_UNIX_NS + 1000 * MS}",
    "/quality",
]


@pytest.mark.parametrize("address", PAGES_OF_HOSTILE_DATA)
def test_names_are_text(hostile, address):
    """In figures a name brings no tag; elsewhere it is a plain text of a component, never Markdown or HTML."""
    found = shown(address, hostile.data)
    for figure in components(found, "Graph"):
        for text in strings(figure["figure"]["data"]) if figure else ():
            assert "<a" not in text
            assert "<img" not in text
        for text in strings({k: v for k, v in figure["figure"]["layout"].items() if k != "template"}):
            assert "<a" not in text
            assert "<img" not in text
    assert not list(components(found, "Markdown"))
    assert "dangerously_allow_html" not in json.dumps(found)
    for link in [*components(found, "A"), *components(found, "Link")]:
        assert re.match(r"/[^/]|/$", link["href"]), link["href"]


def test_the_hostile_name_is_there(hostile):
    """The test above looks at pages that do show the name."""
    for address in ("/requests?requests=0-1", "/engine", "/quality"):
        assert HOSTILE in said(address, hostile.data), address
    (figure,) = components(shown("/requests?requests=0-1", hostile.data), "Graph")
    assert any("&lt;img" in text for text in strings(figure["figure"]["data"]))


def test_cells_of_the_grid_are_values(hostile):
    """The grid gets texts as values; no column renders them as anything else."""
    block = requests.block(View("requests"), hostile.data, {"startRow": 0, "endRow": 10})
    assert {row["phase"] for row in block["rowData"]} == {HOSTILE}
    (grid,) = components(shown("/requests", hostile.data), "AgGrid")
    assert not [column for column in grid["columnDefs"] if {"cellRenderer", "valueFormatter"} & set(column)]
    assert "dangerously_allow_code" not in grid


def test_a_request_without_an_end_is_shown(tmp_path):
    """A lost request, of which hardly anything is known, has a page."""
    row = request_row(0, outcome="lost", ttft_ns=None, completion_ns=None, ended_ns=None)
    with opened(write(tmp_path, requests=[row])) as source:
        assert "lost" in said("/requests?requests=0-0", source.data)
        assert overview.bars(View(), source.data) == [{"traffic_class": "text/short"}]
