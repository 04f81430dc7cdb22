"""What no test has reached: said in the docs and by ``stagetrace doctor``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stagetrace.stages import Reason, Stage

_SCRIPTED: Final = "proved on vLLM's scheduler with a scripted connector, not between servers"
_EXACT: Final = "proved on vLLM's engine core, not on a live server"

UNPROVED: Final[Mapping[Stage | Reason, str]] = MappingProxyType(
    {
        Stage.ENCODE: "proved on a CPU only; the device's clock has not been tried on a GPU",
        Stage.EMBEDDING_TRANSFER: "not recorded yet: the wait for an embedding is, its move is not",
        Stage.KV_TRANSFER: "not recorded yet: the wait for KV state is, its move is not",
        Reason.REMOTE_EMBEDDING: _SCRIPTED,
        Reason.REMOTE_KV: _SCRIPTED,
        Reason.LORA: _EXACT,
        Reason.PAUSED: _EXACT,
        Reason.DEFERRED: _EXACT,
    }
)
"""Stages and reasons that no test on a real server has reached, and what is known of them."""
