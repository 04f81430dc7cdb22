"""``stagetrace analyze``: where do requests wait?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Final

from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.commands.options import (
    NOT_ENOUGH,
    CommandParser,
    Format,
    add_data_options,
    add_output_options,
    datasets_of,
    needs_extra,
    nothing_found,
    progress_bar,
    read_data_options,
    read_output,
)
from stagetrace_analyzer.results import Analysis

SUMMARY: Final = "where requests of each traffic class spend their time, and where they wait"

_DESCRIPTION: Final = """\
Say where the requests of each traffic class spend their time, and where they
wait, until the first token and until completion.

A request that failed, was cancelled or was lost counts as infinitely slow.
Exit codes: 0 done, 2 wrong usage or unreadable data, 3 no requests."""

_EPILOG: Final = """\
examples:
  stagetrace analyze spool/
  stagetrace analyze run-1/ run-2/ --by-phase --json -o report.json
  stagetrace analyze spool/ --since 30m --class image/short -o report.html
  stagetrace analyze spool/ --where 'pixels>=1000000' --where stream=true"""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: An option or a path is wrong.
        DataError: The data cannot be read.
        MissingExtraError: HTML is asked for, and what makes it is not installed.
    """
    options = _parser().parse_args(argv)
    output, data = read_output(options), read_data_options(options)
    render = _renderer(output.format)
    with progress_bar("analyzing") as progress, datasets_of(data.paths) as datasets:
        analysis = analyze(
            datasets, data.rules, by_phase=data.by_phase, selection=data.selection, progress=progress
        )
        missing = None if analysis.requests else nothing_found(data, datasets)
    if missing is not None:
        sys.stderr.write(f"stagetrace: {missing}\n")
        return NOT_ENOUGH
    output.write(render(analysis))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="stagetrace analyze",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data_options(parser)
    add_output_options(parser)
    return parser


def _renderer(wanted: Format) -> Callable[[Analysis], str]:
    if wanted is Format.HTML:
        with needs_extra("html", "an HTML report"):
            from stagetrace_analyzer.reports.html import render_html  # noqa: PLC0415 - of an extra

        return render_html
    # Each brings its own packages, which take time to import.
    if wanted is Format.MD:
        from stagetrace_analyzer.reports.markdown import render_markdown  # noqa: PLC0415

        return render_markdown
    if wanted is Format.JSON:
        from stagetrace_analyzer.reports.json_report import render_json  # noqa: PLC0415

        return render_json
    from stagetrace_analyzer.reports.text import render_text  # noqa: PLC0415

    return render_text
