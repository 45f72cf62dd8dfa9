"""Rules of the code base: allowed imports, libraries that stay unloaded, and doctests that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanoengine"
CORE = sorted(
    ".".join(path.relative_to(PACKAGE / "core").with_suffix("").parts)
    for path in (PACKAGE / "core").rglob("*.py")
    if path.stem != "__init__"
)

LAYERS: tuple[set[str], ...] = (
    {"__main__"},
    {"cli"},
    {"as_vllm", "bench", "parallel"},
    {"llm", "llm_mixins"},
    {"build", "jobs"},
    {"features"},
    {"observe", "ranks"},
    {"engine", "runner", "outputs"},
    {"models", "text", "locking"},
    {"layers"},
    {"attention", "checkpoint"},
    {"kernels"},
    {"small"},
    {"core"},
    {"fork_guard"},
    {"settings", "errors", "version", "assets"},
)
"""Packages and top-level modules, highest layer first. Each imports only itself and lower ones."""

SAME_LAYER_IMPORTS = {("llm", "llm_mixins"), ("settings", "errors")}
"""Allowed imports between two members of one layer. Import cycles are still forbidden."""

THIRD_PARTY_IMPORTS = {
    # packages outside the standard library that a module may import
    "errors": set(),
    "version": set(),
    "settings": set(),
    "core": {"xxhash", "numpy"},
    "engine": {"xxhash"},
    "locking": set(),
}


def module_name(path: Path) -> str:
    """Returns the module's dotted name below the package; "nanoengine" for the package itself."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "nanoengine"


def layer_of(module: str) -> int | None:
    """Returns the index of the module's layer; None for a module that is in no layer."""
    package = module.partition(".")[0]
    return next((i for i, packages in enumerate(LAYERS) if package in packages), None)


def imports_of(path: Path) -> set[str]:
    """Returns the full dotted names of all modules that the file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides what it names"
            base = node.module or ""
            names |= {
                f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base
                for alias in node.names
            }
    return names


def is_module(name: str) -> bool:
    if not name.startswith("nanoengine."):
        return False
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def violations(path: Path, module: str) -> list[str]:
    if module == "nanoengine":  # it names attributes of other modules and loads them lazily
        return []
    layer, package = layer_of(module), module.partition(".")[0]
    if layer is None:
        return [f"{module}: not in LAYERS"]
    found = []
    for name in imports_of(path):
        if name == "nanoengine":
            continue
        if name.startswith("nanoengine."):
            imported = name.removeprefix("nanoengine.")
            lower, target = layer_of(imported), imported.partition(".")[0]
            if target == package or (package, target) in SAME_LAYER_IMPORTS:
                continue
            if lower is None or lower <= layer:
                found.append(f"{module} imports {imported}")
        elif package in THIRD_PARTY_IMPORTS:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names | THIRD_PARTY_IMPORTS[package]:
                found.append(f"{module} imports {name}")
    return found


def test_modules_only_import_lower_layers():
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 20
    wrong = [found for path in paths for found in violations(path, module_name(path))]
    assert wrong == [], (
        "a module imports only from lower layers and from packages that THIRD_PARTY_IMPORTS allows:"
        " pass the object as an argument, or move the code to the layer that has what it needs; a"
        " new package is added to LAYERS"
    )


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("core.scheduler", "import torch"),
        ("core.plan", "from nanoengine.attention.batch import Batch"),
        ("core.plan", "from nanoengine import engine"),
        ("engine", "from nanoengine.runner import model_runner"),
        ("attention.naive", "from nanoengine.layers.linear import Linear"),
        ("layers.linear", "import nanoengine.runner.model_runner"),
        ("models.qwen3", "def f():\n    from nanoengine.llm import LLM"),
        ("observe.trace", "from nanoengine.build import build_engine"),
        ("unknown", "import os"),
    ],
)
def test_the_import_rules_detect_violations(tmp_path, module, line):
    path = tmp_path / "module.py"
    path.write_text(line)
    assert len(violations(path, module)) == 1


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Returns groups of modules that reach each other, without modules outside of cycles."""
    reached = {module: set(names) for module, names in graph.items()}
    for middle in graph:  # Source: Warshall's algorithm
        for names in reached.values():
            if middle in names:
                names |= reached[middle]
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }


def test_the_package_imports_nothing_from_the_repository():
    outside = {"benchmarks", "tests", "tools", "bench", "matplotlib"}
    found = {module_name(path): imports_of(path) for path in PACKAGE.rglob("*.py")}
    assert {
        name: wrong
        for name, names in found.items()
        if (wrong := {each.partition(".")[0] for each in names} & outside)
    } == {}, "the package is installed without these: move what it needs into nanoengine/"


def test_there_are_no_import_cycles_even_for_types():
    """A file can be read without the files of higher layers, even for types."""
    graph = {module_name(path): imports_of(path) for path in PACKAGE.rglob("*.py")}
    graph = {
        module: {name.removeprefix("nanoengine.") for name in names} & graph.keys()
        for module, names in graph.items()
    }
    assert sum(map(len, graph.values())) > 300
    assert [sorted(cycle) for cycle in cycles(graph)] == [], (
        "move what these modules share into a module that imports neither"
    )


def test_an_import_cycle_is_detected():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"e"}, "f": set()}
    assert cycles(graph) == {frozenset("abc"), frozenset("e")}


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("modules", "unloaded"),
    [
        ([f"nanoengine.core.{name}" for name in CORE], ("torch", "transformers", "numba")),
        (["nanoengine.engine"], ("torch", "transformers", "numba")),
        (
            ["nanoengine", "nanoengine.settings.config"],
            ("torch", "transformers", "numba", "triton"),
        ),
        (
            ["nanoengine.llm", "nanoengine.settings.params", "nanoengine.observe.metrics"],
            ("torch", "transformers", "tokenizers", "numba", "triton"),
        ),
        (["nanoengine.features.structured", "nanoengine.cli.batch"], ("llguidance",)),
        (["nanoengine.layers.gguf_blocks"], ("gguf", "transformers")),
    ],
    ids=["core", "engine", "nanoengine", "llm", "grammars", "grids"],
)
def test_importing_loads_no_heavy_library(modules, unloaded):
    code = f"import sys, {', '.join(modules)}; print([m for m in {unloaded} if m in sys.modules])"
    assert run_python("-c", code).strip() == "[]", (
        "import these libraries inside the functions that need them"
    )


def test_tests_of_the_core_need_no_torch():
    """Collects them with torch blocked; `make core` runs them the same way."""
    run_python("-m", "pytest", "-p", "tests.support.no_torch", "--collect-only", "-q", "tests/core")


def test_an_engine_for_a_gpu_needs_no_numba():
    modules = "nanoengine.build, nanoengine.models.triton, benchmarks.suite.gpu.suite"
    run_python("-c", f"import sys; sys.modules['numba'] = None; import {modules}")


PLAIN = [
    "settings.checks",
    "settings.params",
    "layers.collectives",
    "small.block_pool",
    "small.sampler",
]


@pytest.mark.parametrize("name", [*PLAIN, *(f"core.{name}" for name in CORE)])
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(f"nanoengine.{name}")).failed == 0


def test_the_core_has_doctests():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("block_pool", "groups.rules"):
        module = importlib.import_module(f"nanoengine.core.{name}")
        assert sum(len(test.examples) for test in finder.find(module)) >= 5, name
