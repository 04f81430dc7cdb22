"""What is read from the host's objects."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import pytest

from stagetrace import Recorder, read_spool
from stagetrace.records import JobKind, RecordKind
from stagetrace_vllm.reading import announce_version, answer_id, job_kind, media_format, media_size


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


@pytest.mark.parametrize(
    ("module", "facts"),
    [(SimpleNamespace(__version__="0.32.0"), {"version": "0.32.0"}), (SimpleNamespace(), {}), (None, {})],
)
def test_version_of_the_server(tmp_path, monkeypatch, module, facts):
    """A process tells the version of the vLLM that it has loaded, and nothing where it has none."""
    monkeypatch.setitem(sys.modules, "vllm", module)
    recorder = Recorder(tmp_path)
    announce_version(recorder)
    recorder.record(RecordKind.RECEIVED, 1)
    (process,) = read_spool(tmp_path).processes.values()
    assert process.facts == facts
