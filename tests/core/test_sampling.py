"""Sampling: whole requests, chosen as OpenTelemetry's samplers choose traces."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from stagetrace import UsageError
from stagetrace.attributes import SAMPLE_VARIABLE, SPOOL_BYTES_VARIABLE
from stagetrace.room import SPOOL_BYTES
from stagetrace.sampling import Sampler
from stagetrace.settings import parse_sampler, parse_spool_bytes, setting


def traceparent(trace, flags=1):
    """A header of a trace."""
    return f"00-{trace:032x}-00f067aa0ba902b7-{flags:02x}"


@given(st.integers(1, (1 << 128) - 1), st.floats(0, 1))
def test_share_is_chosen_as_the_sdk_chooses(trace, share):
    """A trace that the SDK's TraceIdRatioBased takes is taken, and no other."""
    decision = TraceIdRatioBased(share).should_sample(None, trace, "request").decision
    assert Sampler(share).takes(traceparent(trace)) == (decision is Decision.RECORD_AND_SAMPLE)


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_requests_without_a_trace_are_chosen_by_chance(share):
    """A share of them is taken."""
    sampler = Sampler(share)
    taken = sum(sampler.takes(None) for _ in range(20_000))
    assert taken == pytest.approx(20_000 * share, abs=200 if 0 < share < 1 else 0)


def test_the_hosts_chance_is_left_alone():
    """A host that has seeded the global generator gets the sequence it counts on."""
    random.seed(1)
    expected = random.random()
    random.seed(1)
    Sampler(0.5).takes(None)
    assert random.random() == expected


@pytest.mark.parametrize(("flags", "taken"), [(1, True), (0, False), (3, True), (2, False)])
def test_parent_decides(flags, taken):
    """The caller's sampled flag goes before the share, either way."""
    for share in (0.0, 1.0):
        assert Sampler(share, parent=True).takes(traceparent(1 << 63, flags)) is taken


@pytest.mark.parametrize(
    ("text", "takes_all", "takes"),
    [
        ("1", True, (True, True, True)),
        ("0", False, (False, False, False)),
        ("parent", False, (True, False, True)),
        ("parent:0", False, (True, False, False)),
    ],
)
def test_setting(monkeypatch, text, takes_all, takes):
    """What a setting takes: of a sampled trace, of one that is not, and of no trace."""
    monkeypatch.setenv(SAMPLE_VARIABLE, text)
    sampler = setting(SAMPLE_VARIABLE, parse_sampler, Sampler())
    assert sampler.takes_all is takes_all
    found = (sampler.takes(traceparent(1, 1)), sampler.takes(traceparent(1, 0)), sampler.takes(None))
    assert found == takes


@pytest.mark.parametrize("text", ["", " ", None])
def test_everything_without_a_setting(monkeypatch, text):
    """All requests are recorded unless told otherwise."""
    monkeypatch.delenv(SAMPLE_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(SAMPLE_VARIABLE, text)
    assert setting(SAMPLE_VARIABLE, parse_sampler, Sampler()).takes_all


@pytest.mark.parametrize("text", ["10%", "1.1", "-1", "nan", "parents", "parent:", "parent:2", "0,1"])
def test_wrong_sampling_is_one_line(monkeypatch, caplog, text):
    """A setting that is none is named with a hint, and everything is recorded."""
    with pytest.raises(UsageError, match="no sampling"):
        parse_sampler(text)
    monkeypatch.setenv(SAMPLE_VARIABLE, text)
    assert setting(SAMPLE_VARIABLE, parse_sampler, Sampler()).takes_all
    (line,) = caplog.messages
    assert f"{SAMPLE_VARIABLE}={text}: no sampling (hint: a share between 0 and 1" in line


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("2g", 2 << 30), ("4096K", 4 << 20), ("1T", 1 << 40)],
)
def test_sizes(text, size):
    """A size is bytes, or a number with a unit."""
    assert parse_spool_bytes(text) == size


@pytest.mark.parametrize("text", ["1.5G", "2 GB", "-1", "", "64K", "M", "0"])
def test_wrong_size_is_one_line(monkeypatch, caplog, text):
    """A size that is none, or too small to record into, is named with a hint; the default is taken."""
    with pytest.raises(UsageError, match=r"no size|too small"):
        parse_spool_bytes(text)
    monkeypatch.setenv(SPOOL_BYTES_VARIABLE, text)
    assert setting(SPOOL_BYTES_VARIABLE, parse_spool_bytes, SPOOL_BYTES) == 1 << 30
    assert len(caplog.messages) == (1 if text else 0)
