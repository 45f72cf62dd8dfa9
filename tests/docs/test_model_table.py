"""The table of docs/models.md says of each supported family that it was tried, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from nanoengine.checkpoint.families import FAMILIES, TEXT_PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
EQUAL = re.compile(r"^\| `(\w+)` \| (\w+) \|$", re.MULTILINE)
OTHERS = re.compile(r"^\| ((?:refused: |not written).*) \| (`.*`) \|$", re.MULTILINE)


def test_the_table_has_the_families_that_are_supported() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("<!-- table: ")[2]
    by_type = dict(EQUAL.findall(text))
    assert by_type.keys() and set(by_type.values()) >= {*FAMILIES, *TEXT_PARTS}, "run the tool"
    others = [kind for _, kinds in OTHERS.findall(text) for kind in kinds.split(", ")]
    assert len(others) == len(set(others)), "a type has one result"
    assert len(by_type) + len(others) > 150
    assert not by_type.keys() & {kind.strip("`") for kind in others}
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == len(by_type) + len(OTHERS.findall(text)) + 2, "each line is read"
    for architecture, family in FAMILIES.items():
        assert by_type.get(family.model_type, architecture) == architecture


def test_the_page_says_how_many_there_are() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(FAMILIES)} families](docs/models.md)" in readme
