"""The scripts in README, recipes and the page on quantization run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    pytest.param(script, id=f"{page}-{number}")
    for page in ("README.md", "docs/recipes.md", "docs/quantization.md")
    for number, script in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    )
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_of_a_page_runs_and_prints(script, capsys):
    exec(compile(script, "script", "exec"), {})
    printed = capsys.readouterr().out
    assert len(printed.split()) > 8


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
