"""What the doctor says."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """How much a remark matters."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class Remark(NamedTuple):
    """One thing that was found.

    Attributes:
        section: What it is about: ``server``, ``hooks``, ``spool``, ``recorded`` or ``proof``.
        level: ``problem`` if something is not, or was not, recorded because of it.
        text: One line.
        hint: What to do about it, or None.
    """

    section: str
    level: Level
    text: str
    hint: str | None = None
