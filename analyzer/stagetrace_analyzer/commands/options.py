"""Options that commands which read data have in common: the data, what of it, and where the result goes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, NoReturn

from stagetrace.errors import DataError, MissingExtraError, UsageError
from stagetrace_analyzer.classes import ClassRules, load_rules
from stagetrace_analyzer.contents import read_contents
from stagetrace_analyzer.dataset import is_dataset
from stagetrace_analyzer.ingest import ingest_spool, is_spool
from stagetrace_analyzer.selection import Selection, parse_selection

NOT_ENOUGH: Final = 3
"""Exit code of a command that found no requests, or not enough evidence."""

_WANTED: Final = "name a folder with a spool or a dataset"


class Format(StrEnum):
    """What a result is written as."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    MD = "md"


_BY_ENDING: Final = {
    ".htm": Format.HTML,
    ".html": Format.HTML,
    ".json": Format.JSON,
    ".markdown": Format.MD,
    ".md": Format.MD,
}


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line with a hint, as all errors of a command are."""

    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError`."""
        raise UsageError(message, hint=f"'{self.prog} -h' lists the options")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Which data are asked for, and how.

    Attributes:
        paths: Datasets and spools.
        rules: Rules of the traffic classes.
        selection: Which requests.
        by_phase: Keep the phases of an experiment apart.
    """

    paths: tuple[Path, ...]
    rules: ClassRules
    selection: Selection
    by_phase: bool


@dataclass(frozen=True, slots=True)
class Output:
    """Where a result goes, and as what; ``path`` None is standard output."""

    format: Format
    path: Path | None

    def write(self, text: str) -> None:
        """Write a result.

        Raises:
            UsageError: The file cannot be written.
        """
        if self.path is not None:
            _save(self.path, text)
            return
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A terminal or a pipe of another encoding may lack a character of some name.
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(text)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the paths, the classes and the selection."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="a dataset, or a spool of records"
    )
    parser.add_argument(
        "--classes", metavar="FILE", type=Path, help="traffic class rules (TOML) in place of the default ones"
    )
    parser.add_argument("--by-phase", action="store_true", help="keep the phases of an experiment apart")
    group = parser.add_argument_group(
        "selection", "Requests must meet all of these; the same one again is 'or', except --where."
    )
    group.add_argument(
        "--since",
        metavar="TIME",
        help="received then or later: 2026-01-31T12:00:00+01:00 (UTC without a zone), or "
        "30m, 2h, 1d before the newest request",
    )
    group.add_argument("--until", metavar="TIME", help="received before")
    for name, what in (
        ("class", "traffic class"),
        ("model", "served model"),
        ("arm", "arm of an experiment"),
        ("instance", "server process"),
    ):
        group.add_argument(f"--{name}", metavar="NAME", action="append", default=[], help=what)
    group.add_argument(
        "--where",
        metavar="CONDITION",
        action="append",
        default=[],
        help="such as 'pixels>=1000000', 'max_tokens=1..64', 'stream=true', 'outcome=ok'; "
        "the fields are those of class rules, and outcome",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the format and the file."""
    group = parser.add_argument_group("output")
    formats = group.add_mutually_exclusive_group()
    formats.add_argument(
        "--format",
        metavar="FORMAT",
        choices=[known.value for known in Format],
        help="text, json, html or md; without it the ending of -o FILE decides, or it is text",
    )
    for known in (Format.JSON, Format.HTML, Format.MD):
        formats.add_argument(
            f"--{known}", action="store_const", dest="format", const=known, help=f"for --format {known}"
        )
    group.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE, not to the terminal")
    group.add_argument("--force", action="store_true", help="let -o replace a file")


def read_data_options(options: argparse.Namespace) -> DataOptions:
    """Return what `add_data_options` has found.

    Raises:
        UsageError: The class rules or a value are wrong.
    """
    rules = load_rules(options.classes)
    selection = parse_selection(
        since=options.since,
        until=options.until,
        classes=getattr(options, "class"),
        models=options.model,
        arms=options.arm,
        instances=options.instance,
        where=options.where,
    )
    selection.check(rules)
    return DataOptions(tuple(options.paths), rules, selection, options.by_phase)


def read_output(options: argparse.Namespace) -> Output:
    """Return what `add_output_options` has found.

    Raises:
        UsageError: The file must not or cannot be written, or HTML would go to a terminal.
    """
    path: Path | None = options.output
    if path is not None:
        _check_output(path, force=options.force)
    by_ending = Format.TEXT if path is None else _BY_ENDING.get(path.suffix.lower(), Format.TEXT)
    chosen = by_ending if options.format is None else Format(options.format)
    if chosen is Format.HTML and path is None and sys.stdout.isatty():
        raise UsageError("HTML is not for a terminal", hint="add -o report.html")
    return Output(chosen, path)


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a package that is missing while something is imported into one line that says what to install.

    Raises:
        MissingExtraError: A package that is not ours is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("stagetrace"):
            raise
        raise MissingExtraError(
            f"{what} needs the package {missing}", hint=f"pip install 'stagetrace[{extra}]'"
        ) from error


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on standard error if that is a terminal; it is gone afterwards.

    Yields a function that takes how much is done, and of how much; None where there is no bar.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only where there is a terminal
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def datasets_of(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield a dataset for every path; those made from spools are temporary.

    A folder that is named twice is read once.

    Raises:
        UsageError: A path does not exist.
        DataError: A path cannot be read, or is neither a dataset nor a spool.
    """
    with tempfile.TemporaryDirectory(prefix="stagetrace-") as scratch:
        found: dict[str, Path] = {}
        for path in paths:
            _check_readable(path)
            real = os.path.realpath(path)
            if real not in found:
                found[real] = _dataset(path, Path(scratch) / str(len(found)))
        yield list(found.values())


def nothing_found(data: DataOptions, datasets: Sequence[Path]) -> str:
    """Say that no request is left, and what there was to select from.

    Raises:
        DataError: A dataset cannot be read.
    """
    contents = read_contents(datasets, data.rules)
    if not contents.requests:
        return f"there are no requests in {', '.join(str(path) for path in data.paths)}"
    return f"none of {contents.requests} requests is selected\nin the data: {contents}"


def _dataset(path: Path, scratch: Path) -> Path:
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
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is no path: {error}", hint=_WANTED) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="run as a user who may") from error
    if empty:
        raise DataError(f"{path} is empty", hint=_WANTED)


def _check_output(path: Path, *, force: bool) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder", hint="-o takes a file")
        if path.is_file() and not force:
            raise UsageError(f"{path} exists", hint="name another file, or use --force")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is no folder", hint="make it first, or name another file")
    except OSError as error:
        raise _unwritable(path, error) from error


def _save(path: Path, text: str) -> None:
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            # A device or a pipe is written to; it must not be replaced by a file.
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _replace(target: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = target.with_name(f".stagetrace-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _unwritable(path: Path, error: Exception) -> UsageError:
    why = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"cannot write {path}: {why}", hint="name another file")
