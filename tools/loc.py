"""Counts the code: `python tools/loc.py`, or `make loc`.

A code line has a token that is neither comment nor docstring. The number of tokens per line
measures the density of code: about 8 is easy to read. A string counts as one token, also an
f-string, so that all Python versions count equally.
"""

from __future__ import annotations

import ast
import io
import token
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
IGNORED = {
    token.COMMENT,
    token.NL,
    token.NEWLINE,
    token.INDENT,
    token.DEDENT,
    token.ENCODING,
    token.ENDMARKER,
}


class Size(NamedTuple):
    """Code lines and tokens of a piece of code."""

    lines: int
    tokens: int

    @property
    def tokens_per_line(self) -> float:
        """Density of the code; 0 for an empty file."""
        return self.tokens / self.lines if self.lines else 0.0


def measure(source: str) -> Size:
    """Counts code lines and tokens.

    >>> measure('def one():  # a comment\\n    "A docstring."\\n\\n    return 1')
    Size(lines=2, tokens=7)
    """
    lines, count = _scan(source)
    return Size(len(lines), count)


def code_lines(source: str) -> set[int]:
    """The numbers of a source's code lines."""
    return _scan(source)[0]


def _scan(source: str) -> tuple[set[int], int]:
    docstrings = _docstring_lines(source)
    lines: set[int] = set()
    count = depth = 0
    for piece in tokenize.generate_tokens(io.StringIO(source).readline):
        if piece.type in IGNORED or piece.start[0] in docstrings:
            continue
        lines.update(range(piece.start[0], piece.end[0] + 1))
        kind = token.tok_name[piece.type]  # Why by token name: Python 3.11 has no f-string tokens.
        depth -= kind == "FSTRING_END"
        count += depth == 0 and kind != "FSTRING_END"
        depth += kind == "FSTRING_START"
    return lines, count


def _docstring_lines(source: str) -> set[int]:
    """Lines of strings that are statements: docstrings of modules, classes, functions and
    fields."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _group(path: Path) -> str:
    """The folder that a file is counted with: two levels deep in the package, otherwise one."""
    depth = 2 if path.parts[0] == "nanoengine" else 1
    return "/".join(path.parts[:-1][:depth]) or "."


def _files() -> list[Path]:
    """Python files of the repository, without hidden and build folders."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    skipped = ("build", "dist")
    return sorted(p for p in found if p.parts[0] not in skipped and not p.parts[0].startswith("."))


def _row(name: str, size: Size) -> str:
    return f"{name:<44} {size.lines:>7,} {size.tokens_per_line:>12.1f}"


def _add(sizes: list[Size]) -> Size:
    return Size(sum(s.lines for s in sizes), sum(s.tokens for s in sizes))


def main() -> None:
    """Prints files by group, the groups' sums, and the sum of the package."""
    groups: dict[str, dict[Path, Size]] = defaultdict(dict)
    for path in _files():
        groups[_group(path)][path] = measure((ROOT / path).read_text(encoding="utf-8"))
    print(f"{'file':<44} {'lines':>7} {'tokens/line':>12}")
    for name, files in sorted(groups.items()):
        print("\n" + _row(f"{name}/", _add(list(files.values()))))
        for path, size in files.items():
            print(_row(f"  {path.name if len(path.parts) < 4 else path}", size))
    package = [s for name, f in groups.items() if name.startswith("nanoengine") for s in f.values()]
    print("\n" + _row("the package nanoengine", _add(package)))


if __name__ == "__main__":
    main()
