"""``stagetrace analyze``: where do requests wait?"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stagetrace.errors import DataError, UsageError
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.dataset import is_dataset
from stagetrace_analyzer.ingest import ingest_spool, is_spool
from stagetrace_analyzer.reports.json_report import render_json
from stagetrace_analyzer.reports.text import write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TextIO

    from stagetrace_analyzer.analysis import Analysis

SUMMARY: Final = "where requests of each traffic class spend their time, and where they wait"

_NOT_ENOUGH: Final = 3
_WANTED: Final = "name a folder with a spool or a dataset"

_DESCRIPTION: Final = """\
Say where the requests of each traffic class spend their time, and where they
wait, until the first token and until completion.

A request that failed, was cancelled or was lost counts as infinitely slow.
Exit codes: 0 done, 2 wrong usage or unreadable data, 3 no requests."""

_EPILOG: Final = """\
examples:
  stagetrace analyze spool/
  stagetrace analyze run-1/ run-2/ --by-phase --json -o report.json"""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: An option or a path is wrong.
        DataError: The data cannot be read.
    """
    options = _parser().parse_args(argv)
    if options.output is not None:
        _check_output(options.output, force=options.force)
    rules = load_rules(options.classes)
    with _datasets(options.paths) as datasets:
        analysis = analyze(datasets, rules, by_phase=options.by_phase)
    if not analysis.requests:
        names = ", ".join(str(path) for path in options.paths)
        sys.stderr.write(f"stagetrace: there are no requests in {names}\n")
        return _NOT_ENOUGH
    write = _write_json if options.json else write_text
    if options.output is None:
        write(analysis, sys.stdout)
    else:
        text = io.StringIO()
        write(analysis, text)
        _save(options.output, text.getvalue())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stagetrace analyze",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="a dataset, or a spool of records"
    )
    parser.add_argument(
        "--classes", metavar="FILE", type=Path, help="traffic class rules (TOML) in place of the default ones"
    )
    parser.add_argument("--by-phase", action="store_true", help="keep the phases of an experiment apart")
    parser.add_argument("--json", action="store_true", help="JSON in place of text")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write to FILE, not to the terminal"
    )
    parser.add_argument("--force", action="store_true", help="let -o replace a file")
    return parser


@contextlib.contextmanager
def _datasets(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield a dataset for every path; those made from spools are temporary."""
    with tempfile.TemporaryDirectory(prefix="stagetrace-") as scratch:
        yield [_dataset(path, Path(scratch) / str(number)) for number, path in enumerate(paths)]


def _dataset(path: Path, scratch: Path) -> Path:
    _check_readable(path)
    if is_dataset(path):
        return path
    if not is_spool(path):
        inside = next((folder for folder in sorted(path.iterdir()) if is_dataset(folder)), None)
        hint = _WANTED if inside is None else f"there is a dataset in {inside}"
        raise DataError(f"{path} holds neither a dataset nor a spool", hint=hint)
    ingest_spool(path, scratch)
    return scratch


def _check_readable(path: Path) -> None:
    try:
        empty = not any(path.iterdir())
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist", hint=_WANTED) from error
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file", hint="name the folder that holds it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="run as a user who may") from error
    if empty:
        raise DataError(f"{path} is empty", hint=_WANTED)


def _check_output(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="-o takes a file")
    if path.exists() and not force:
        raise UsageError(f"{path} exists", hint="name another file, or use --force")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder", hint="make it first, or name another file")


def _write_json(analysis: Analysis, file: TextIO) -> None:
    file.write(render_json(analysis))


def _save(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file") from error
    finally:
        temporary.unlink(missing_ok=True)
