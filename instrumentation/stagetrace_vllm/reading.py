"""What is read from headers and from vLLM's objects; everything here may fail and then says None."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from stagetrace.attributes import (
    BAGGAGE_ARM,
    BAGGAGE_INTENDED_UNIX_NS,
    BAGGAGE_LABEL,
    BAGGAGE_PHASE,
    BAGGAGE_PREFIX,
)
from stagetrace.records import Fact, JobKind

HEADER_MAX_BYTES: Final = 1024
"""Headers are hostile input: longer ones are not read."""

_BAGGAGE_FACTS: Final = {
    BAGGAGE_PHASE: Fact.PHASE,
    BAGGAGE_LABEL: Fact.LABEL,
    BAGGAGE_ARM: Fact.ARM,
    BAGGAGE_INTENDED_UNIX_NS: Fact.INTENDED_UNIX_NS,
}
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_JOBS: Final = {
    "safe_apply_chat_template": JobKind.TEMPLATE,
    "_apply_chat_template": JobKind.TEMPLATE,
    "_render": JobKind.TEMPLATE,
    "render": JobKind.RENDER,
    "_tokenize_prompt": JobKind.TOKENIZE,
    "_process_multimodal": JobKind.PROCESS,
    "load_bytes": JobKind.DECODE,
    "_load_data_url": JobKind.DECODE,
    "_load_file_url": JobKind.DECODE,
}
_BEAM: Final = re.compile("-[0-9a-f]+-beam-0$")
_WITHIN_A_WAIT: Final = frozenset({"_get_cached_bytes", "_put_cached_bytes"})
_FORMATS: Final = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG", "png"),
    (b"GIF8", "gif"),
    (b"RIFF", "webp"),
    (b"BM", "bmp"),
)


def attribute(host: Any, name: str) -> Any:
    """Return an attribute of a host's object, or None, whatever the object does when asked."""
    try:
        return getattr(host, name, None)
    except Exception:
        return None


def digest(identifier: str) -> str:
    """Shorten an identifier of a media item; a client may have put anything into it."""
    return hashlib.blake2b(identifier.encode("utf-8", "replace"), digest_size=16).hexdigest()


def answer_id(identifier: str, numbering: str) -> str | None:
    """Return the id in an answer by the engine's id of its first part, without the numbering of the parts.

    Returns:
        None when the engine's id is not made of the answer's.
    """
    if identifier.startswith("late-interaction-"):
        return None
    return _BEAM.sub("", identifier).removesuffix(numbering)


def is_trace_parent(value: bytes) -> bool:
    """Whether a ``traceparent`` header has the form of the W3C recommendation."""
    return _TRACE_PARENT.fullmatch(value) is not None


def job_kind(function: Callable[..., Any]) -> JobKind | None:
    """Tell what a job does by the name of its function.

    Returns:
        None for the hops to the media cache, which are nothing but part of a
        wait and would cost a tenth of a request's bytes as jobs.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", "")
    return None if name in _WITHIN_A_WAIT else _JOBS.get(name, JobKind.OTHER)


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
    scheme = head.partition(":")[0].lower()
    if scheme not in {"http", "https"}:
        return (scheme if scheme in {"data", "file"} else "other"), ""
    try:
        return scheme, urlsplit(head).hostname or ""
    except ValueError:
        return scheme, ""


def media_modality(media_io: Any) -> str:
    """Name the modality that vLLM's reader of a media item is for: ``image``, ``audio``, ``video``."""
    return type(media_io).__name__.removesuffix("MediaIO").lower()


def media_format(content: bytes) -> str | None:
    """Name an image format by its first bytes."""
    return next((name for magic, name in _FORMATS if content.startswith(magic)), None)


def media_size(media: Any) -> tuple[int, int]:
    """Return width and height in pixels, (0, 0) when it has none."""
    size = getattr(media, "size", None)
    if isinstance(size, tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):  # noqa: PLR2004
        return size[0], size[1]
    return 0, 0
