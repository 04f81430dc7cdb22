"""The dashboard of the recorded run in a real browser: every page, without an error and without a network.

Screenshots of every page are left in ``tests/dashboard/screenshots``.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from browsers import chromium

from stagetrace_dashboard.app import create_app
from stagetrace_dashboard.pages import PAGES
from stagetrace_dashboard.security import Door
from stagetrace_dashboard.serving import listen

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SCREENSHOTS = Path(__file__).parent / "screenshots"
PATIENCE_MS = 60_000
WITH_GRAPHS = ("overview", "class", "engine")
LARGE_PX = 2000
SHOWN = "#page section, #page [role=alert], #page [role=status]"


@pytest.fixture(scope="module")
def browser():
    """A Chromium."""
    with chromium() as running:
        # One context, so that scripts are loaded once.
        yield running.new_context()


@contextmanager
def served(source):
    """The address of a dashboard that is served."""
    server = listen(create_app(source, Door()).server, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def address(recorded):
    """Where the dashboard of the recorded run is."""
    with served(recorded) as found:
        yield found


@contextmanager
def opened_page(browser, address, path, *, width=1280, height=900, scheme="light"):
    """A page that must not complain, and must ask nobody else."""
    complaints = []
    page = browser.new_page()
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=scheme)
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: (
            complaints.append(request.url)
            if not request.url.startswith((address, "data:", "blob:"))
            else None
        ),
    )
    page.goto(address + path)
    page.wait_for_selector(SHOWN)
    yield page
    page.evaluate("localStorage.clear()")
    page.close()
    assert complaints == []


def until(page, condition):
    """Wait until a condition holds; not in the page, whose policy lets nobody evaluate texts there."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(f"() => Boolean({condition})"):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def until_address(page, pattern):
    """Wait until the address is as it should be."""
    page.wait_for_url(re.compile(pattern))


@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1280, 800, "light"), (1280, 800, "dark"), (3840, 2160, "light")]
)
def test_every_page_by_the_menu(browser, address, width, height, scheme):
    """Each page opens from the menu, fits into the width, and nothing complains; light, dark, small and large."""
    SCREENSHOTS.mkdir(exist_ok=True)
    with opened_page(browser, address, "/", width=width, height=height, scheme=scheme) as page:
        for found in PAGES.values():
            page.get_by_role("link", name=found.title, exact=True).first.click()
            page.get_by_role("heading", name=found.title, exact=True, level=1).wait_for()
            page.wait_for_selector(SHOWN)
            if found.name in WITH_GRAPHS:
                page.locator(".st-graph .main-svg").first.wait_for()
            # Also those below the window, one after the other.
            until(page, "!document.querySelector('.st-pending')")
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), found.name
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ground == ("rgb(20, 21, 23)" if scheme == "dark" else "rgb(246, 247, 248)")
            picture = SCREENSHOTS / f"{found.name}-{width}-{scheme}.png"
            page.screenshot(path=picture, full_page=height < LARGE_PX)


def test_a_row_shows_its_request(browser, address):
    """A row opens its waterfall, a second one stands beside it, and the address shows both again."""
    with opened_page(browser, address, "/requests") as page:
        page.locator(".ag-row[row-index='3']", has_text=":").click()
        page.locator("#request-details .js-plotly-plot .main-svg").first.wait_for()
        until_address(page, r"requests=0-\d+$")
        page.locator(".ag-row[row-index='5']").click(modifiers=["Control"])
        until_address(page, r"requests=0-\d+%2C0-\d+$")
        until(page, "document.querySelectorAll('#request-details .js-plotly-plot').length == 2")
        titles = page.locator("#request-details h2").all_inner_texts()
        page.screenshot(path=SCREENSHOTS / "two-requests-1280-light.png", full_page=True)
        page.reload()
        until(page, "document.querySelectorAll('#request-details .js-plotly-plot').length == 2")
        assert page.locator("#request-details h2").all_inner_texts() == titles


def test_the_list_is_there_again(browser, address):
    """Whoever comes back to the list sees its rows."""
    with opened_page(browser, address, "/requests") as page:
        page.locator(".ag-row[row-index='3']", has_text=":").wait_for()
        page.get_by_role("link", name="Data quality", exact=True).click()
        page.get_by_role("heading", name="Data quality", level=1).wait_for()
        page.get_by_role("link", name="Requests", exact=True).click()
        page.locator(".ag-row[row-index='3']", has_text=":").click()
        page.locator("#request-details .st-graph .main-svg").first.wait_for()


