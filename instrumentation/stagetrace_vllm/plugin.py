"""What vLLM calls in each of its processes."""

from __future__ import annotations

import logging

from stagetrace.recording import close_recorder, open_recorder
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
        if _Plugin.installation is not None:
            return
        recorder = open_recorder()
        if recorder is None:
            return
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
        close_recorder()
    _Plugin.watcher = _Plugin.installation = None
