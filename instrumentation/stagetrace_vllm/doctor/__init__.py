"""``stagetrace doctor``: will a server be recorded, and was it?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Final

from stagetrace.attributes import SPOOL_VARIABLE
from stagetrace_vllm.doctor.remarks import Level, Remark
from stagetrace_vllm.doctor.server import examine_server
from stagetrace_vllm.doctor.spool import examine_folder, examine_records
from stagetrace_vllm.proof import UNPROVED

SUMMARY: Final = "whether a server will be recorded, and whether it was"

_PROBLEMS: Final = 3
_WIDTH: Final = 100
_MARKS: Final = {Level.OK: "ok  ", Level.NOTE: "note", Level.PROBLEM: "!!  "}

_DESCRIPTION: Final = """\
Say whether a server that is started in this environment will be recorded, and
what has been recorded into the spool until now.  Nothing is started, and
nothing of vLLM is imported.

Exit codes: 0 all is well, 2 wrong usage, 3 something is not recorded."""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="stagetrace doctor",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "spool", metavar="SPOOL", nargs="?", type=Path, help=f"the spool folder; without it, {SPOOL_VARIABLE}"
    )
    parser.add_argument("--json", action="store_true", help="JSON in place of text")
    options = parser.parse_args(argv)
    remarks = list(_examine(options.spool))
    sys.stdout.write(_as_json(remarks) if options.json else _as_text(remarks))
    return _PROBLEMS if any(remark.level is Level.PROBLEM for remark in remarks) else 0


def _examine(named: Path | None) -> Iterator[Remark]:
    yield from examine_server()
    setting = os.environ.get(SPOOL_VARIABLE)
    folder = named or (Path(setting) if setting else None)
    if folder is None:
        yield Remark(
            "spool",
            Level.PROBLEM,
            f"{SPOOL_VARIABLE} is not set: nothing will be recorded",
            "set it to a folder on a local disk",
        )
    else:
        yield from examine_folder(folder)
        yield from examine_records(folder)
    for what, why in UNPROVED.items():
        yield Remark("proof", Level.NOTE, f"{what}: {why}")


def _as_json(remarks: Sequence[Remark]) -> str:
    return json.dumps([remark._asdict() for remark in remarks], indent=2) + "\n"


def _as_text(remarks: Sequence[Remark]) -> str:
    lines = []
    for section, members in groupby(remarks, key=lambda remark: remark.section):
        lines.append(section)
        for remark in members:
            text = remark.text if remark.hint is None else f"{remark.text} (hint: {remark.hint})"
            first, *rest = wrap(text, _WIDTH - 7, break_long_words=False, break_on_hyphens=False)
            lines += [f"  {_MARKS[remark.level]} {first}", *(f"       {line}" for line in rest)]
    return "\n".join(lines) + "\n"
