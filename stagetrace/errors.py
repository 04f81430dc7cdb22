"""Errors a user can meet.

::

    StagetraceError
    ├── UsageError(ValueError)        wrong option, class file or plan: exit code 2
    ├── DataError(ValueError)         unreadable spool or dataset: exit code 2
    ├── MissingExtraError(ImportError) a package of an extra is not installed: exit code 2
    └── ServerError(RuntimeError)     the server under test did not start or died: exit code 1
"""

from __future__ import annotations


class StagetraceError(Exception):
    """Base of all errors that stagetrace raises on purpose.

    Args:
        message: One line that says what is wrong.
        hint: One line that says what to do, or None.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the message, with the hint behind it."""
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class UsageError(StagetraceError, ValueError):
    """The command line, a class file or a plan is wrong."""


class DataError(StagetraceError, ValueError):
    """A spool or a dataset cannot be read."""


class MissingExtraError(StagetraceError, ImportError):
    """A package that an extra brings is not installed."""


class ServerError(StagetraceError, RuntimeError):
    """The server under test did not start, or died."""

    exit_code = 1
