from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING

import analyses
import pytest
from analyses import HOSTILE, everything, poor, report
from browsers import chromium

from stagetrace_analyzer.reports.html import render_html

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = '"></script><img src=x onerror="document.title=1"><script>document.title=1</script>'


class Elements(HTMLParser):
    """Collects elements and texts of a page, without what scripts and styles hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data) -> None:
        if self.elements and self.elements[-1][0] not in {"script", "style"}:
            self.texts.append(data)


def test_the_page_is_one_file() -> None:
    """Nothing in it is loaded from anywhere, and its policy forbids to."""
    found = Elements(render_html(everything())).elements
    assert not [attrs for _, attrs in found if {"src", "href", "srcset", "action"} & set(attrs)]
    assert not [tag for tag, _ in found if tag in {"link", "iframe", "object", "embed", "base", "form"}]
    assert sum(tag == "script" and "type" not in attrs for tag, attrs in found) == 2
    (policy,) = [attrs["content"] for tag, attrs in found if tag == "meta" and "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy


@pytest.mark.parametrize("name", [HOSTILE, SCRIPT, "<!--", "' onmouseover='x"])
def test_names_are_text(name: str) -> None:
    """A hostile name brings neither an element nor an attribute into the page, and is shown as it is."""
    harmless = Elements(render_html(analyses.analysis(report("x", "y"))))
    found = Elements(render_html(analyses.analysis(report(name, name))))
    assert [(tag, set(attrs)) for tag, attrs in found.elements] == [
        (tag, set(attrs)) for tag, attrs in harmless.elements
    ]
    shown = "".join(character if character.isprintable() else "?" for character in name)
    assert f"[{shown}] {shown}" in "".join(found.texts)


def test_no_handler_is_in_the_markup() -> None:
    """All behaviour is in the page's script: no attribute holds any."""
    found = Elements(render_html(everything())).elements
    assert not [name for _, attrs in found for name in attrs if name.startswith("on")]


# --- in a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory) -> Iterator:
    """A report with all its figures drawn, in a browser without a network; what goes wrong is collected.

    One of its classes is drawn in every figure and has a hostile name, and one has no requests.
    """
    found = analyses.analysis(
        report(), report(HOSTILE, SCRIPT, mean_ms=300.0), report("image/short"), poor(SCRIPT)
    )
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(found), encoding="utf-8")
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    page.wrongs = []
    page.on("console", lambda message: page.wrongs.append(message.text))
    page.on("pageerror", lambda error: page.wrongs.append(str(error)))
    page.on(
        "request", lambda sent: page.wrongs.append(sent.url) if not sent.url.startswith("file:") else None
    )
    page.goto(path.as_uri())
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        plot.locator("svg.main-svg").first.wait_for()
    yield page
    context.close()


@pytest.mark.browser
def test_every_figure_is_drawn(page) -> None:
    """All figures are drawn without a word on the console or a request, and none is wider than the page."""
    assert page.locator(".plot .main-svg").count() >= page.locator(".plot").count() == 4 + 2 + 1 + 2 * 3
    assert page.wrongs == []
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    titles = {button.get_attribute("data-title") or "" for button in page.locator(".modebar-btn").all()}
    assert titles
    assert not [title for title in titles if "hare" in title or "loud" in title], "nothing uploads a figure"


@pytest.mark.browser
def test_names_in_figures_are_text(page) -> None:
    """A hostile name is on an axis and under the pointer as it is, and runs and links nothing."""
    label = f"[{SCRIPT}] {HOSTILE}"[:39] + "\N{HORIZONTAL ELLIPSIS}"
    assert label in page.locator(".plot").first.locator(".yaxislayer-above text").all_text_contents()
    page.evaluate(
        "Plotly.Fx.hover(document.querySelectorAll('.plot')[4], [{curveNumber: 1, pointNumber: 9}])"
    )
    shown = "".join(page.locator(".plot").nth(4).locator(".hoverlayer text tspan").all_text_contents())
    page.evaluate("Plotly.Fx.unhover(document.querySelectorAll('.plot')[4])")
    assert shown.startswith(label)
    assert page.locator(".plot svg a").count() == 0
    assert page.title() == "Where requests wait"


@pytest.mark.browser
def test_texts_do_not_lie_over_each_other(page) -> None:
    """In no figure does a label cover another one, or leave the figure."""
    overlaps = page.evaluate("""() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
        const frame = plot.getBoundingClientRect();
        const texts = [...plot.querySelectorAll("svg text")]
          .filter((t) => t.textContent.trim() && getComputedStyle(t).opacity !== "0")
          .map((t) => [t.textContent, t.getBoundingClientRect()]).filter(([, r]) => r.width);
        const outside = texts.filter(([, r]) => r.left < frame.left - 1 || r.right > frame.right + 1);
        const over = texts.flatMap(([one, a], n) => texts.slice(n + 1)
          .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2)
          .map(([other]) => `${one} / ${other}`));
        return [...outside.map(([text]) => `outside: ${text}`), ...over];
    })""")
    assert overlaps == []


def colours(page) -> tuple[str, str]:
    """Colours of the page's ground, and of a text in a figure."""
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return ground, page.evaluate("getComputedStyle(document.querySelector('.plot text')).fill")


@pytest.mark.browser
def test_the_theme_follows_the_reader(page) -> None:
    """Page and figures change with the reader's theme while it is open."""
    themes = {
        "light": ("rgb(246, 247, 248)", "rgb(28, 32, 36)"),
        "dark": ("rgb(20, 21, 23)", "rgb(230, 232, 234)"),
    }
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        # The page's policy forbids what Playwright's own waiting for a function evaluates.
        for _ in range(100):
            if colours(page) == themes[theme]:
                break
            page.wait_for_timeout(50)
        assert colours(page) == themes[theme]
    assert page.wrongs == []


WIDTHS = "[...document.querySelectorAll('.plot')].map((plot) => plot.querySelector('.main-svg').clientWidth)"


@pytest.mark.browser
def test_on_paper_everything_is_there(page) -> None:
    """Before printing all parts are opened, and all figures made as wide as paper, in the light theme."""
    before = page.evaluate(WIDTHS)
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = false; })")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    # What a browser does with the media it prints must not bring the reader's theme back.
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_timeout(200)
    assert page.locator("details:not([open])").count() == 0
    assert set(page.evaluate(WIDTHS)) == {680}
    assert colours(page) == ("rgb(255, 255, 255)", "rgb(28, 32, 36)")
    page.emulate_media(media="screen", color_scheme="light")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.wait_for_timeout(200)
    assert page.evaluate(WIDTHS) == before
    assert page.wrongs == []
