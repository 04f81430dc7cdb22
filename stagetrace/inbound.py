"""What is read of headers and URLs: hostile input, of which only the known parts are kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

from stagetrace.attributes import (
    BAGGAGE_ARM,
    BAGGAGE_INTENDED_UNIX_NS,
    BAGGAGE_LABEL,
    BAGGAGE_PHASE,
    BAGGAGE_PREFIX,
)
from stagetrace.recorder import Recorder
from stagetrace.records import Fact, RecordKind

HEADER_MAX_BYTES: Final = 1024
"""Longer headers are not read."""

Headers = Mapping[str, str] | Iterable[tuple[bytes, bytes]]
"""Headers of a request: a mapping, or pairs as ASGI has them; names in any case."""

_BAGGAGE_FACTS: Final = {
    BAGGAGE_PHASE: Fact.PHASE,
    BAGGAGE_LABEL: Fact.LABEL,
    BAGGAGE_ARM: Fact.ARM,
    BAGGAGE_INTENDED_UNIX_NS: Fact.INTENDED_UNIX_NS,
}
_READ: Final = frozenset({b"traceparent", b"baggage"})
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_BEHIND_HOST: Final = re.compile(r"[/?#]")
_UNIX_NS_DIGITS: Final = 19
_U32: Final = 0xFFFFFFFF

_FACT_NUMBER = int(RecordKind.FACT_NUMBER)
_FACT_TEXT = int(RecordKind.FACT_TEXT)


def is_trace_parent(value: bytes) -> bool:
    """Whether a ``traceparent`` header has the form of the W3C recommendation."""
    return _TRACE_PARENT.fullmatch(value) is not None


def known_headers(headers: Headers, names: frozenset[bytes] = _READ) -> list[tuple[bytes, bytes]]:
    """Return the headers of some names, by default those that are read, with their names in lower case.

    Raises:
        Exception: What was given are no headers.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    found = ((_bytes(name).lower(), value) for name, value in pairs)
    return [(name, _bytes(value)) for name, value in found if name in names]


def _bytes(text: str | bytes) -> bytes:
    return text.encode("latin-1", "replace") if isinstance(text, str) else bytes(memoryview(text))


def trace_parent(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the first well-formed ``traceparent``, None when there is none."""
    found = (value for name, value in headers if name == b"traceparent" and is_trace_parent(value))
    value = next(found, None)
    return None if value is None else value.decode("ascii")


def record_headers(recorder: Recorder, number: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Record what the headers of a request tell of it.

    Args:
        recorder: Where it is recorded.
        number: Number of the request.
        headers: Names in lower case, and values.
    """
    for name, value in headers:
        if name == b"traceparent" and is_trace_parent(value):
            text = recorder.define(value.decode("ascii"))
            recorder.record(_FACT_TEXT, number, Fact.TRACEPARENT, text)
        elif name == b"baggage":
            _record_baggage(recorder, number, value)


def _record_baggage(recorder: Recorder, number: int, value: bytes) -> None:
    for fact, text in baggage_facts(value):
        if fact is not Fact.INTENDED_UNIX_NS:
            recorder.record(_FACT_TEXT, number, fact, recorder.intern(text))
        elif text.isascii() and text.isdecimal() and len(text) <= _UNIX_NS_DIGITS:
            at = int(text)
            recorder.record(_FACT_NUMBER, number, fact, at & _U32, at >> 32)


def baggage_facts(value: bytes) -> Iterable[tuple[Fact, str]]:
    """Read our members of a W3C ``baggage`` header; the rest is left alone."""
    if len(value) > HEADER_MAX_BYTES or BAGGAGE_PREFIX.encode() not in value:
        return
    for member in value.decode("latin-1").split(","):
        key, separator, content = member.partition("=")
        fact = _BAGGAGE_FACTS.get(key.strip())
        if separator and fact is not None:
            yield fact, unquote(content.partition(";")[0].strip())


def scheme_and_host(url: str) -> tuple[str, str]:
    """Return the only parts of a URL that are kept; the host is empty for data and file URLs."""
    head = url[:HEADER_MAX_BYTES]
    scheme, _, rest = head.partition(":")
    scheme = scheme.lower()
    if scheme not in {"http", "https"}:
        return (scheme if scheme in {"data", "file"} else "other"), ""
    if len(head) < len(url) and not _BEHIND_HOST.search(rest, 2):
        return scheme, ""  # cut before its end, perhaps within a password
    try:
        return scheme, urlsplit(head).hostname or ""
    except ValueError:
        return scheme, ""


def digest(identifier: str) -> str:
    """Shorten an identifier of a media item; a client may have put anything into it."""
    return hashlib.blake2b(identifier.encode("utf-8", "replace"), digest_size=16).hexdigest()
