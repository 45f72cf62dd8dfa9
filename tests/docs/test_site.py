"""Checks that the docs site has every page, and that its links and anchors resolve."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.suite import ablate, sweep
from tests.support.browser import start_chromium
from tools import notebooks

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def pages_in(nav: list[Any]) -> list[str]:
    """Returns all pages of a navigation: an entry is a page or a section of entries."""
    found: list[str] = []
    for entry in nav:
        if isinstance(entry, str):
            found.append(entry)
        else:
            for section in entry.values():
                found += [section] if isinstance(section, str) else pages_in(section)
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    notebooks = (f"notebooks/{path.stem}.md" for path in NOTEBOOKS)
    listed, existing = sorted(pages_in(site["nav"])), sorted([*(p.name for p in PAGES), *notebooks])
    assert listed == existing, "a new page needs a line in nav of mkdocs.yml"


def test_pages_link_only_to_pages() -> None:
    """The site contains only pages, so other files are named in `code` instead of linked."""
    outside = {
        page.name: links
        for page in PAGES
        if (links := re.findall(r"\]\((\.\.[^)]*)\)", page.read_text(encoding="utf-8")))
    }
    assert outside == {}


def test_all_columns_of_tables_have_headers() -> None:
    headers = {
        page.name: [line for line, below in itertools.pairwise(page.read_text("utf-8").split("\n"))
                    if re.fullmatch(r"\|[-| :]+\|", below)]
        for page in PAGES
    }  # fmt: skip
    assert sum(map(len, headers.values())) > 50
    empty = {
        name: wrong
        for name, lines in headers.items()
        if (wrong := [line for line in lines if not all(map(str.strip, line.split("|")[1:-1]))])
    }
    assert empty == {}, "give each column of these tables a header"


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    # Why not --quiet: with it, mkdocs does not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]
    return subprocess.run([*command, str(target)], cwd=root, capture_output=True, text=True)


@pytest.mark.guards("docs/notebooks/*.ipynb", "nanoengine/core/*.py", "nanoengine/engine.py")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_has_the_outputs_of_a_run(path: Path) -> None:
    notebook = json.loads(path.read_text("utf-8"))
    stored = notebooks.stored_outputs(notebook)
    assert len(stored) > 5
    assert notebooks.outputs_of(notebook) == stored, "run python tools/notebooks.py"


@pytest.fixture(scope="module", name="site")
def site_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    site = tmp_path_factory.mktemp("site")
    done = build(ROOT, site)
    assert done.returncode == 0, done.stderr
    return site


@pytest.mark.extra
def test_the_site_has_all_pages_and_a_bad_anchor_is_an_error(site: Path, tmp_path: Path) -> None:
    for page in PAGES:
        assert (site / f"{page.stem}.html").is_file()
    for path in NOTEBOOKS:
        page = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
        assert html.escape(notebooks.stored_outputs(json.loads(path.read_text("utf-8")))[2]) in page
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    tour = tmp_path / "docs" / "tour.md"
    tour.write_text(tour.read_text("utf-8") + "\n[x](batch.md#no-such-heading)\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "again")
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr


CUT = """() => [document.documentElement, ...document.querySelectorAll("article *")]
    .filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
    .filter(e => getComputedStyle(e).overflowX != "visible" || e == document.documentElement)
    .map(e => e.tagName + " " + e.scrollWidth + " px: " + e.textContent.trim().slice(0, 80))
"""


@pytest.mark.browser
def test_nothing_is_cut_in_a_window_of_1300_pixels(site: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is missing")
    with api.sync_playwright() as playwright:
        browser = start_chromium(playwright)
        if isinstance(browser, str):
            pytest.skip(browser)
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        cut = {}
        for path in site.rglob("*.html"):
            page.goto(path.as_uri())
            cut[path.name] = page.evaluate(CUT)
        browser.close()
    assert len(cut) > len(PAGES)
    assert {name: found for name, found in cut.items() if found} == {}


@pytest.mark.parametrize(
    ("report", "format_report"),
    [
        ("ablation-demo", ablate.format_report),
        ("sweep-demo", sweep.format_sweep),
        ("rates-demo", sweep.format_rates),
    ],
)
def test_the_tables_of_performance_equal_the_reports(report: str, format_report: Any) -> None:
    recorded = json.loads((ROOT / f"benchmarks/results/{report}.json").read_text("utf-8"))
    assert format_report(recorded) in (ROOT / "docs/performance.md").read_text("utf-8")
