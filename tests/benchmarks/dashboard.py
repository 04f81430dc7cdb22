"""The dashboard on a large dataset, in a real browser: its first page, and what a reader does on it.

python tests/benchmarks/dashboard.py [--requests N] [--rounds N] [--cache DIR]

The dataset is that of ``analyzing.py``.  A time is from the click as the browser
notes it, or from asking for the address, until the frame after everything in the
window is drawn: texts, rows, figures.  What is below the window is drawn when
there is nothing else to do; when that is done is a column of its own.  Each is
measured the first time, with nothing kept from before, and again.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from analyzing import dataset
from browsers import chromium

from stagetrace_analyzer.simulation.scaled import REQUESTS_DEFAULT

CLICKS = """
    window.clicked = 0;
    addEventListener("click", (event) => { window.clicked = event.timeStamp; }, true);
"""

DRAWN = """(wanted) => new Promise((resolve) => {
    const isDrawn = (where) => {
        if (document.querySelector("#page h1")?.textContent !== wanted.heading) return false;
        if (!location.search.includes(wanted.search ?? "")) return false;
        if (!document.querySelector("#page section, #page [role=alert], #page [role=status]")) return false;
        for (const selector of wanted.there ?? []) if (!document.querySelector(selector)) return false;
        if (wanted.rows && !document.querySelector(".ag-row[row-index='3']")?.textContent.includes(wanted.rows))
            return false;
        return [...document.querySelectorAll(".st-graph")].every((graph) => {
            const { top, bottom } = graph.getBoundingClientRect();
            const counts = where === "page" || (bottom > 0 && top < innerHeight);
            return !counts || (!graph.classList.contains("st-pending") && graph.querySelector(".main-svg"));
        });
    };
    const when = (where, then) => {
        if (!isDrawn(where)) setTimeout(when, 2, where, then);
        // What follows a frame's callbacks comes after it was painted.
        else requestAnimationFrame(() => setTimeout(() => then(performance.now() - window.clicked)));
    };
    when("window", (ms) => when("page", (whole) => resolve([ms, whole])));
})"""


@contextlib.contextmanager
def served(folder):
    """The address of the dashboard, and how long it took to be there."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "stagetrace", "dashboard", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"open (http://[\d.:]+/)", line):
                    break
            else:
                sys.exit("the dashboard did not start")
            yield found[1], process.pid, time.perf_counter() - begin
        finally:
            process.terminate()


def steps(page, address):
    """What a reader does: names, actions, and what has to be drawn then."""

    def menu(name, **wanted):
        link = page.get_by_role("link", name=name, exact=True).first
        return name, link.click, {"heading": name, **wanted}

    def row(name, number):
        click = page.locator(f".ag-row[row-index='{number}']").click
        there = ["#request-details .st-graph", f".ag-row-selected[row-index='{number}']"]
        return name, click, {"heading": "Requests", "search": "requests=0-", "there": there}

    def link(name, path, **wanted):
        # Not until all is loaded, as goto would wait, but until it is drawn.
        return name, lambda: page.goto(address + path, wait_until="commit"), wanted

    return [
        link("overview, by its address", "", heading="Overview"),
        menu("Class"),
        menu("Requests", rows=":"),
        row("a request", 3),
        menu("Engine"),
        menu("Data quality"),
        menu("Overview"),
        link("images, by address", "requests?class=image%2Fshort", heading="Requests", rows="image/short"),
        link("slow ones, by address", "requests?min_ttft_ms=500", heading="Requests", rows=":"),
    ]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=REQUESTS_DEFAULT, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="how often again, default: %(default)s")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stagetrace-benchmarks")
    options = parser.parse_args()
    folder = dataset(options.requests, options.cache)
    with served(folder) as (address, process, start_s), chromium() as browser:
        print(f"until it says where it is: {start_s:.1f} s")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        page.add_init_script(CLICKS)
        times = {}
        for _ in range(1 + options.rounds):
            for name, action, wanted in steps(page, address):
                action()
                times.setdefault(name, []).append(page.evaluate(DRAWN, wanted))
        print("ms until all in the window is drawn (budget: first page 2,000, the others 300), and all below")
        print(f"{'':26}{'first':>8}{'again: p50':>12}{'p95':>8}{'first, whole page':>20}{'again, p50':>12}")
        for name, ((first, first_whole), *rest) in times.items():
            again, whole = (sorted(column) for column in zip(*rest, strict=True))
            p95 = again[-(-95 * len(again) // 100) - 1]
            print(
                f"{name:26}{first:>8,.0f}{statistics.median(again):>12,.0f}{p95:>8,.0f}"
                f"{first_whole:>20,.0f}{statistics.median(whole):>12,.0f}"
            )
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        peak_kib = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
        print(f"peak memory of the server: {peak_kib / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()
