"""docs/tour.md: each line that it breaks has the effect that it tells."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.pages import Block

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/tour.md").read_text(encoding="utf-8")


BLOCKS = pages.blocks_of(ROOT / "docs/tour.md")
QUOTES = [b for b in BLOCKS if b.kind == "quotation"]
EXAMPLES = [b for b in BLOCKS if b.kind == "session"]
BREAKS = [b for b in BLOCKS if b.kind == "diff"]


def test_the_page_is_made_of_what_is_tested():
    """Examples and quotations are held by docs/test_pages.py, breaks here."""
    assert len(re.findall(r"^## \d+\. ", PAGE, re.M)) == 10
    assert len(QUOTES) >= 7
    assert len(BREAKS) >= 5
    scripts = [b for b in BLOCKS if b.kind == "script"]
    assert scripts == []


@contextlib.contextmanager
def changed(path: str, old: str, new: str) -> Iterator[None]:
    """The small engine with one place of one file changed, in this process."""
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


def output_of(block: Block) -> str:
    """What a block prints, after all examples before it."""
    namespace: dict[str, object] = {}
    parser = doctest.DocTestParser()
    for one in EXAMPLES:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for example in parser.get_examples(one.text):
                exec(compile(example.source, "tour", "single"), namespace)
        if one is block:
            return printed.getvalue()
    raise AssertionError("the block is not an example")


@pytest.mark.parametrize("change", BREAKS, ids=[str(i) for i in range(len(BREAKS))])
def test_a_broken_line_does_what_the_answer_says(change):
    path, *lines = change.text.rstrip("\n").split("\n")
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    answer = next(b for b in BLOCKS if b.line > change.line and b.kind == "output")
    question = next(b for b in EXAMPLES if b.line > change.line)
    assert question.line < answer.line
    with changed(path, old, new):
        assert output_of(question) == answer.text
    assert output_of(question) != answer.text, "the answer tells the two apart"
