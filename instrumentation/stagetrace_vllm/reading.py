"""What is read from vLLM's objects; everything here may fail and then says None."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from stagetrace.recorder import Recorder
from stagetrace.records import Fact, JobKind, RecordKind

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


def announce_version(recorder: Recorder) -> None:
    """Say which version of vLLM runs in this process."""
    version = attribute(sys.modules.get("vllm"), "__version__")
    if isinstance(version, str):
        recorder.announce(RecordKind.PROCESS_FACT, Fact.VERSION, version)


def answer_id(identifier: str, numbering: str) -> str | None:
    """Return the id in an answer by the engine's id of its first part, without the numbering of the parts.

    Returns:
        None when the engine's id is not made of the answer's.
    """
    if identifier.startswith("late-interaction-"):
        return None
    return _BEAM.sub("", identifier).removesuffix(numbering)


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
