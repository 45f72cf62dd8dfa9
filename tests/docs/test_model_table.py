"""The table of docs/models.md says of each supported family that it was tried, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from nanoengine.checkpoint.families import FAMILIES, TEXT_PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", re.MULTILINE)


def test_the_table_has_the_families_that_are_supported() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 150
    equal = {architecture for _, architecture, result in rows if result == "equal"}
    assert equal >= {*FAMILIES, *TEXT_PARTS}, "a family is not in the table: run the tool"
    others = [result for _, _, result in rows if result != "equal"]
    assert all(result.startswith(("refused: ", "not written")) for result in others)
    by_type = {kind: architecture for kind, architecture, result in rows if result == "equal"}
    for architecture, family in FAMILIES.items():
        assert by_type.get(family.model_type, architecture) == architecture


def test_the_page_says_how_many_there_are() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(FAMILIES)} families](docs/models.md)" in readme
