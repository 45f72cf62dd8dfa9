"""Makes recorded.json, the texts that `benchmarks/speculative.py` replays, from this repository.

    edits  input: lines of code before a commit; output: after it
    json   input: a function's source and the fields to extract; output: the fields as JSON
    prose  input: the beginning of a page of docs/; output: its continuation

`python benchmarks/texts/make_texts.py` in a clone with the complete history always writes the same
file. Only texts are recorded: `speculative.py` splits them into tokens.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

EDITS = (
    ("21fd651", "nanoengine/runner/sampler.py"),
    ("2f20eb5", "nanoengine/layers/packed.py"),
    ("3ddeb25", "nanoengine/kernels/cpu_linear.py"),
    ("10cd3b3", "nanoengine/core/scheduler.py"),
    ("2c55c14", "nanoengine/cli/batch.py"),
    ("31951da", "nanoengine/build.py"),
    ("96f7bac", "nanoengine/observe/trace.py"),
    ("c025c67", "nanoengine/runner/pick.py"),
    ("f0983d9", "nanoengine/layers/packed.py"),
    ("24875f1", "nanoengine/core/scheduler.py"),
)
"""Ten random commits: the first change of a file, with 25 lines before and after it."""
AT = "2fab99d"
FUNCTIONS_OF = (
    "nanoengine/core/block_manager.py",
    "nanoengine/core/forks.py",
    "nanoengine/runner/memory.py",
    "nanoengine/runner/input_batch.py",
)
ASKED = """\
Describe the function below as JSON, in this form:
{"name": "...", "arguments": [{"name": "...", "type": "..."}], "returns": "...", "summary": "...",\
 "lines": 0}"""
PAGES = ("docs/overlap.md", "docs/quantization.md", "docs/kv_tiers.md", "docs/gpu.md")


def run_git(*arguments: str) -> str:
    """Output of git."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def stored(commit: str, path: str) -> str:
    """A file in a commit."""
    return run_git("show", f"{commit}:{path}")


def edits() -> list[dict[str, str]]:
    """Input: old lines; output: new lines."""
    found = []
    for commit, path in EDITS:
        change = run_git("diff", "-U25", f"{commit}^", commit, "--", path)
        lines = re.split(r"(?m)^@@.*@@.*\n", change)[1].splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        found.append({"prompt": f"Change this code:\n{old}\nThe new code:\n", "answer": new})
    return found


def extractions() -> list[dict[str, str]]:
    """Three functions per file. Input: source; output: fields."""
    found = []
    for path in FUNCTIONS_OF:
        source = stored(AT, path)
        functions = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef)
            and len(node.args.args) > 2
            and ast.get_docstring(node)
        ]
        for node in functions[:3]:
            text = ast.get_source_segment(source, node) or ""
            fields = {
                "name": node.name,
                "arguments": [
                    {"name": a.arg, "type": ast.unparse(a.annotation)}
                    for a in node.args.args
                    if a.annotation is not None
                ],
                "returns": ast.unparse(node.returns) if node.returns else None,
                "summary": (ast.get_docstring(node) or "").partition("\n")[0],
                "lines": text.count("\n") + 1,
            }
            found.append(
                {
                    "prompt": f"{ASKED}\n\n{text}\n\n",
                    "answer": json.dumps(fields),
                }
            )
    return found


def prose() -> list[dict[str, str]]:
    """The beginning of a page, and its continuation; without tables and code."""
    found = []
    for path in PAGES:
        parts = stored(AT, path).split("\n\n")
        texts = [part for part in parts if part[:1].isalpha() and len(part) > 150]
        found.append({"prompt": texts[0] + "\n\n", "answer": "\n\n".join(texts[1:7])})
    return found


def main() -> None:
    """Writes all three kinds."""
    kinds = {"edits": edits(), "json": extractions(), "prose": prose()}
    text = json.dumps(kinds, indent=1, ensure_ascii=False)
    (Path(__file__).parent / "recorded.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
