"""What some tests need besides the project."""

from __future__ import annotations

import importlib.util

import pytest


def vllm() -> None:
    """Skip a test, or a module, where vLLM is not installed; importing it would take seconds."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: make test installs it", allow_module_level=True)
