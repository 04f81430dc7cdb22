"""Hooks are looked up in source text, and found as they are when the module is imported."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import subprocess
import sys
import types

import pytest

from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.signatures import State, installed_source, look_up
from stagetrace_vllm.wrapping import Hook

MODULES = {
    "host": """
from typing import TYPE_CHECKING, Generic
import host.bases
from .bases import Base as Renamed, again
from host import bases as others
if TYPE_CHECKING:
    from nowhere import Scheduler
class Scheduler(Renamed[int], Generic[int]):
    flag: bool
    def schedule(self, throttle=False, /, *rest, wait, **options): ...
    async def run(self, request): ...
    @decorated
    def wrapped(self, request): ...
    @property
    def pause_state(self): ...
    @staticmethod
    def status(request): ...
    alias = schedule
class Local(Scheduler):
    def __init__(self):
        self.waiting, self.running = [], []
        self.count: int = 0
class Far(host.bases.Base): ...
class Farther(others.Base): ...
class Unknown(make_base()): ...
class Round(Round): ...
def function(request, queue): ...
try:
    from fast import chosen
except ImportError:
    def chosen(request): ...
if True:
    def branch(request): ...
else:
    def branch(nothing): ...
Other = Scheduler
pool = ThreadPoolExecutor(8)
""",
    "host.bases": """
from host.bases.deep import Deep
from host import again
class Base(Deep):
    def add(self, request): ...
    def over(self, request): ...
""",
    "host.bases.deep": """
class Deep:
    def free(self, request): ...
    def over(self, other): ...
    def __init__(self):
        self.deep = None
""",
    "broken": "def function(:",
}


def find(target, *parameters, module="host", reads=()):
    """Look one hook up in the modules above."""
    hook = Hook(module, target, parameters, lambda original, recorder: original, "all", reads, "a part")
    (finding,) = look_up([hook], MODULES.get)
    assert finding.hook is hook
    return finding


@pytest.mark.parametrize(
    ("target", "parameters", "detail"),
    [
        ("function", ("request",), "(request, queue)"),
        ("Scheduler.schedule", ("self", "throttle"), "(self, throttle, rest, wait, options)"),
        ("Scheduler.run", ("self", "request"), "(self, request)"),
        ("Scheduler.wrapped", ("self", "request"), "(self, request)"),
        ("Scheduler.add", ("self", "request"), "(self, request)"),
        ("Scheduler.free", ("self", "request"), "(self, request)"),
        ("Scheduler.over", ("self", "request"), "(self, request)"),
        ("Local.schedule", ("self",), "(self, throttle, rest, wait, options)"),
        ("Far.free", ("self", "request"), "(self, request)"),
        ("Farther.free", ("self", "request"), "(self, request)"),
        ("Other.add", ("self", "request"), "(self, request)"),
        ("Renamed.add", ("self", "request"), "(self, request)"),
        ("branch", ("request",), "(request)"),
        ("pool.submit", ("fn",), "pool is assigned in host"),
        ("Scheduler.alias", ("self",), "(self, throttle, rest, wait, options)"),
    ],
)
def test_present(target, parameters, detail):
    """A target is found through imports and base classes, with its parameters in order."""
    finding = find(target, *parameters)
    assert (finding.state, finding.detail, finding.loses) == (State.PRESENT, detail, "")


@pytest.mark.parametrize(
    ("target", "state", "detail"),
    [
        ("Scheduler.schedule", State.OTHER_PARAMETERS, "(self, throttle, rest, wait, options)"),
        ("Scheduler.status", State.OTHER_PARAMETERS, "is a staticmethod"),
        ("Scheduler.pause_state", State.OTHER_PARAMETERS, "is a property"),
        ("Scheduler.gone", State.ABSENT, "no Scheduler.gone in host"),
        ("Scheduler.flag", State.ABSENT, "no Scheduler.flag in host"),
        ("Unknown.add", State.ABSENT, "no Unknown.add in host"),
        ("Round.add", State.ABSENT, "no Round.add in host"),
        ("Nobody.add", State.ABSENT, "no Nobody in host"),
        ("again", State.ABSENT, "no again in host"),
        ("chosen", State.ABSENT, "no chosen in host"),
    ],
)
def test_not_as_known(target, state, detail):
    """What is not there, or not a plain function with the known parameters, is said."""
    finding = find(target, "self", "somebody")
    assert (finding.state, finding.detail, finding.loses) == (state, detail, "all")


@pytest.mark.parametrize("module", ["nowhere", "broken"])
def test_no_module(module):
    """A module without source, or with one that cannot be parsed, has no hooks."""
    assert find("function", "request", module=module).state is State.NO_MODULE


def test_attributes_that_a_hook_reads():
    """Attributes count that the class or one above it sets or defines; without one, a part is unknown."""
    there = ("waiting", "running", "count", "pause_state", "deep", "add")
    assert find("Local.schedule", "self", reads=there).state is State.PRESENT
    finding = find("Local.schedule", "self", reads=(*there, "gone"))
    assert (finding.state, finding.detail, finding.loses) == (State.PARTLY, "without gone", "a part")


def plain_functions(module):
    """Functions and methods of a real module, by target, that no decorator has changed."""
    for name, found in vars(module).items():
        if isinstance(found, types.FunctionType) and found.__name__ == name:
            yield name, found
        elif inspect.isclass(found) and not issubclass(found, enum.Enum):  # a metaclass makes those
            for member in dir(found):
                function = inspect.getattr_static(found, member)
                if isinstance(function, types.FunctionType) and function.__name__ == member:
                    yield f"{name}.{member}", function


@pytest.mark.parametrize(
    "name",
    [
        "asyncio.unix_events",
        "concurrent.futures.thread",
        "logging.handlers",
        "http.server",
        "argparse",
        "zipfile",
    ],
)
def test_as_inspect_says(name):
    """In real modules every function and method, inherited or not, has the parameters that it has at run time."""
    module = importlib.import_module(name)
    functions = {
        target: function
        for target, function in plain_functions(module)
        if not hasattr(function, "__wrapped__") and function.__code__.co_filename.endswith(".py")
    }
    hooks = [Hook(name, target, (), lambda original, _: original, "") for target in functions]
    wrong = {
        finding.hook.target: (finding.detail, expected)
        for finding, function in zip(look_up(hooks, installed_source), functions.values(), strict=True)
        if finding.detail != (expected := f"({', '.join(inspect.signature(function).parameters)})")
    }
    assert len(functions) > 10
    assert wrong == {}


def test_installed_source_imports_nothing(tmp_path):
    """The source of a module is found without running its package; without source there is None."""
    package = tmp_path / "bomb" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "part.py").write_text("found = 'ä'", encoding="utf-8")
    (package / "latin.py").write_bytes(b"found = '\xe4'")
    code = (
        "import sys; from stagetrace_vllm.signatures import installed_source as find\n"
        "names = ('bomb.inner.part', 'bomb', 'bomb.gone', 'bomb.inner.part.x', 'gone.x', 'bomb.inner.latin', 'math')\n"
        "print([find(name) for name in names], any(name.startswith('bomb') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=False,
    )
    expected = ["found = 'ä'", "raise RuntimeError('imported')", None, None, None, None, None]
    assert done.stdout.decode() == f"{expected} False\n", done.stderr.decode()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test installs it")
def test_installed_vllm_has_every_hook():
    """All hooks are in the vLLM that the live tests run on."""
    states = {finding.hook.name: finding.state for finding in look_up(HOOKS, installed_source)}
    assert set(states.values()) == {State.PRESENT}, states
    assert len(states) == len(HOOKS)
