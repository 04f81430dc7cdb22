"""Settings that are read from the environment of a server."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Final, TypeVar

from stagetrace.attributes import EXPORT_VARIABLE, SAMPLE_VARIABLE, SPOOL_BYTES_VARIABLE
from stagetrace.errors import UsageError
from stagetrace.room import SPOOL_BYTES_MIN
from stagetrace.sampling import Sampler

_log = logging.getLogger("stagetrace")

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,15})([KMGT]?)", re.IGNORECASE)

T = TypeVar("T")


def setting(variable: str, parse: Callable[[str], T], default: T) -> T:
    """Read a setting; what cannot be understood is logged in one line, and the default is taken.

    A server must not fail to start because of us.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except UsageError as error:
        _log.warning("stagetrace: %s; the default is taken", error)
        return default


def parse_spool_bytes(text: str) -> int:
    """Read the size that a spool folder may reach: bytes, or a number with K, M, G or T (powers of 1024).

    Raises:
        UsageError: It is no size, or too small.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"{SPOOL_BYTES_VARIABLE}={text}: no size", hint="bytes, or as in 512M, 2G")
    size = int(found[1]) * _UNITS[found[2].upper()]
    if size < SPOOL_BYTES_MIN:
        raise UsageError(f"{SPOOL_BYTES_VARIABLE}={text}: too small", hint="at least 1M")
    return size


def parse_export(text: str) -> bool:
    """Read whether an exporter is to be started: ``otlp``.

    Raises:
        UsageError: It is another word.
    """
    if text.lower() != "otlp":
        raise UsageError(f"{EXPORT_VARIABLE}={text}: no way to export", hint="otlp, or leave it unset")
    return True


def parse_sampler(text: str) -> Sampler:
    """Read which requests to record: ``0.1``, ``parent`` or ``parent:0.1``.

    Raises:
        UsageError: It is none of these.
    """
    head, separator, rest = text.partition(":")
    parent = head == "parent"
    share = rest if parent else text
    if parent and not separator:
        return Sampler(parent=True)
    try:
        return Sampler(float(share), parent=parent)
    except ValueError:
        hint = "a share between 0 and 1, parent, or parent:0.1"
        raise UsageError(f"{SAMPLE_VARIABLE}={text}: no sampling", hint=hint) from None
