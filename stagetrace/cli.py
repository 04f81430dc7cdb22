"""The console script: finds a command, imports it, runs it.

Commands register under the entry-point group ``stagetrace.commands`` as modules
with ``SUMMARY`` (one line) and ``main(argv) -> int``; the entry point names the
extra that brings what it needs.  Exit codes: 0 done, 1 crash, 2 usage, 3 not enough
evidence, 4 roll back, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from stagetrace._version import __version__
from stagetrace.errors import MissingExtraError, StagetraceError, UsageError

GROUP: Final = "stagetrace.commands"
_INTERRUPTED: Final = 130
_OURS: Final = ("stagetrace", "stagetrace_analyzer", "stagetrace_export", "stagetrace_vllm")


class Command(Protocol):
    """What a command's module offers."""

    SUMMARY: str
    main: Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on stderr, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {found.name: found for found in entry_points(group=GROUP)}
    parser = argparse.ArgumentParser(
        prog="stagetrace",
        description="Where do requests wait in multimodal LLM serving, and because of whom?",
        epilog="commands: " + ", ".join(sorted(commands)) + "; 'stagetrace COMMAND -h' tells more",
    )
    parser.add_argument("--version", action="version", version=f"stagetrace {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="what to do")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args(arguments)
    try:
        if options.command not in commands:
            known = ", ".join(sorted(commands))
            raise UsageError(f"no command {options.command!r}", hint=f"commands are: {known}")
        return _load(commands[options.command]).main(options.arguments)
    except StagetraceError as error:
        sys.stderr.write(f"stagetrace: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("stagetrace: interrupted\n")
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone; what it wanted, it has.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _load(found: EntryPoint) -> Command:
    try:
        command: Command = found.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OURS:
            raise
        extra = found.extras[0] if found.extras else "all"
        raise MissingExtraError(
            f"'stagetrace {found.name}' needs the package {missing}",
            hint=f"pip install 'stagetrace[{extra}]'",
        ) from error
    return command
