"""Runs the exercises of docs/tour.md that the reader has started: `python tools/tour.py`

An exercise has started if its file no longer contains the line that the page shows with a minus.
The tool runs all examples of the page up to the exercise's question, and prints the output that
the page shows next to the new output. It needs only what `make demo` installs.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import pages  # noqa: E402

BLOCKS = pages.blocks_of(ROOT / "docs/tour.md")
EXAMPLES = [block for block in BLOCKS if block.kind == "session"]


class Exercise(NamedTuple):
    """A change to the code, and the examples whose output it changes.

    Attributes:
        path, old, new: the file, the original text, and its replacement.
        question: the block of examples after the change.
    """

    path: str
    old: str
    new: str
    question: pages.Block


def exercises() -> Iterator[Exercise]:
    """Yields all exercises of the page, in order."""
    for block in BLOCKS:
        if block.kind == "diff":
            path, *lines = block.text.rstrip("\n").split("\n")
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            yield Exercise(path, old, new, next(b for b in EXAMPLES if b.line > block.line))


def output_of(question: pages.Block) -> str:
    """Returns the output of a block of examples, run after all examples before it."""
    namespace: dict[str, object] = {}
    parser = doctest.DocTestParser()
    for block in EXAMPLES:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for example in parser.get_examples(block.text):
                exec(compile(example.source, "tour", "single"), namespace)
        if block is question:
            break
    return printed.getvalue()


def main() -> None:
    """Prints the results of the exercises that have started."""
    started = [e for e in exercises() if e.old not in (ROOT / e.path).read_text(encoding="utf-8")]
    if not started:
        print("No exercise has started: change a line in its file, save it, and run this again.")
    for exercise in started:
        print(f"{exercise.path}, docs/tour.md line {exercise.question.line}:")
        examples = doctest.DocTestParser().get_examples(exercise.question.text)
        before = "".join(example.want for example in examples)
        for title, text in (("Expected", before), ("Got", output_of(exercise.question))):
            print(f"{title}:\n" + "".join(f"    {line}\n" for line in text.splitlines()), end="")


if __name__ == "__main__":
    main()
