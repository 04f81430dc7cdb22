"""A pace for a server's model, so that a scene lasts as long on a fast machine as on a slow one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Pace:
    """The least milliseconds of each step of a server, which may change while it runs.

    Attributes:
        arguments: What the server is started with.
    """

    arguments = ("--worker-cls=paced_worker.PacedWorker",)

    def __init__(self, folder):
        self._file = folder / "pace"
        self._set("0")

    def environment(self, more=None):
        """The server's environment, with more variables in it."""
        environment = os.environ | (more or {})
        search = (str(Path(__file__).parent), environment.get("PYTHONPATH"))
        return environment | {
            "PACE_FILE": str(self._file),
            "PYTHONPATH": os.pathsep.join(filter(None, search)),
        }

    @contextlib.contextmanager
    def paced(self, least_ms):
        """Have each step that begins within take at least so many milliseconds."""
        before = self._file.read_text(encoding="utf-8")
        self._set(str(least_ms))
        try:
            yield
        finally:
            self._set(before)

    def _set(self, content):
        # Whole at any time.
        new = self._file.with_suffix(".new")
        new.write_text(content, encoding="utf-8")
        new.replace(self._file)
