"""The exporter that a server starts beside itself when ``STAGETRACE_EXPORT`` asks for it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from typing import Final

from stagetrace.attributes import EXPORT_VARIABLE, SPOOL_VARIABLE
from stagetrace.settings import parse_export, setting

LOG_FILE: Final = "export.log"
"""Name, in the spool folder, of what the exporter has to say."""

_log = logging.getLogger("stagetrace")
_vllm_log = logging.getLogger("vllm.stagetrace")
"""Where vLLM shows also what is no warning."""

_FIRST: Final = frozenset({"MainProcess", "ApiServer_0"})
"""Names of the first front-end process: the only one, or the first of several that vLLM starts."""

_NEEDED: Final = (
    "stagetrace_export",
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
    "prometheus_client",
)


def start_exporter() -> None:
    """Start an exporter of this server's spool, if it is to have one; returns at once and never raises.

    To be called where requests are received, and nowhere else.
    """
    try:
        folder = os.environ.get(SPOOL_VARIABLE)
        if not folder or multiprocessing.current_process().name not in _FIRST:
            return
        if not setting(EXPORT_VARIABLE, parse_export, default=False):
            return
        missing = next((name for name in _NEEDED if not _is_there(name)), None)
        if missing is not None:
            hint = "pip install 'stagetrace[otlp]'"
            _log.warning("stagetrace: nothing is exported: there is no %s (hint: %s)", missing, hint)
            return
        threading.Thread(target=_start, args=(os.path.abspath(folder),), daemon=True).start()  # noqa: PTH100
    except Exception:
        _log.exception("stagetrace: nothing is exported: the exporter could not be started")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _start(folder: str) -> None:
    """Start it in a session of its own, and wait: it goes on in a child of its own, and ends at once."""
    command = [sys.executable, "-P", "-m", "stagetrace_export.detached", folder, str(os.getpid())]
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(os.path.join(folder, LOG_FILE), flags, 0o600)  # noqa: PTH118
        try:
            starting = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        finally:
            os.close(log)
        code = starting.wait()
    except OSError as error:
        _log.warning("stagetrace: nothing is exported: %s", error)
        return
    where = os.path.join(folder, LOG_FILE)  # noqa: PTH118
    if code:
        _log.warning("stagetrace: nothing is exported: the exporter ended with %d, see %s", code, where)
    else:
        _vllm_log.info("stagetrace: an exporter is at work, and says in %s how it fares", where)
