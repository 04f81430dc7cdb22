"""Whether a version of vLLM has what the hooks are set on: looked up in its sources, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from typing import Final

from stagetrace_vllm.wrapping import Hook

ReadSource = Callable[[str], str | None]
"""Returns the source text of a module by its full name, None where there is none."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_NOT_PLAIN: Final = frozenset({"staticmethod", "classmethod", "property", "cached_property"})


class State(StrEnum):
    """What became of the target of a hook."""

    PRESENT = "present"
    PARTLY = "partly"
    """It can be set, but lacks some of the attributes that the wrapper reads."""
    OTHER_PARAMETERS = "other_parameters"
    ABSENT = "absent"
    NO_MODULE = "no_module"


@dataclass(frozen=True, slots=True)
class Finding:
    """The target of a hook in the sources.

    Attributes:
        hook: The hook.
        state: Whether it can be set.
        detail: What was found: the parameters, or what is missing.
    """

    hook: Hook
    state: State
    detail: str

    @property
    def loses(self) -> str:
        """What is unknown; empty for a target that is as known."""
        if self.state is State.PRESENT:
            return ""
        return self.hook.loses_in_part if self.state is State.PARTLY else self.hook.loses


def look_up(hooks: Sequence[Hook], read_source: ReadSource) -> list[Finding]:
    """Look hooks up in source text, one finding for each.

    Names are followed through imports, methods through base classes, first one
    first and in depth, which is Python's order wherever no class is inherited
    twice.  A target on an object that a module makes is present if the module
    makes the object: its class may be anybody's.  Decorators are taken to keep
    the parameters, as ``functools.wraps`` does.
    """
    sources = _Sources(read_source)
    return [_find(hook, sources) for hook in hooks]


def installed_source(module: str) -> str | None:
    """Return the source of a module of this environment, None where there is none.

    No package is imported on the way, as ``importlib.util.find_spec`` would.
    """
    try:
        spec = _installed_spec(module)
        get_source = getattr(spec and spec.loader, "get_source", None)
        return None if get_source is None else get_source(module)
    except (ImportError, SyntaxError, ValueError):  # also: no UTF-8, no spec of a name that is imported
        return None


def _installed_spec(module: str) -> ModuleSpec | None:
    parent, _, _ = module.rpartition(".")
    if not parent:
        return importlib.util.find_spec(module)
    package = _installed_spec(parent)
    if package is None or package.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(module, list(package.submodule_search_locations))


def _find(hook: Hook, sources: _Sources) -> Finding:
    module = sources.module(hook.module)
    if module is None:
        return Finding(hook, State.NO_MODULE, f"no source of {hook.module}")
    name, *rest = hook.target.split(".")
    owner, found = None, module.resolve(name)
    for attribute in rest:
        if found is None or not isinstance(found.node, ast.ClassDef):
            break
        owner = found
        name, found = f"{name}.{attribute}", owner.member(attribute)
    if found is None:
        return Finding(hook, State.ABSENT, f"no {name} in {hook.module}")
    if not isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Finding(hook, State.PRESENT, f"{name} is assigned in {found.module.name}")
    missing = [each for each in hook.reads if owner is None or not owner.has(each)]
    return _judge(hook, found.node, missing)


def _judge(hook: Hook, function: ast.FunctionDef | ast.AsyncFunctionDef, missing: Sequence[str]) -> Finding:
    names = {_last_name(decorator) for decorator in function.decorator_list}
    if names & _NOT_PLAIN:
        return Finding(hook, State.OTHER_PARAMETERS, f"is a {(names & _NOT_PLAIN).pop()}")
    found = tuple(_parameters(function.args))
    if not hook.accepts(found):
        return Finding(hook, State.OTHER_PARAMETERS, f"({', '.join(found)})")
    if missing:
        return Finding(hook, State.PARTLY, f"without {', '.join(missing)}")
    return Finding(hook, State.PRESENT, f"({', '.join(found)})")


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Names in the order of ``inspect.signature``."""
    positional = [*arguments.posonlyargs, *arguments.args]
    ordered = [*positional, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return (argument.arg for argument in ordered if argument is not None)


def _last_name(expression: ast.expr) -> str:
    """The last part of a dotted name; empty for anything else."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


