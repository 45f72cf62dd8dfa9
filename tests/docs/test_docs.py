"""What the pages name is there: links, mechanisms and their tests, files of the house."""

import ast
import functools
import re
from pathlib import Path

import pytest

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


# --- the tables of kv_cache.md --------------------------------------------------------------------

ROWS = re.findall(
    r"^\| (\d+) \| (.*) \|$", (ROOT / "docs/kv_cache.md").read_text(encoding="utf-8"), re.MULTILINE
)
REFERENCE = re.compile(r"`((?:\w+/)*\w+\.py)::([\w.]+)`")


@functools.cache
def names_in(path: Path) -> set[str]:
    """What a file defines: functions, classes and their methods (`Class.method`), constants."""
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
    """References of a cell that lead nowhere; at least one must be there."""
    references = REFERENCE.findall(cell)
    if not references:
        return [f"no reference in {cell!r}"]
    return [
        f"{path}::{name}"
        for path, name in references
        if not (folder / path).is_file() or name not in names_in(folder / path)
    ]


def test_the_kv_page_has_all_mechanisms_in_order():
    assert [int(number) for number, _ in ROWS] == list(range(1, 46))
    assert {row.count(" | ") for _, row in ROWS} == {4}


@pytest.mark.parametrize(("number", "row"), ROWS, ids=[number for number, _ in ROWS])
def test_what_the_kv_page_names_exists(number, row):
    _, where, test, _, _ = row.split(" | ")
    assert missing(where, ROOT / "nanoengine") == []
    assert missing(test, ROOT / "tests") == []
    assert all(name.startswith("test_") for _, name in REFERENCE.findall(test))


def test_a_name_that_is_not_there_is_noticed():
    assert missing("`core/block_pool.py::BlockPool.free`", ROOT / "nanoengine") == []
    for cell in ("`core/block_pool.py::BlockPool.freed`", "`core/pool.py::BlockPool`", "always"):
        assert len(missing(cell, ROOT / "nanoengine")) == 1


# --- the house in design.md -----------------------------------------------------------------------

DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
DRAWING = DESIGN.partition("## Plain first")[0]
TWINS = re.findall(r"^\| (.*`.*) \| (.*`.*) \| (`(?:\w+/)?test_.*) \|$", DESIGN, re.MULTILINE)


def drawn_in(room: str) -> set[str]:
    """The files of `room/one.py, two.py, ...`; of the package itself, any name."""
    names = re.compile(r"\b\w+\.py\b")
    if room == ".":
        return set(names.findall(DRAWING))
    lists = re.findall(rf"\b{room}/((?:\w+\.py[,\s]*)+)", DRAWING)
    return set(names.findall(" ".join(lists)))


@pytest.mark.parametrize(
    "room",
    [
        ".",
        "core",
        "core/tiers",
        "runner",
        "checkpoint",
        "models",
        "layers",
        "attention",
        "kernels",
        "features",
    ],
)
def test_the_house_is_drawn_whole(room):
    files = {path.name for path in (ROOT / "nanoengine" / room).glob("*.py")} - {"__init__.py"}
    assert len(files) > 1
    assert sorted(files - drawn_in(room)) == []


def test_every_fast_path_has_a_twin_and_a_test():
    assert len(TWINS) > 18
    for twin, fast, test in TWINS:
        assert missing(twin, ROOT / "nanoengine") + missing(fast, ROOT / "nanoengine") == []
        assert missing(test, ROOT / "tests") == []
