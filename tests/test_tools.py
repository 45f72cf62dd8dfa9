"""The line counts of the tools are correct."""

import doctest
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("spine", ROOT / "tools" / "spine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["spine"] = module
    spec.loader.exec_module(module)
    return module


def test_the_spine_tool_counts_executed_lines(tool):
    assert doctest.testmod(tool).failed == 0
    source = (
        "def f(a):\n    if a:\n        return (1,\n                2)\n    return 3\n\n\nX = 1\n"
    )
    assert tool.executed(source, {1, 2, 4, 8}) == {2, 3, 4}, "neither a signature nor a constant"
    assert tool.decode_of(["a"]) == (1, 0, 0)
