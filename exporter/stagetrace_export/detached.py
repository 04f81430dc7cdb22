"""An exporter that a server starts beside itself, and that outlives it until all is exported.

``python -m stagetrace_export.detached SPOOL PID``, with the id of the process that starts it.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from stagetrace import cli
from stagetrace.process_records import has_died
from stagetrace_export.follow import exporter_of, say

LOG_BYTES: Final = 1 << 20
"""When its log is longer, it begins anew."""

_NICE: Final = 10
"""Behind the server, and still served when that takes all it can get: the spool does not wait for ever."""

_LOOK_S: Final = 1.0
_LOG_LOOK_S: Final = 10.0
_USAGE: Final = 2


def main(argv: list[str]) -> int:
    """Leave the server's process tree, and export its spool until nobody writes to it any more."""
    spool, starter = Path(argv[0]), int(argv[1])
    # vLLM kills its children and theirs when it ends; an orphan is nobody's child.
    if os.fork():
        os._exit(0)
    with suppress(OSError):
        os.nice(_NICE)
    threading.Thread(target=_bound_log, daemon=True).start()
    arguments = ["export", str(spool), "--to=otlp", "--follow", "--until-ended", f"--starter={starter}"]
    while True:
        if not _wait(spool, starter):
            return 0
        code = cli.main(arguments)
        if code != _USAGE or exporter_of(spool) is None:
            return code


def _wait(spool: Path, starter: int) -> bool:
    """Wait for the exporter of a server that was here before; whether the starter lives that long."""
    told = None
    while (other := exporter_of(spool)) is not None:
        if has_died(starter):
            return False
        if other != told:
            say(f"waiting for process {other}, which exports {spool} still")
        told = other
        time.sleep(_LOOK_S)
    return True


def _bound_log() -> None:
    """Keep the log from growing for ever, whoever writes to it."""
    stderr = sys.stderr.fileno()
    while True:
        found = os.fstat(stderr)
        if stat.S_ISREG(found.st_mode) and found.st_size > LOG_BYTES:
            os.truncate(stderr, 0)
        time.sleep(_LOG_LOOK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