def test_the_list_follows_the_address(browser, address):
    """Going back sorts and selects rows as before, and a row whose request was closed shows it again."""
    with opened_page(browser, address, "/requests") as page:

        def first(ttft):
            page.locator(".ag-row[row-index='0'] [col-id='ttft_ns']", has_text=ttft).wait_for()

        def shows(number, *keys):
            until_address(page, f"requests={'%2C'.join(keys)}$" if keys else "/requests$")
            until(page, f"document.querySelectorAll('#request-details [data-graph]').length == {number}")
            selected = page.locator(".ag-center-cols-container .ag-row-selected")
            assert sorted(row.get_attribute("row-id") for row in selected.all()) == sorted(keys)

        row = page.locator(".ag-row[row-index='3'] [col-id='ttft_ns']")
        row.filter(has_text=".").wait_for()
        before = page.locator(".ag-row[row-index='0'] [col-id='ttft_ns']").inner_text()
        page.get_by_role("columnheader", name="TTFT, ms").click()
        until_address(page, "sort=ttft_ns&descending=1")
        page.go_back()
        until_address(page, "/requests$")
        first(before)
        row.filter(has_text=".").click()
        shows(1, "0-3")
        page.get_by_role("link", name="close").click()
        shows(0)
        row.click()
        shows(1, "0-3")
        page.locator(".ag-row[row-index='5']").click(modifiers=["Control"])
        shows(2, "0-3", "0-5")
        page.go_back()
        shows(1, "0-3")
        page.go_forward()
        shows(2, "0-3", "0-5")


def test_the_menu_leaves_room_for_the_page(browser, address):
    """In a narrow window, which one with enlarged texts is too, nothing covers the page."""
    with opened_page(browser, address, "/", width=640, height=800) as page:
        page.get_by_role("heading", name="Overview", level=1).click()
        page.get_by_role("link", name="more", exact=True).first.click()
        until_address(page, "/class")


def test_a_class_is_taken_apart_where_one_looks(browser, address):
    """Who takes a class apart, below its figures, is not taken to the top of the page."""
    with opened_page(browser, address, "/class") as page:
        page.get_by_role("link", name="by media items").click()
        page.locator("[data-graph='split-media'] .main-svg").first.wait_for()
        assert page.evaluate("scrollY") > 1000
        page.get_by_role("link", name="its requests").click()
        until_address(page, "/requests")
        until(page, "scrollY == 0")


def test_figures_are_drawn_when_they_are_seen(browser, address):
    """One that comes into the window is drawn, also while nothing else is done ahead; printing draws all."""
    page = browser.new_page()
    # Nothing is ever idle here.
    page.add_init_script("window.requestIdleCallback = () => 0")
    page.set_viewport_size({"width": 1280, "height": 500})
    page.goto(f"{address}/class")
    last = page.locator("[data-graph='load-over-time']")
    last.wait_for(state="attached")
    page.wait_for_load_state("networkidle")
    assert page.locator(".st-pending").count() == page.locator(".st-graph").count() > 3
    height = last.evaluate("graph => graph.offsetHeight")
    last.scroll_into_view_if_needed()
    last.locator(".main-svg").first.wait_for()
    until(page, "!document.querySelector('[data-graph=load-over-time]').matches('.st-pending')")
    assert last.evaluate("graph => graph.offsetHeight") == height
    assert page.locator(".st-pending").count() > 0
    widths = (
        "Math.max(...[...document.querySelectorAll('.st-graph .main-svg')].map(drawn => drawn.clientWidth))"
    )
    page.evaluate(
        "matchMedia('print').addEventListener('change', ({matches}) => {"
        f"if (matches) window.printed = [document.querySelector('.st-pending'), {widths}] }})"
    )
    page.pdf()
    # Paper is narrower than the window.
    assert page.evaluate("printed") == [None, 670]
    until(page, f"{widths} == document.querySelector('.st-graph').offsetWidth")
    page.close()


