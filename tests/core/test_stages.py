"""The stage model."""

from __future__ import annotations

from stagetrace.records import ReasonCode, RecordKind
from stagetrace.stages import Kind, Reason, Stage


def test_kinds():
    """Waits end in ``.wait``; transfers move bytes; the rest is work."""
    kinds = {stage.value: stage.kind.value for stage in Stage}
    assert {stage for stage, kind in kinds.items() if kind == Kind.TRANSFER} == {
        "retrieval",
        "handoff",
        "embedding_transfer",
        "kv_transfer",
    }
    assert all((kind == Kind.WAIT) == stage.endswith(".wait") for stage, kind in kinds.items())
    assert kinds["unattributed"] == Kind.UNATTRIBUTED
    assert kinds["encode"] == kinds["respond"] == Kind.WORK


def test_reasons_have_codes():
    """Each reason has exactly one code in records, under the same name."""
    codes = {code.name.lower() for code in ReasonCode if code is not ReasonCode.NONE}
    assert codes == {reason.value for reason in Reason}


def test_roles_of_records():
    """A record kind tells which process writes it."""
    assert RecordKind.RECEIVED.role == "api"
    assert RecordKind.STEP.role == "engine"
    assert RecordKind.ENCODE_END.role == "worker"
    assert RecordKind.DEFINE.role == "process"
