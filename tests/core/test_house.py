"""The house: who may import whom, what an import costs, what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "stagetrace": ROOT / "stagetrace",
    "stagetrace_torch": ROOT / "instrumentation" / "stagetrace_torch",
    "stagetrace_vllm": ROOT / "instrumentation" / "stagetrace_vllm",
    "stagetrace_analyzer": ROOT / "analyzer" / "stagetrace_analyzer",
    "stagetrace_export": ROOT / "exporter" / "stagetrace_export",
    "stagetrace_dashboard": ROOT / "dashboards" / "stagetrace_dashboard",
}
MAY_IMPORT = {
    "stagetrace": {"stagetrace"},
    "stagetrace_torch": {"stagetrace", "stagetrace_torch"},
    "stagetrace_vllm": {"stagetrace", "stagetrace_torch", "stagetrace_vllm"},
    "stagetrace_analyzer": {"stagetrace", "stagetrace_analyzer"},
    "stagetrace_export": {"stagetrace", "stagetrace_analyzer", "stagetrace_export"},
    "stagetrace_dashboard": {"stagetrace", "stagetrace_analyzer", "stagetrace_dashboard"},
}
MODULE_MAY_IMPORT = {
    # Only its own users load it, and it imports the plug-in only when it is asked to set hooks.
    PACKAGES["stagetrace_export"] / "instrumentor.py": {"stagetrace", "stagetrace_vllm"},
}
HEAVY = {
    "aiohttp",
    "asyncio",
    "dash",
    "duckdb",
    "grpc",
    "plotly",
    "numpy",
    "opentelemetry",
    "polars",
    "pyarrow",
    "rich",
    "torch",
    "vllm",
}


def imports_of(path):
    """Top-level names of the packages that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    """The analyzer and the plug-in stand on the core and never on each other."""
    modules = list(PACKAGES[package].rglob("*.py"))
    assert modules
    for module in modules:
        ours = {name for name in imports_of(module) if name in PACKAGES}
        assert ours <= MODULE_MAY_IMPORT.get(module, MAY_IMPORT[package]), module


@pytest.mark.parametrize("package", ["stagetrace", "stagetrace_torch", "stagetrace_vllm"])
def test_what_goes_into_a_server_needs_the_standard_library_only(package):
    """Core and plug-in import nothing that would have to be installed."""
    allowed = sys.stdlib_module_names | MAY_IMPORT[package]
    for module in PACKAGES[package].rglob("*.py"):
        assert set(imports_of(module)) <= allowed, module


@pytest.mark.parametrize("package", ["stagetrace", "stagetrace_torch", "stagetrace_vllm"])
def test_import_budget(package):
    """Importing core or plug-in loads none of the heavy packages."""
    heavy = HEAVY - ({"asyncio"} if package == "stagetrace_vllm" else set())
    code = f"import sys, {package}; print(*sorted({heavy!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names(package):
    """``__all__`` names what a package's ``__init__`` brings in, in order, and nothing else."""
    tree = ast.parse((PACKAGES[package] / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    declared = [
        element.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        for element in node.value.elts
    ]
    assert set(declared) == imported
    assert declared == sorted(declared)


def test_typed_packages():
    """Each package tells type checkers that it is typed."""
    assert all((folder / "py.typed").exists() for folder in PACKAGES.values())
