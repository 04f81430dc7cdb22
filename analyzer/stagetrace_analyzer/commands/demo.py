"""``stagetrace demo``: the whole path once, on a real vLLM server on this machine."""

from __future__ import annotations

import argparse
import importlib.resources
import importlib.util
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from stagetrace.errors import MissingExtraError, UsageError
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.demo.agreement import Agreement, compare_with_client
from stagetrace_analyzer.demo.load import IMAGES_PER_S, REQUESTS, TEXT_PER_S
from stagetrace_analyzer.demo.run import record_demo
from stagetrace_analyzer.ingest import ingest_spool
from stagetrace_analyzer.reports.json_report import render_json
from stagetrace_analyzer.reports.text import write_text

SUMMARY: Final = "the whole path on a real vLLM server on this machine, in a few minutes"

_DESCRIPTION: Final = """\
Make a tiny multimodal model, start a real vLLM CPU server with the plug-in, send
open-loop Poisson traffic (text only, image only, both), stop the server, and say
where the requests waited.  Everything is written into the output folder.

Figures of a tiny random model show how to read a report, not how fast vLLM is."""

_ABOUT: Final = "A tiny random model on a CPU: the figures show how to read a report, not how fast vLLM is."

_EPILOG: Final = """\
examples:
  stagetrace demo
  stagetrace demo --recorded            # a run that ships with the package: seconds
  stagetrace demo --requests 1100 --images-per-s 1.5 -o longer/"""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: An option is wrong, or the output folder exists.
        MissingExtraError: vLLM is not installed.
        ServerError: The server did not start, or died.
    """
    options = _parser().parse_args(argv)
    output: Path = options.output
    _prepare(output, force=options.force)
    if options.recorded:
        _copy_recorded(output)
    else:
        _require_vllm()
        with _terminating():
            record_demo(
                output,
                text_per_s=options.text_per_s,
                images_per_s=options.images_per_s,
                requests=options.requests,
                seed=options.seed,
            )
        ingest_spool(output / "spool", output / "dataset", about=_ABOUT)
    _report(output)
    return 0


def _report(output: Path) -> None:
    analysis = analyze([output / "dataset"], load_rules(), by_phase=True)
    (output / "analyze.json").write_text(render_json(analysis), encoding="utf-8")
    with (output / "report.txt").open("w", encoding="utf-8") as file:
        write_text(analysis, file)
    write_text(analysis, sys.stdout)
    agreement = compare_with_client(output / "dataset", output / "observations.jsonl")
    sys.stdout.write("\n" + "\n".join(_closing(agreement, output)) + "\n")


def _closing(agreement: Agreement, output: Path) -> Iterator[str]:
    yield f"Client and server, {agreement.requests} requests:"
    yield f"  before the server's first record  {agreement.before}"
    yield f"  TTFT beyond the sum of stages     {agreement.ttft_beyond}"
    yield f"  completion beyond the sum         {agreement.completion_beyond}"
    yield "  What lies between is the connection, kernel buffers and the client's own event loop."
    yield ""
    yield f"Written: {output}/dataset, {output}/analyze.json, {output}/report.txt"
    yield f"Look again: stagetrace analyze {output}/dataset --by-phase"
    yield f"See it:     stagetrace dashboard {output}/dataset"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stagetrace demo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        default=Path("stagetrace-demo"),
        help="default: %(default)s",
    )
    parser.add_argument("--force", action="store_true", help="replace the output folder")
    parser.add_argument("--recorded", action="store_true", help="show the run that ships with the package")
    parser.add_argument(
        "--requests",
        metavar="N",
        type=_count,
        default=REQUESTS,
        help="requests of each class in each phase, about; default: %(default)s",
    )
    parser.add_argument(
        "--text-per-s", metavar="RATE", type=_positive, default=TEXT_PER_S, help="default: %(default)s"
    )
    parser.add_argument(
        "--images-per-s", metavar="RATE", type=_positive, default=IMAGES_PER_S, help="default: %(default)s"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default: %(default)s")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _prepare(output: Path, *, force: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file", hint="-o takes a folder")
    if output.is_dir() and any(output.iterdir()):
        if not force:
            raise UsageError(f"{output} exists", hint="name another folder with -o, or use --force")
        if not (output / "observations.jsonl").exists():
            raise UsageError(f"{output} is no folder of a demo", hint="name another folder with -o")
        shutil.rmtree(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make {output}: {error.strerror}", hint="name another folder with -o"
        ) from error


def _copy_recorded(output: Path) -> None:
    source = importlib.resources.files("stagetrace_analyzer.demo") / "recorded"
    with importlib.resources.as_file(source) as folder:
        shutil.copytree(folder, output, dirs_exist_ok=True)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            "the demo needs vLLM in this environment",
            hint="'make demo' installs a CPU build; 'stagetrace demo --recorded' needs none",
        )


@contextmanager
def _terminating() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C, so that no process of the server stays behind."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
