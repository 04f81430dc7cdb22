"""What is read from the host's objects."""

from __future__ import annotations

import functools

import pytest

from stagetrace.records import JobKind
from stagetrace_vllm.reading import answer_id, job_kind, media_format, media_size, scheme_and_host


def _tokenize_prompt():
    """A function of vLLM's name."""


def test_job_kind_looks_through_partials():
    """A job is told by its function's name, however it is wrapped in partials."""
    assert job_kind(functools.partial(functools.partial(_tokenize_prompt), 1)) is JobKind.TOKENIZE
    assert job_kind(print) is JobKind.OTHER
    assert job_kind(object()) is JobKind.OTHER


def _get_cached_bytes():
    """A function of vLLM's name."""


def test_hops_to_the_media_cache_are_not_recorded():
    """Asking the media cache is part of a wait, and no job of its own."""
    assert job_kind(functools.partial(_get_cached_bytes)) is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://user:pw@cdn.example.com:8443/private/path.jpg?token=1", ("https", "cdn.example.com")),
        ("data:image/jpeg;base64,/9j/4AAQ", ("data", "")),
        ("file:///etc/passwd", ("file", "")),
        ("HTTP://Host/x", ("http", "host")),
        ("javascript:alert(1)", ("other", "")),
        ("", ("other", "")),
    ],
)
def test_of_a_url_only_scheme_and_host_are_kept(url, expected):
    """Paths, queries and passwords stay out."""
    assert scheme_and_host(url) == expected


@pytest.mark.parametrize(
    ("identifier", "numbering", "expected"),
    [
        ("chatcmpl-1-0", "", "chatcmpl-1-0"),
        ("cmpl-1-0", "-0", "cmpl-1"),
        ("resp_1_0", "_0", "resp_1"),
        ("cmpl-1-8d21dea58ef1d54f-beam-0", "-0", "cmpl-1"),
        ("late-interaction-8d21dea58ef1d54f-query-0", "-0", None),
    ],
)
def test_id_in_the_answer(identifier, numbering, expected):
    """The engine's ids of the parts of an answer are made of the answer's, with few exceptions."""
    assert answer_id(identifier, numbering) == expected


def test_media_facts():
    """Format by the first bytes, size where there is one."""
    assert media_format(b"\xff\xd8\xff\xe0") == "jpeg"
    assert media_format(b"??") is None
    assert media_size(type("Image", (), {"size": (320, 240)})()) == (320, 240)
    assert media_size([1, 2]) == (0, 0)
