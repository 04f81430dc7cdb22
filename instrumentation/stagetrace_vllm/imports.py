"""Acting on modules when they appear, without importing them."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls ``found(module)`` after each of the named modules has been executed.

    Args:
        names: Full names of modules.
        found: Called once a module, at once for those that are there already.
    """

    def __init__(self, names: Collection[str], found: Callable[[ModuleType], None]) -> None:
        self._waiting = set(names)
        self._found = found

    def start(self) -> None:
        """Look at what is imported already, and watch the rest."""
        for name in [name for name in self._waiting if name in sys.modules]:
            self._executed(sys.modules[name])
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module by the other finders, with a loader that tells when it is there."""
        if fullname not in self._waiting:
            return None
        self._waiting.discard(fullname)  # the other finders are asked, and not this one again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._waiting.add(fullname)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _TellingLoader(spec.loader, self._executed)
        return spec

    def _executed(self, module: ModuleType) -> None:
        # Only now: a module whose import fails may be imported again.
        self._waiting.discard(module.__name__)
        self._found(module)


class _TellingLoader(importlib.abc.Loader):
    """A loader around another one."""

    def __init__(self, loader: importlib.abc.Loader, found: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not keep our loader: it would be asked for data and sources.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._found(module)
