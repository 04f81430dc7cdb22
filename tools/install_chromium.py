"""See to a Chromium for the browser tests.

Takes the one that is installed, else asks the system's package manager (as root),
else Playwright.  Where none of them can, it says so in one line and the browser
tests are skipped: the machine may have no network.

    python tools/install_chromium.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 120


def installed() -> bool:
    """Whether a browser is on the path, or where Playwright puts its own."""
    if any(shutil.which(name) for name in NAMES):
        return True
    code = "import playwright.sync_api as a\nwith a.sync_playwright() as p: print(p.chromium.executable_path)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return os.path.exists(found.stdout.strip())  # noqa: PTH110


def ways() -> Iterator[list[str]]:
    """Commands that may install one, the likeliest first."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]
        yield install
        yield ["sh", "-c", f"apt-get update && {' '.join(install)}"]
    yield [sys.executable, "-m", "playwright", "install", "chromium"]


def main() -> int:
    """Run the script; it never fails the build."""
    for command in ways():
        if installed():
            return 0
        print(f"installing a browser for the tests: {' '.join(command)}", file=sys.stderr)
        try:
            subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"  {error}", file=sys.stderr)
    if not installed():
        print("no Chromium could be installed: the browser tests will be skipped", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
