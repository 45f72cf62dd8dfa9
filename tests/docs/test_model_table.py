"""The table of docs/models.md lists exactly the supported families, each with a tested type."""

from __future__ import annotations

import re
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as MULTIMODAL,
)

from nanoengine.checkpoint.families import TEXT_PARTS, every_family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
TABLE_ROW = re.compile(r"^\| (equal.*|refused: .*|not tested: .*) \| (`.*) \|$", re.MULTILINE)
MODEL_TYPE = re.compile(r"`([\w-]+)`(?: (\w+))?")


def test_the_table_lists_the_supported_families() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("<!-- table: ")[2]
    types_by_result = {
        result: MODEL_TYPE.findall(types) for result, types in TABLE_ROW.findall(text)
    }
    assert len(types_by_result) == text.count("\n| ") - 1, "every row of the table is parsed"
    by_type = dict(types_by_result["equal"])
    others = {MULTIMODAL.get(t) for t, _ in types_by_result["equal, by transformers' modules"]}
    assert {*by_type.values(), *others} >= {*every_family(), *TEXT_PARTS}, (
        "a family is missing: run python tools/model_table.py"
    )
    model_types = [kind for types in types_by_result.values() for kind, _ in types]
    assert len(model_types) == len(set(model_types)) > 150, "each type has one result"
    for architecture, family in every_family().items():
        assert by_type.get(family.model_type, architecture) == architecture


def test_readme_has_the_number_of_families() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(every_family())} families](docs/models.md)" in readme
