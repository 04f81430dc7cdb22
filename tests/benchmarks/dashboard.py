"""The dashboard on a large dataset, in a real browser: its first page, and what a reader does on it.

python tests/benchmarks/dashboard.py [--requests N] [--cache DIR]

The dataset is that of ``analyzing.py``.  A time is from the click, or from asking
for the address, until what was asked for is drawn.  Each is measured the first
time, with nothing kept from before, and again.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from analyzing import dataset
from browsers import chromium

from stagetrace_analyzer.simulation.scaled import REQUESTS_DEFAULT

DRAWN = "#page section, #page [role=alert], #page [role=status]"


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


def drawn(page, heading):
    """Wait until a page is there, with all its figures or its first rows."""
    page.get_by_role("heading", name=heading, exact=True, level=1).wait_for()
    page.locator(DRAWN).first.wait_for()
    if heading == "Requests":
        page.locator(".ag-row[row-index='3']").filter(has_text="short").first.wait_for()
    for graph in page.locator(".js-plotly-plot").all():
        graph.locator(".main-svg").first.wait_for()


def steps(page, address):
    """What a reader does: names, actions, and what to wait for."""

    def menu(name):
        return name, page.get_by_role("link", name=name, exact=True).first.click, lambda: drawn(page, name)

    def row(name, number):
        def shown():
            page.wait_for_url(re.compile(r"requests=0-\d+"))
            page.locator("#request-details .js-plotly-plot .main-svg").first.wait_for()
            page.locator(f".ag-row-selected[row-index='{number}']").first.wait_for()

        return name, page.locator(f".ag-row[row-index='{number}']").click, shown

    def link(name, path):
        return name, lambda: page.goto(address + path), lambda: drawn(page, "Requests")

    return [
        ("overview, by its address", lambda: page.goto(address), lambda: drawn(page, "Overview")),
        menu("Class"),
        menu("Requests"),
        row("a request", 3),
        menu("Engine"),
        menu("Data quality"),
        menu("Overview"),
        link("images, by address", "requests?class=image%2Fshort"),
        link("slow ones, by address", "requests?min_ttft_ms=500"),
    ]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=REQUESTS_DEFAULT, help="default: %(default)s")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stagetrace-benchmarks")
    options = parser.parse_args()
    folder = dataset(options.requests, options.cache)
    with served(folder) as (address, process, start_s), chromium() as browser:
        print(f"until it says where it is: {start_s:.1f} s")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        times = {}
        for _ in range(2):
            for name, action, wait in steps(page, address):
                begin = time.perf_counter()
                action()
                wait()
                times.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
        print(f"{'':24}{'first, ms':>12}{'again, ms':>12}   (budget: first page 2,000, the others 300)")
        for name, (first, again) in times.items():
            print(f"{name:24}{first:>12,.0f}{again:>12,.0f}")
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        peak_kib = int(re.search(r"VmHWM:\s+(\d+)", status)[1])
        print(f"peak memory of the server: {peak_kib / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()
