"""Checks the language of docs, docstrings, comments and messages: python tools/prose.py [WORD]

CONTRIBUTING.md, "Language", says why. Counts words that are usually a sign of private jargon, per
1,000 words of prose, in the package, the docs and the tests; exits 1 if a limit is exceeded. With a
word of the table it prints the lines that have it instead. Code in backticks is not counted.
"""

from __future__ import annotations

import io
import math
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

UNITS = "tokens?|bytes?|bits?|blocks?|scales?|calls?|rows?|us|ms"
PER = "token|layer|block|step|group|row|head|sequence|second|weight|request|output|input|call"
WORDS = {
    "behind": r"behind",
    "told": r"told|tells",
    "obeyed": r"obey(?:s|ed)?",
    "turned": r"turn(?:s|ed|ing)?",
    "stands": r"stands?|stood",
    "who": r"whoever|nobody|somebody|whom|who (?:runs|waits|calls|takes|asks|has|is|may|wants)",
    "of which": r"of which|that of|those of",
    "whole number": r"whole numbers?",
    "room": r"rooms?|doors?|wings?",
    "taken apart": r"taken apart|calls? of functions?",
    "beside": r"besides?",
    "by name": r"by name",
    "a token": rf"(?:{UNITS}) an? (?:{PER})",
}
"""Entry -> pattern. Most of these words have an English use too, so the limits are not 0."""

LIMITS = {"package": 0.5, "docs": 0.3, "tests": 0.5}
"""Matches per 1,000 words. These limits may only decrease."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of prose of a file with their numbers: in Python, comments, and strings of several
    words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"(?ms)^```.*?^```", lambda block: "\n" * block[0].count("\n"), text)
        yield from enumerate(text.split("\n"), 1)
        return
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type in strings and " " in token.string):
            yield from enumerate(token.string.split("\n"), token.start[0])


def group_of(path: Path) -> str:
    if path.suffix == ".md":
        return "docs"
    return "tests" if path.parts[0] == "tests" else "package"


def main() -> None:
    listed = sys.argv[1] if len(sys.argv) > 1 else None
    patterns = {word: re.compile(rf"\b(?:{text})\b", re.IGNORECASE) for word, text in WORDS.items()}
    if listed is not None and listed not in patterns:
        sys.exit(f"{listed!r} is not in the table; choose from {', '.join(patterns)}")
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    files += [path for group in ("nanoengine", "tests") for path in (ROOT / group).rglob("*.py")]
    found: dict[str, Counter[str]] = {group: Counter() for group in LIMITS}
    sizes: Counter[str] = Counter()
    for path in sorted(files):
        name = path.relative_to(ROOT)
        group = group_of(name)
        for number, line in prose(path):
            line = re.sub(r"`[^`]*`", "", line)
            sizes[group] += len(line.split())
            for word, pattern in patterns.items():
                matches = len(pattern.findall(line))
                found[group][word] += matches
                if matches and word == listed:
                    print(f"{name}:{number}: {line.strip()}")
    if listed is not None:
        return
    failed = []
    for group, limit in LIMITS.items():
        rate = 1000 * found[group].total() / sizes[group]
        most = ", ".join(f"{word} {count}" for word, count in found[group].most_common(4))
        print(f"{group}: {rate:.2f} per 1,000 words (at most {limit}); most often: {most}")
        if rate > limit:
            failed.append(f"{group}: {math.ceil((rate - limit) * sizes[group] / 1000)}")
    if failed:
        sys.exit(
            f"rewrite sentences ({', '.join(failed)}) in plain English: CONTRIBUTING.md, Language."
            " `python tools/prose.py 'a token'` lists the lines with this entry of the table"
        )


if __name__ == "__main__":
    main()
