"""What README, CONTRIBUTING and docs/design.md say of the spine is what tools/spine.py measures."""

import doctest
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTE = re.compile(
    r"(\d+)\s+files\s+of\s+([\d,]+)\s+code\s+lines,\s+and\s+runs\s+(\d+)\s+%\s+of\s+them"
)
DECODE = re.compile(r"(\d+)\s+calls,\s+(\d+)\s+changes\s+of\s+file,\s+(\d+)\s+returns,\s+today")
"""The sentences that quote the figures; in all other words the pages are free."""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("spine", ROOT / "tools" / "spine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["spine"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def spine(tool):
    return tool.measure()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_the_pages_quote_what_is_measured(page, spine):
    """To a tenth in lines and 3 in a hundred: a small change breaks no page, a large one does."""
    ((files, lines, percent),) = QUOTE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert int(files) == pytest.approx(len(spine.files), abs=4)
    assert int(lines.replace(",", "")) == pytest.approx(spine.lines, rel=0.1)
    assert int(percent) == pytest.approx(100 * spine.share, abs=3)


def test_the_design_quotes_the_decode_step(spine):
    ((calls, changes, returns),) = DECODE.findall((ROOT / "docs/design.md").read_text("utf-8"))
    for quoted, measured in zip((calls, changes, returns), spine.decode, strict=True):
        assert int(quoted) == pytest.approx(measured, abs=5)


def test_the_spine_is_what_a_prompt_meets_and_no_more(spine):
    paths = {file.path for file in spine.files}
    assert {"llm.py", "engine.py", "core/scheduler.py", "core/block_pool.py"} <= paths
    assert {"runner/model_runner.py", "models/decoder.py", "attention/naive.py"} <= paths
    assert not {"build.py", "attention/triton.py", "cli/main.py", "features/beam.py"} & paths
    assert all(0 < file.run < file.lines for file in spine.files)


def test_the_counting_of_the_tool(tool):
    assert doctest.testmod(tool).failed == 0
    source = (
        "def f(a):\n    if a:\n        return (1,\n                2)\n    return 3\n\n\nX = 1\n"
    )
    assert tool.executed(source, {1, 2, 4, 8}) == {2, 3, 4}, "neither a signature nor a constant"
    assert tool.decode_of(["a"]) == (1, 0, 0)
