"""The code on the path of one prompt: `python tools/spine.py`; `make loc` prints it below all
files.

The *spine* is what a reader must know to follow one prompt through Qwen3 on the naive backend: the
files with functions that a plain greedy `generate` calls, after the model is loaded. Two measures
say how direct it is:

    share   of the spine's code lines, the ones in functions that this run executes; the others are
            for options, or are not executed in a call: imports, signatures, fields
    decode  one decode step outside of the model: calls of the package's functions, how often the
            next call is in another file, and how often this file had been left before

Both are measured in a separate process, with `sys.settrace`. `--root DIR` measures another
checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from loc import code_lines  # noqa: E402

MODEL = ("models", "layers", "attention", "kernels")
"""Packages whose calls are inside the model."""

RUN = """
import json, os, sys
root = os.path.join({root!r}, "nanoengine") + os.sep
sys.path.insert(0, {root!r})
lines, called, calls, watching = {{}}, set(), [], [False]

def on_line(frame, event, arg):
    if event == "line":
        lines[frame.f_code.co_filename].add(frame.f_lineno)
    return on_line

def on_call(frame, event, arg):
    code = frame.f_code
    if not code.co_filename.startswith(root):
        return None
    lines.setdefault(code.co_filename, set()).add(frame.f_lineno)
    if code.co_flags & 1 and code.co_name[0] != "<":  # neither a class body nor a comprehension
        called.add(code.co_filename)
        if watching[0]:
            calls.append((code.co_filename, code.co_name))
    return on_line

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
with LLM(demo_model_path(), device="cpu", attention_backend="naive", kv_cache_gib=0.1) as llm:
    params = SamplingParams(temperature=0, max_tokens=8)
    llm.generate("Tom", params, use_tqdm=False)  # kernels that are not on disk yet are compiled
    sys.settrace(on_call)
    llm.generate("Once upon a time", params, use_tqdm=False)
    sys.settrace(None)
    engine = llm.engine
    engine.add_request("a", [5, 6, 7], params)
    for _ in range(3):
        engine.step()
    watching[0] = True
    sys.settrace(on_call)
    engine.step()
    sys.settrace(None)
json.dump([{{f: sorted(n) for f, n in lines.items()}}, sorted(called), calls], sys.stdout)
"""


class SpineFile(NamedTuple):
    """A file of the spine: its code lines, and the number of them that the run executes."""

    path: str
    lines: int
    run: int


class Decode(NamedTuple):
    """One decode step outside of the model."""

    calls: int
    changes: int
    returns: int


class Spine(NamedTuple):
    """The code on the path of one prompt."""

    files: list[SpineFile]
    decode: Decode

    @property
    def lines(self) -> int:
        """Code lines of all files."""
        return sum(file.lines for file in self.files)

    @property
    def share(self) -> float:
        """The share of them that the run executes."""
        return sum(file.run for file in self.files) / self.lines


def executed(source: str, line_numbers: set[int]) -> set[int]:
    """Code lines of the statements in functions that have one of these lines; for a compound
    statement, only the lines of its head.

    Why: Python reports one line of a statement with several lines.

        >>> sorted(executed("def f():\\n  if (a\\n    or b):\\n    c = 1\\n  return 2", {2, 5}))
        [2, 3, 5]
    """
    found: set[int] = set()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for node in (
        inner for function in functions for part in function.body for inner in ast.walk(part)
    ):
        if isinstance(node, ast.stmt):
            inner = getattr(node, "body", None)
            end = inner[0].lineno - 1 if inner else node.end_lineno or node.lineno
            span = range(node.lineno, max(end, node.lineno) + 1)
            if not line_numbers.isdisjoint(span):
                found.update(span)
    return found & code_lines(source)


def trace(root: Path) -> tuple[dict[str, list[int]], list[str], list[tuple[str, str]]]:
    """Executed lines by file, files with called functions, and the calls of a decode step."""
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(root=str(root))],
        stdout=subprocess.PIPE,
        cwd=root,
        check=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    lines, called, calls = json.loads(done.stdout)
    return lines, called, [(file, name) for file, name in calls]


def measure(root: Path = ROOT) -> Spine:
    """Runs the prompt and counts."""
    lines, called, calls = trace(root)
    files = []
    for name in called:
        source = Path(name).read_text(encoding="utf-8")
        path = Path(name).relative_to(root / "nanoengine").as_posix()
        run = executed(source, set(lines[name]))
        files.append(SpineFile(path, len(code_lines(source)), len(run)))
    return Spine(files, decode_of([file for file, _ in outside_of_model(calls, root)]))


def outside_of_model(calls: list[tuple[str, str]], root: Path) -> list[tuple[str, str]]:
    """The calls outside the model's packages."""
    packages = tuple(str(root / "nanoengine" / package) + os.sep for package in MODEL)
    return [call for call in calls if not call[0].startswith(packages)]


def decode_of(files: list[str]) -> Decode:
    """Counts a step's calls, given the file of each.

    >>> decode_of(["a", "a", "b", "a", "c", "b"])
    Decode(calls=6, changes=4, returns=2)
    """
    changes = [i for i in range(1, len(files)) if files[i] != files[i - 1]]
    returns = sum(files[i] in files[:i] for i in changes)
    return Decode(len(files), len(changes), returns)


def report(spine: Spine) -> str:
    """The table, and both measures."""
    rows = [f"{'the spine: one prompt, Qwen3, naive':<44} {'lines':>7} {'run':>7}"]
    for file in sorted(spine.files):
        rows.append(f"  {file.path:<42} {file.lines:>7,} {file.run:>7,}")
    run = sum(file.run for file in spine.files)
    rows += [
        f"{f'{len(spine.files)} files':<44} {spine.lines:>7,} {run:>7,}",
        f"a plain greedy generate runs {spine.share:.0%} of the spine's code lines",
        "one decode step outside of the model: {} calls, {} changes of file, {} returns".format(
            *spine.decode
        ),
    ]
    return "\n".join(rows)


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    parser.add_argument("--calls", action="store_true", help="list the calls of the decode step")
    args: Any = parser.parse_args()
    root = args.root.resolve()
    if args.calls:
        for file, name in outside_of_model(trace(root)[2], root):
            print(f"{Path(file).relative_to(root / 'nanoengine')}  {name}")
    else:
        print(report(measure(root)))


if __name__ == "__main__":
    main()