def test_paper_has_the_page_alone(browser, address):
    """Neither header nor menu nor controls are printed, and nothing is left free for them."""
    with opened_page(browser, address, "/quality", width=700) as page:
        page.emulate_media(media="print")
        for hidden in ("navigation", "banner", "search"):
            assert not page.get_by_role(hidden).count()
        box = page.locator("#page section").first.bounding_box()
        assert box["x"] == 0
        page.emulate_media(media="screen")


def test_figures_grow_with_the_texts(browser, address):
    """On a large screen the texts of figures are as much larger as those of the page."""
    sizes = []
    for width, height in ((1280, 800), (3840, 2160)):
        with opened_page(browser, address, "/engine", width=width, height=height) as page:
            page.locator(".st-graph .ytitle").first.wait_for()
            texts = [
                page.locator(where).first.evaluate("text => parseFloat(getComputedStyle(text).fontSize)")
                for where in ("h2", ".ytitle", ".legendtext", ".x3tick text")
            ]
            sizes.append([*texts, page.locator(".st-graph").evaluate("graph => graph.offsetHeight")])
    assert [large / small for small, large in zip(*sizes, strict=True)] == pytest.approx([1.25] * 5)


def test_figures_in_tables_do_not_break(browser, address):
    """A value stands in one line with its interval, and every table fits, also beside another one."""
    with opened_page(browser, address, "/class") as page:
        cells = page.locator("td.st-figure").all()
        assert len(cells) > 20
        assert {cell.evaluate("cell => getComputedStyle(cell).whiteSpace") for cell in cells} == {"nowrap"}
        for table in page.locator(".st-scroll").all():
            assert table.evaluate("table => table.scrollWidth <= table.clientWidth")


def test_sorting_is_in_the_address(browser, address):
    """A click on a heading sorts by it, downwards first, also in the files; the address again sorts the same."""
    with opened_page(browser, address, "/requests") as page:
        page.get_by_role("columnheader", name="TTFT, ms").click()
        until_address(page, "sort=ttft_ns&descending=1")
        for name in ("requests-json", "requests-csv"):
            until(page, f"document.getElementById('{name}').href.endsWith('?sort=ttft_ns&descending=1')")
        page.wait_for_load_state("networkidle")
        first = page.locator(".ag-row[row-index='0'] [col-id='ttft_ns']").inner_text()
        page.reload()
        page.locator(".ag-row[row-index='0'] [col-id='ttft_ns']", has_text=first).wait_for()


def test_scrolling_brings_further_rows(browser, address, data):
    """The list is virtual: its last row comes when it is scrolled to."""
    with opened_page(browser, address, "/requests") as page:
        last = data.span.requests - 1
        page.locator(".ag-row[row-index='0']").wait_for()
        until(page, f"dash_ag_grid.getApi('requests-grid').getDisplayedRowCount() == {last + 1}")
        page.evaluate(f"dash_ag_grid.getApi('requests-grid').ensureIndexVisible({last})")
        page.locator(f".ag-row[row-index='{last}'] [col-id='received_unix_ns']", has_text=":").wait_for()


def test_a_filter_is_in_the_address(browser, address):
    """A choice above the page filters it, and goes along to other pages; going back takes it back."""
    with opened_page(browser, address, "/requests") as page:
        everything = page.locator("#page h2").first.inner_text()
        page.get_by_label("class", exact=True).first.click()
        page.get_by_role("option", name="image/short").click()
        until_address(page, "class=image%2Fshort")
        until(page, f"document.querySelector('#page h2').innerText != {everything!r}")
        page.get_by_role("link", name="Overview", exact=True).click()
        until_address(page, r"/\?class=image%2Fshort")
        page.get_by_role("heading", name="Overview", level=1).wait_for()
        page.wait_for_selector("#page section")
        assert not page.locator("h2", has_text="text/short").count()
        page.go_back()
        until_address(page, r"/requests\?class=image%2Fshort")
        page.locator(".ag-row[row-index='0']", has_text="image/short").wait_for()
        page.go_back()
        until(page, f"document.querySelector('#page h2')?.innerText == {everything!r}")


