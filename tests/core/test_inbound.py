"""What is read of headers and URLs."""

from __future__ import annotations

import pytest

from stagetrace.inbound import HEADER_MAX_BYTES, digest, is_trace_parent, scheme_and_host, trace_parent

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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


@pytest.mark.parametrize("value", [b"", b"00-x", PARENT + b"\n", PARENT.upper(), b" " + PARENT, PARENT[:-1]])
def test_malformed_trace_parents_are_not_taken(value):
    """A trace parent has exactly the form of the recommendation; the first one that has it counts."""
    assert not is_trace_parent(value)
    assert trace_parent([(b"traceparent", value), (b"traceparent", PARENT)]) == PARENT.decode()
    assert trace_parent([(b"traceparent", value)]) is None


def test_digest_tells_nothing_but_equality():
    """Equal identifiers have equal digests of a fixed length, whatever a client put into them."""
    assert digest("a") == digest("a") != digest("b")
    assert {len(digest(text)) for text in ("", "\udcff", "x" * 10_000)} == {32}


def test_password_that_a_cut_reaches_is_no_host():
    """A URL that is too long to be read to the end of its host has none."""
    secret = "s" * 2 * HEADER_MAX_BYTES
    assert scheme_and_host(f"https://{secret}@host/cat.jpg") == ("https", "")
    assert scheme_and_host(f"https://host/{secret}") == ("https", "host")
