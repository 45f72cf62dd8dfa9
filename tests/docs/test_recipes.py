"""Follows the recipes of CONTRIBUTING.md on a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.pages import ROOT

RECIPES = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("\n## Recipes\n")[2]


def changes_of(recipe: str) -> dict[str, str]:
    """Returns path -> the lines that a recipe changes, in the form of a diff; `@@` separates
    places."""
    section = RECIPES.partition(f"\n### {recipe}\n")[2].partition("\n### ")[0]
    return dict(re.findall(r"^```diff\n--- (\S+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))


def apply(text: str, change: str) -> str:
    """Applies a change to the text of a file; "" is a new file."""
    for place in change.split("@@\n"):
        lines = place.splitlines(keepends=True)
        old, new = ("".join(line[1:] or "\n" for line in lines if line[0] in " \n" + sign)
                    for sign in "-+")  # fmt: skip
        assert not old or text.count(old) == 1, (
            f"CONTRIBUTING.md changes lines that the file doesn't have once:\n{old}"
            "Write the recipe for the file as it is now."
        )
        text = text.replace(old, new) if old else text + new
    return text


@pytest.mark.guards(
    "CONTRIBUTING.md", "nanoengine/settings/*.py", "nanoengine/runner/sampling/*.py",
    "nanoengine/cli/*.py", "nanoengine/as_vllm/params.py",
)  # fmt: skip
@pytest.mark.parametrize(
    ("recipe", "num_files", "tests"),
    [
        # Existing tests that go through all options must hold without a change.
        ("A sampling option", 3, [
            "tests/runner/test_sampler.py::"
            "test_rows_are_plain_unless_a_processor_changes_their_logits",
            "tests/cli/test_cli.py::test_every_field_of_sampling_params_is_an_option",
            "tests/docs/test_moving.py::test_fields_are_in_the_order_of_the_page",
        ]),
        ("An option of a command", 2, ["tests/cli/test_help.py"]),
    ],
)  # fmt: skip
def test_a_recipe_works(recipe: str, num_files: int, tests: list[str], tmp_path: Path) -> None:
    changes = changes_of(recipe)
    assert len(changes) == num_files
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("nanoengine", "tests", "docs", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "built", "results", "images")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name, change in changes.items():
        path = tmp_path / name
        text = path.read_text("utf-8") if path.exists() else ""
        if text and "TopNSigma" in str(changes):  # a contributor's option, by the same recipe
            text = apply(text, change.replace("top_n_sigma", "sigma").replace("TopNSigma", "Sigma"))
        path.write_text(apply(text, change), "utf-8")
        tests = [name, *tests] if name.startswith("tests/") else tests
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_all_changes_of_recipes_are_applied() -> None:
    """Recipes without changes are examples, which `test_pages.py` runs."""
    blocks = [b for b in pages.blocks_of(ROOT / "CONTRIBUTING.md") if b.kind == "diff"]
    applied = [changes_of(recipe) for recipe in ("A sampling option", "An option of a command")]
    assert len(blocks) == sum(map(len, applied)) == 5
    for program in ("model_family", "quantized_format"):
        assert f"`examples/{program}.py`" in RECIPES


def test_a_change_of_other_lines_is_reported() -> None:
    assert apply("a\nb\n", " a\n+c\n") == "a\nc\nb\n"
    with pytest.raises(AssertionError, match="doesn't have once"):
        apply("a\na\n", "-a\n+c\n")
