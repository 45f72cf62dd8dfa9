"""docs/tour.md: each line that an exercise breaks has the effect that the page states."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.tour import BLOCKS, exercises, output_of

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/tour.md").read_text(encoding="utf-8")

QUOTES = [b for b in BLOCKS if b.kind == "quotation"]
BREAKS = [b for b in BLOCKS if b.kind == "diff"]


def test_the_page_contains_only_tested_code():
    """docs/test_pages.py checks examples and quotations; this file checks exercises."""
    assert len(re.findall(r"^## \d+\. ", PAGE, re.M)) == 10
    assert len(QUOTES) >= 3
    assert len(BREAKS) >= 5
    scripts = [b for b in BLOCKS if b.kind == "script"]
    assert scripts == []


@contextlib.contextmanager
def changed(path: str, old: str, new: str) -> Iterator[None]:
    """Changes one place in one file of the small engine within this process."""
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is not once in {path}"
    name = path.removesuffix(".py").replace("/", ".")
    ours = {m: sys.modules.pop(m) for m in list(sys.modules) if m.startswith("nanoengine.small.")}
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        exec(compile(source.replace(old, new), path, "exec"), module.__dict__)
        yield
    finally:
        for loaded in [m for m in sys.modules if m.startswith("nanoengine.small.")]:
            del sys.modules[loaded]
        sys.modules.update(ours)


@pytest.mark.parametrize("exercise", list(exercises()), ids=lambda exercise: exercise.path)
def test_a_broken_line_has_the_effect_in_the_answer(exercise):
    question = exercise.question
    answer = next(b for b in BLOCKS if b.line > question.line and b.kind == "output")
    with changed(exercise.path, exercise.old, exercise.new):
        assert output_of(question) == answer.text
    assert output_of(question) != answer.text, "the answer shows the difference"


def test_the_command_shows_the_started_exercise_only(tmp_path):
    """Runs in a copy without pytest, as after `make demo`."""
    for name in ("nanoengine", "tools", "docs", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "images")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    blocked = (
        "import runpy, sys; sys.modules['pytest'] = None;"
        " runpy.run_path('tools/tour.py', run_name='__main__')"
    )

    def printed() -> str:
        command = [sys.executable, "-c", blocked]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert printed().startswith("No exercise has started")
    _, _, exercise, *_ = exercises()
    path = tmp_path / exercise.path
    path.write_text(path.read_text("utf-8").replace(exercise.old, exercise.new), "utf-8")
    answer = next(b for b in BLOCKS if b.line > exercise.question.line and b.kind == "output")
    shown = printed()
    assert shown.count("Got:") == 1
    got = shown.partition("Got:\n")[2]
    assert [line.strip() for line in got.splitlines()] == [
        line.strip() for line in answer.text.splitlines()
    ]
