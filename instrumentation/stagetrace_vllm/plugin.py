"""What vLLM calls in each of its processes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from stagetrace.attributes import SPOOL_BYTES_VARIABLE, SPOOL_VARIABLE
from stagetrace.recorder import Recorder
from stagetrace.room import SPOOL_BYTES, segment_bytes
from stagetrace.settings import parse_spool_bytes, setting
from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.imports import ImportWatcher
from stagetrace_vllm.wrapping import Installation

_log = logging.getLogger("stagetrace")


class _Plugin:
    """The state of the plug-in in this process."""

    watcher: ImportWatcher | None = None
    installation: Installation | None = None


def activate() -> None:
    """Install the hooks, once a process; never raises.

    vLLM does not guard the call: an exception here would stop the server.
    Modules of vLLM are not imported, because the plug-in also runs in
    processes that never serve; a hook is set when its module appears.
    """
    try:
        folder = os.environ.get(SPOOL_VARIABLE)
        if not folder or _Plugin.installation is not None:
            return
        spool_bytes = setting(SPOOL_BYTES_VARIABLE, parse_spool_bytes, SPOOL_BYTES)
        recorder = Recorder(Path(folder), segment_bytes(spool_bytes), spool_bytes)
        installation = Installation(recorder, HOOKS)
        watcher = ImportWatcher(installation.modules(), installation.install)
        watcher.start()
        _Plugin.installation, _Plugin.watcher = installation, watcher
    except Exception:
        _log.exception("stagetrace is off: it could not be activated")


def deactivate() -> None:
    """Take all hooks out again; objects that were made in between keep theirs until they go."""
    if _Plugin.watcher is not None:
        _Plugin.watcher.stop()
    if _Plugin.installation is not None:
        _Plugin.installation.uninstall()
    _Plugin.watcher = _Plugin.installation = None
