"""Everything that the pages name exists: links, mechanisms and their tests, packages, files."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support import pages

ROOT = Path(__file__).parents[2]


def test_links_between_pages_lead_somewhere():
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

ROWS = re.findall(
    r"^\| (\d+) \| (.*) \|$", (ROOT / "tests/kv_cache.md").read_text(encoding="utf-8"), re.MULTILINE
)
REFERENCE = re.compile(r"`((?:\w+/)*\w+\.py)::([\w.]+)`")


@functools.cache
def names_in(path: Path) -> set[str]:
    """Returns the names defined in a file: functions, classes, `Class.method`, constants."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{part.name}" for part in inside}
    return found


def missing(cell: str, folder: Path) -> list[str]:
    """Returns the references of a cell that don't resolve; the cell must have at least one."""
    references = REFERENCE.findall(cell)
    if not references:
        return [f"no reference in {cell!r}"]
    return [
        f"{path}::{name}"
        for path, name in references
        if not (folder / path).is_file() or name not in names_in(folder / path)
    ]


def test_the_kv_table_has_all_mechanisms_in_order():
    assert [int(number) for number, _ in ROWS] == list(range(1, 45))
    assert {row.count(" | ") for _, row in ROWS} == {2}


@pytest.mark.parametrize(("number", "row"), ROWS, ids=[number for number, _ in ROWS])
def test_what_the_kv_table_names_exists(number, row):
    _, where, test = row.split(" | ")
    assert missing(where, ROOT / "nanoengine") == []
    assert missing(test, ROOT / "tests") == []
    assert all(name.startswith("test_") for _, name in REFERENCE.findall(test))


def test_a_name_that_is_not_there_is_noticed():
    assert missing("`core/block_pool.py::BlockPool.free`", ROOT / "nanoengine") == []
    for cell in ("`core/block_pool.py::BlockPool.freed`", "`core/pool.py::BlockPool`", "always"):
        assert len(missing(cell, ROOT / "nanoengine")) == 1


# --- the packages of design.md, and files that pages name -----------------------------------------

DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
FAST_PATHS = (ROOT / "tests/fast_paths.md").read_text(encoding="utf-8")
TWINS = re.findall(r"^\| (.*`.*) \| (.*`.*) \| (`(?:\w+/)?test_.*) \|$", FAST_PATHS, re.MULTILINE)
ROW_OF_A_ROOM = re.compile(r"^\| `([\w/]+)/` \| .* \| .* \| (.*) \|$", re.MULTILINE)
ROOMS = dict(ROW_OF_A_ROOM.findall(DESIGN.partition("## Principles")[0]))
"""The files to read first, by package."""


def test_each_room_stands_in_the_table_with_a_file_to_read_first():
    package = ROOT / "nanoengine"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert rooms | {"nanoengine"} <= ROOMS.keys()
    for room, first in ROOMS.items():
        folder = package if room == "nanoengine" else package / room
        assert [
            name for name in re.findall(r"`(\S+)`", first) if not (folder / name).is_file()
        ] == []


FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in ("nanoengine", "tests", "tools", "benchmarks", "docs", "examples")
    for path in (ROOT / folder).rglob("*.py")
} | {path.name for path in ROOT.glob("*.py")}
ELSEWHERE = re.compile(r"^# (\S+\.py)$|(modular_\S+\.py|convert_hf_to_gguf\.py)", re.MULTILINE)
"""Files that a page writes itself, and files of other projects."""


def unknown_files(text: str) -> set[str]:
    """Returns names of Python files in `code` that match the end of no path in the repository."""
    others = {name for pair in ELSEWHERE.findall(text) for name in pair}
    named = set(re.findall(r"`([\w/]+\.py)\b", text)) - others
    return {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in FILES)}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_each_file_that_a_page_names_exists(page):
    assert unknown_files(page.read_text(encoding="utf-8")) == set()


def test_a_file_that_is_not_there_is_noticed():
    assert unknown_files("`core/scheduler.py` and `core/schedule.py::x`") == {"core/schedule.py"}


def test_every_fast_path_has_a_twin_and_a_test():
    assert len(TWINS) > 18
    for twin, fast, test in TWINS:
        assert missing(twin, ROOT / "nanoengine") + missing(fast, ROOT / "nanoengine") == []
        assert missing(test, ROOT / "tests") == []