class _Sources:
    """Modules by name, each parsed once."""

    def __init__(self, read_source: ReadSource) -> None:
        self._read_source = read_source
        self._modules: dict[str, _Module | None] = {}

    def module(self, name: str) -> _Module | None:
        """Return a module, None where it has no source that can be parsed."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> _Module | None:
        source = self._read_source(name)
        if source is None:
            return None
        try:
            return _Module(name, ast.parse(source).body, self)
        except (SyntaxError, ValueError):
            return None


class _Module:
    """The names of a module."""

    def __init__(self, name: str, body: Sequence[ast.stmt], sources: _Sources) -> None:
        self.name = name
        self.sources = sources
        self._body = body

    @cached_property
    def _names(self) -> Mapping[str, ast.stmt]:
        return _bindings(self._body)

    def resolve(self, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> _Found | None:
        """Follow a name to the class, the function or the assignment that it stands for."""
        node = self._names.get(name)
        if node is None or (self.name, name) in seen:
            return None
        match node:
            case ast.ImportFrom():
                alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
                here = seen | {(self.name, name)}
                origins = (self.sources.module(origin) for origin in self._origins(node))
                found = (origin.resolve(alias.name, here) for origin in origins if origin is not None)
                return next((each for each in found if each is not None), None)
            case ast.Import():
                return None
        return _Found(node, self)

    def resolve_expression(self, expression: ast.expr) -> _Found | None:
        """Follow the expression of a base class: ``Base``, ``module.Base``, ``Base[T]``."""
        match expression:
            case ast.Name(id=name):
                return self.resolve(name)
            case ast.Subscript(value=generic):
                return self.resolve_expression(generic)
            case ast.Attribute(value=owner, attr=name):
                origins = (self.sources.module(origin) for origin in self._modules_named(owner))
                found = (origin.resolve(name) for origin in origins if origin is not None)
                return next((each for each in found if each is not None), None)
        return None

    def _modules_named(self, expression: ast.expr) -> Iterator[str]:
        """The modules that an expression may stand for."""
        match expression:
            case ast.Attribute(value=owner, attr=name):
                yield from (f"{package}.{name}" for package in self._modules_named(owner))
            case ast.Name(id=name):
                yield from self._modules_imported_as(name)

    def _modules_imported_as(self, name: str) -> Iterator[str]:
        match self._names.get(name):
            case ast.Import(names=aliases):
                renamed = [alias.name for alias in aliases if alias.asname == name]
                yield from renamed or [name]
            case ast.ImportFrom(names=aliases) as node:
                originals = [alias.name for alias in aliases if (alias.asname or alias.name) == name]
                yield from (f"{origin}.{originals[0]}" for origin in self._origins(node))

    def _origins(self, node: ast.ImportFrom) -> Iterator[str]:
        """The modules that an import may be from: whether this one is a package is not known."""
        if not node.level:
            yield node.module or ""
            return
        parts = self.name.split(".")
        for up in (node.level, node.level - 1):
            package = parts[: len(parts) - up]
            yield ".".join([*package, *([node.module] if node.module else [])])


@dataclass(frozen=True, slots=True)
class _Found:
    """A class, a function or an assignment, and the module it is in."""

    node: ast.stmt
    module: _Module

    def member(self, name: str) -> _Found | None:
        """Find a member of a class, or of the classes it inherits from."""
        for node, module in self._classes():
            own = _bindings(node.body).get(name)
            if own is not None:
                return _Found(own, module)
        return None

    def has(self, name: str) -> bool:
        """Whether a class has a member, or its objects an attribute that a method of it sets."""
        return self.member(name) is not None or any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            for owner, _ in self._classes()
            for node in ast.walk(owner)
        )

    def _classes(self, seen: frozenset[int] = frozenset()) -> Iterator[tuple[ast.ClassDef, _Module]]:
        """A class and those that it inherits from."""
        if not isinstance(self.node, ast.ClassDef) or id(self.node) in seen:
            return
        yield self.node, self.module
        for base in self.node.bases:
            found = self.module.resolve_expression(base)
            if found is not None:
                yield from found._classes(seen | {id(self.node)})


def _bindings(body: Sequence[ast.stmt]) -> dict[str, ast.stmt]:
    """What each name of a body stands for in the end; of two branches, in the first one."""
    names: dict[str, ast.stmt] = {}
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = node
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0]: node for alias in aliases}
            case ast.Assign(targets=targets, value=value):
                other = names.get(value.id) if isinstance(value, ast.Name) else None
                meant = other if isinstance(other, _Definition) else node
                names |= {target.id: meant for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                names[name] = node
            case ast.If() | ast.Try() | ast.With():
                names |= _bindings_of_branches(node)
    return names


def _bindings_of_branches(node: ast.If | ast.Try | ast.With) -> dict[str, ast.stmt]:
    branches = [node.body]
    if isinstance(node, ast.If):
        never = _last_name(node.test) == "TYPE_CHECKING"
        branches = [node.orelse] if never else [node.body, node.orelse]
    elif isinstance(node, ast.Try):
        branches += [node.orelse, *(handler.body for handler in node.handlers), node.finalbody]
    names: dict[str, ast.stmt] = {}
    for branch in branches:
        names = _bindings(branch) | names
    return names
