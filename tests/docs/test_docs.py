"""Checks that links, mechanisms, tests, packages and files on the pages exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support import pages

ROOT = Path(__file__).parents[2]


def test_links_between_pages_resolve():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert len(links) > 5
    assert [link for page, link in links if not (page.parent / link).exists()] == []


# --- the table of tests/kv_cache.md ---------------------------------------------------------------

KV_TABLE_ROWS = re.findall(
    r"^\| (\d+) \| (.*) \|$", (ROOT / "tests/kv_cache.md").read_text(encoding="utf-8"), re.MULTILINE
)
REFERENCE = re.compile(r"`((?:\w+/)*\w+\.py)::([\w.]+)`")


@functools.cache
def defined_names(path: Path) -> set[str]:
    """Returns the names defined in a file: functions, classes, `Class.method`, constants."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def unresolved(cell: str, folder: Path) -> list[str]:
    """Returns the references of a table cell that do not resolve; a cell must have a reference."""
    references = REFERENCE.findall(cell)
    if not references:
        return [f"no reference in {cell!r}"]
    return [
        f"{path}::{name}"
        for path, name in references
        if not (folder / path).is_file() or name not in defined_names(folder / path)
    ]


def test_the_kv_table_lists_all_mechanisms_in_order():
    assert [int(number) for number, _ in KV_TABLE_ROWS] == list(range(1, 45))
    assert {row.count(" | ") for _, row in KV_TABLE_ROWS} == {2}


@pytest.mark.parametrize(
    ("number", "row"), KV_TABLE_ROWS, ids=[number for number, _ in KV_TABLE_ROWS]
)
def test_the_references_of_the_kv_table_exist(number, row):
    _, code, test = row.split(" | ")
    assert unresolved(code, ROOT / "nanoengine") == []
    assert unresolved(test, ROOT / "tests") == []
    assert all(name.startswith("test_") for _, name in REFERENCE.findall(test))


def test_an_unknown_reference_is_reported():
    assert unresolved("`core/block_pool.py::BlockPool.free`", ROOT / "nanoengine") == []
    for cell in ("`core/block_pool.py::BlockPool.freed`", "`core/pool.py::BlockPool`", "always"):
        assert len(unresolved(cell, ROOT / "nanoengine")) == 1


# --- the packages of design.md, and files on pages ------------------------------------------------

DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
FAST_PATHS = (ROOT / "tests/fast_paths.md").read_text(encoding="utf-8")
FAST_PATH_ROWS = re.findall(
    r"^\| (.*`.*) \| (.*`.*) \| (`(?:\w+/)?test_.*) \|$", FAST_PATHS, re.MULTILINE
)
PACKAGE_ROW = re.compile(r"^\| `([\w/]+)/` \| .* \| .* \| (.*) \|$", re.MULTILINE)
FIRST_FILES = dict(PACKAGE_ROW.findall(DESIGN.partition("## Principles")[0]))
"""Package -> the files to read first."""


def test_the_design_table_lists_each_package_with_a_file_to_read_first():
    package = ROOT / "nanoengine"
    names = {path.parent.name for path in package.glob("*/__init__.py")}
    assert names | {"nanoengine"} <= FIRST_FILES.keys()
    for name, first in FIRST_FILES.items():
        folder = package if name == "nanoengine" else package / name
        assert [
            file for file in re.findall(r"`(\S+)`", first) if not (folder / file).is_file()
        ] == []


FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in ("nanoengine", "tests", "tools", "benchmarks", "docs", "examples")
    for path in (ROOT / folder).rglob("*.py")
} | {path.name for path in ROOT.glob("*.py")}
EXTERNAL_FILES = re.compile(r"^# (\S+\.py)$|(modular_\S+\.py|convert_hf_to_gguf\.py)", re.MULTILINE)
"""Files that a page writes, and files of other projects."""


def unknown_files(text: str) -> set[str]:
    """Returns the Python files in `code` that do not exist. A file may be named by the end of its
    path."""
    external = {name for pair in EXTERNAL_FILES.findall(text) for name in pair}
    names = set(re.findall(r"`([\w/]+\.py)\b", text)) - external
    return {name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in FILES)}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_the_files_on_a_page_exist(page):
    assert unknown_files(page.read_text(encoding="utf-8")) == set()


def test_an_unknown_file_is_reported():
    assert unknown_files("`core/scheduler.py` and `core/schedule.py::x`") == {"core/schedule.py"}


def test_every_fast_path_has_a_reference_implementation_and_a_test():
    assert len(FAST_PATH_ROWS) > 18
    for reference, fast, test in FAST_PATH_ROWS:
        assert unresolved(reference, ROOT / "nanoengine") == []
        assert unresolved(fast, ROOT / "nanoengine") == []
        assert unresolved(test, ROOT / "tests") == []
