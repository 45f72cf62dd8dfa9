"""The table of docs/models.md lists exactly the supported families, each with a tested model."""

from __future__ import annotations

import re
from pathlib import Path

from nanoengine.checkpoint.families import TEXT_PARTS, every_family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
LINE = re.compile(r"^\| (equal|refused: .*|not (?:written|computed).*) \| (`.*) \|$", re.MULTILINE)
TYPE = re.compile(r"`([\w-]+)`(?: (\w+))?")


def test_the_table_has_the_families_that_are_supported() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("<!-- table: ")[2]
    lines = {result: TYPE.findall(types) for result, types in LINE.findall(text)}
    assert len(lines) == text.count("\n| ") - 1, "each line is read"
    by_type = dict(lines["equal"])
    assert set(by_type.values()) >= {*every_family(), *TEXT_PARTS}, (
        "a family is missing: run the tool"
    )
    every = [kind for types in lines.values() for kind, _ in types]
    assert len(every) == len(set(every)) > 150, "a type has one result"
    for architecture, family in every_family().items():
        assert by_type.get(family.model_type, architecture) == architecture


def test_the_page_says_how_many_there_are() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(every_family())} families](docs/models.md)" in readme