def test_a_control_is_still_at_hand(browser, address):
    """Whoever types or chooses by keyboard goes on where they were when the page has changed."""
    with opened_page(browser, address, "/requests") as page:
        heading = "document.querySelector('#requests-found')?.innerText"
        everything = page.locator("#requests-found").inner_text()
        page.get_by_label("TTFT ≥, ms").click()
        for typed, address_end in (("100", "min_ttft_ms=100$"), ("0", "min_ttft_ms=1000$")):
            page.keyboard.type(typed)
            until_address(page, address_end)
            until(page, f"({heading} ?? {everything!r}) != {everything!r}")
            everything = page.locator("#requests-found").inner_text()


def test_a_time_is_dragged_over(browser, address):
    """Dragging over the steps limits the page to that time, and one click shows all again."""
    with opened_page(browser, address, "/engine", height=1200) as page:
        plot = page.locator(".js-plotly-plot .nsewdrag").first
        plot.wait_for()
        page.wait_for_load_state("networkidle")
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        until_address(page, r"since=\d+&until=\d+")
        page.get_by_role("link", name="show all").first.click()
        until_address(page, "/engine$")


def test_a_bar_chooses_its_class(browser, address):
    """A click on a bar of the overview shows its class alone."""
    with opened_page(browser, address, "/", height=1700) as page:
        page.locator(".js-plotly-plot .barlayer .point").last.wait_for()
        page.wait_for_load_state("networkidle")
        bars = [bar.bounding_box() for bar in page.locator(".js-plotly-plot .barlayer .point path").all()]
        widest = max(bars, key=lambda bar: bar["width"])
        page.mouse.click(widest["x"] + widest["width"] / 2, widest["y"] + widest["height"] / 2)
        until_address(page, r"class=\w+%2F\w+")


def test_light_and_dark(browser, address):
    """The toggle changes the page and its figures, at the first click and back."""
    with opened_page(browser, address, "/", scheme="dark") as page:
        ground = "document.querySelector('.js-plotly-plot')?.layout.paper_bgcolor"
        for expected in ("#1c1e21", "#ffffff", "#1c1e21"):
            until(page, f"{ground} == '{expected}'")
            page.get_by_role("button", name="light or dark").click()


def test_pictures_are_saved(browser, address, tmp_path):
    """A figure is saved as PNG and as SVG."""
    with opened_page(browser, address, "/engine") as page:
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        for kind, begin in {"png": b"\x89PNG", "svg": b"<svg"}.items():
            with page.expect_download() as download:
                page.get_by_role("button", name=f"save as {kind.upper()}").click()
            saved = tmp_path / kind
            download.value.save_as(saved)
            assert download.value.suggested_filename == f"steps.{kind}"
            assert saved.read_bytes().startswith(begin)
        # None of plotly's own, which would upload the figure.
        buttons = page.locator(".modebar-btn")
        assert {button.get_attribute("data-attr") for button in buttons.all()} == {"zoom", "dragmode"}


def test_by_keyboard(browser, address):
    """Tab leads to a way past the menu, then to each page; Enter opens it."""
    with opened_page(browser, address, "/") as page:
        focused = "document.activeElement.innerText"
        page.keyboard.press("Tab")
        assert page.evaluate(focused) == "to the page"
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate(focused) == "Engine":
                break
        page.keyboard.press("Enter")
        until_address(page, "/engine")


def test_hostile_names_do_nothing(browser, hostile):
    """Names that are HTML and scripts run nothing, and make no element, on any page."""
    with served(hostile) as address, opened_page(browser, address, "/requests?requests=0-1") as page:
        page.locator("#request-details .js-plotly-plot .main-svg").first.wait_for()
        for found in (PAGES["requests"], *PAGES.values()):
            if not page.url.startswith(f"{address}/{found.name}"):
                page.get_by_role("link", name=found.title, exact=True).first.click()
                page.get_by_role("heading", name=found.title, exact=True, level=1).wait_for()
            page.wait_for_load_state("networkidle")
            if found.name in WITH_GRAPHS:
                page.locator(".js-plotly-plot .main-svg").first.wait_for()
            assert not page.locator("img[src=x]").count()
            assert not page.locator("a[href^=javascript]").count()


def test_a_wrong_address_says_so(browser, address):
    """A page that is not there, or a choice that cannot be, is told on the page."""
    for path in ("/nothing", "/requests?since=yesterday"):
        with opened_page(browser, address, path) as page:
            assert "This cannot be shown" in page.locator("#page").inner_text()
