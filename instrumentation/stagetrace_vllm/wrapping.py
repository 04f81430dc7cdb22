"""How hooks are set: on the class, checked first, and taken out again."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from stagetrace.recorder import Recorder
from stagetrace.records import RecordKind

_log = logging.getLogger("stagetrace")

Wrapper = Callable[..., Any]
"""A function that stands in for the original."""

MakeWrapper = Callable[[Callable[..., Any], Recorder], Wrapper]
"""Makes the wrapper around an original."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A place in the server where something is recorded.

    Attributes:
        module: Full name of the module.
        target: Class and method, or function, within it.
        parameters: The parameters it must have, in this order, first ones first;
            a target that has others is left alone and listed.
        make: Makes the wrapper.
        loses: What is unknown without it.
        reads: Attributes of the target's class without which the wrapper records less.
        loses_in_part: What is unknown where one of those is missing.
    """

    module: str
    target: str
    parameters: tuple[str, ...]
    make: MakeWrapper
    loses: str
    reads: tuple[str, ...] = ()
    loses_in_part: str = ""

    @property
    def name(self) -> str:
        """Module and target."""
        return f"{self.module}:{self.target}"

    def accepts(self, parameters: Sequence[str]) -> bool:
        """Whether a target with these parameters is the one that is known."""
        return tuple(parameters[: len(self.parameters)]) == self.parameters


class Installation:
    """The hooks of a process, set as their modules appear.

    Args:
        recorder: Where the hooks record.
        hooks: What to set.
    """

    def __init__(self, recorder: Recorder, hooks: Sequence[Hook]) -> None:
        self._recorder = recorder
        self._hooks = hooks
        self._set: list[tuple[Any, str, Any]] = []

    def modules(self) -> frozenset[str]:
        """Names of the modules that have hooks."""
        return frozenset(hook.module for hook in self._hooks)

    def install(self, module: ModuleType) -> None:
        """Set the hooks of a module that has just appeared; never raises."""
        for hook in self._hooks:
            if hook.module != module.__name__:
                continue
            try:
                self._install(hook, module)
            except Exception as error:
                self._report(hook, error)

    def uninstall(self) -> None:
        """Put every original back."""
        for owner, name, original in reversed(self._set):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._set.clear()

    def _install(self, hook: Hook, module: ModuleType) -> None:
        *path, name = hook.target.split(".")
        owner: Any = functools.reduce(getattr, path, module)
        on_instance = not isinstance(owner, type | ModuleType)
        original = getattr(owner, name) if on_instance else inspect.getattr_static(owner, name)
        if isinstance(original, staticmethod | classmethod | property):
            raise TypeError(f"is a {type(original).__name__}")
        check_parameters(original, hook)
        wrapper = functools.wraps(original)(hook.make(original, self._recorder))
        setattr(owner, name, wrapper)
        self._set.append((owner, name, None if on_instance else original))

    def _report(self, hook: Hook, error: Exception) -> None:
        _log.warning("stagetrace: hook off: %s (%s); unknown: %s", hook.name, error, hook.loses)
        self._recorder.announce(RecordKind.HOOK_OFF, 0, hook.name)


def check_parameters(function: Callable[..., Any], hook: Hook) -> None:
    """Check that a function begins with the parameters that a hook expects.

    Raises:
        TypeError: It has others.
    """
    found = tuple(inspect.signature(function).parameters)
    if not hook.accepts(found):
        raise TypeError(f"parameters are ({', '.join(found)}), known are ({', '.join(hook.parameters)})")
