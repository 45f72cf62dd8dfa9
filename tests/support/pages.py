"""The code blocks of README and docs: their kinds, and how they are tested.

| a block | is | and the test |
|---|---|---|
| ```` ```python ```` of `>>>` lines | a session; a page's sessions share names | runs, compares |
| ```` ```python ```` under `# nanoengine/...` | a quotation | finds it in that file |
| ```` ```python ```` under `# other/path.py` | a file of a user's package | writes it |
| ```` ```python ```` | a script | runs it, with the files of its page in the same folder |
| ```` ```text ```` right after a script | its output | compares |
| ```` ```console ```` | `$ ` commands and their output | runs and compares |
| indented | commands, one per line | runs them |
| ```` ```diff ```` | a line to break, in the tour | `tests/test_tour.py` |
| ```` ``` ```` | a drawing | |

In compared text, `...` matches anything. Files and models that a command names and no page writes
are small ones from `tests/support/stand_ins.py`.

A block below `<!-- run with: OPTIONS -->` is run with these further options, for less work. A block
below `<!-- not run: reason -->` is not run, but the programs, options and files of its commands
must exist.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Literal, NamedTuple, get_args

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])

Kind = Literal[
    "session", "quotation", "file", "script", "output", "console", "commands", "diff", "drawing"
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Block(NamedTuple):
    """A code block of a page.

    Attributes:
        line: the first line of its text, counted from 1.
        path: the file of a quotation, or the file to write; the text then excludes this line.
        why_not: the reason why it is not run; "" if it is run.
        options: further options with which its commands are run.
    """

    page: str
    line: int
    kind: Kind
    text: str
    path: str = ""
    why_not: str = ""
    options: str = ""

    @property
    def name(self) -> str:
        """The id of a test."""
        return f"{self.page}:{self.line}"


FENCE = r"^```(?P<word>\w*)\n(?P<fenced>.*?)^```$"
INDENTED = r"(?:(?<=\n\n)|(?<=-->\n))(?P<indented>(?:    [^\n]*\n|\n(?=    ))+)"
BLOCK = re.compile(f"{FENCE}|{INDENTED}", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?:not run: (?P<why_not>[^>]+?)|run with: (?P<options>[^>]+?)) -->\s*$")
PATH = re.compile(r"# ([\w/.-]+\.(?:py|toml))\n")
WORDS: dict[str, Kind] = {
    "": "drawing",
    "text": "output",
    "console": "console",
    "diff": "diff",
}


def blocks_of(page: Path) -> list[Block]:
    """Returns all code blocks of a page, in order.

    Raises:
        AssertionError: a fence has an unknown word.
    """
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        mark = MARK.search(text[: match.start()])
        marks = {} if mark is None else mark.groupdict(default="")
        line = text[: match.start()].count("\n") + 1
        kind, body, path = _read(match)
        name = str(page.relative_to(ROOT))
        line += match["indented"] is None
        found.append(Block(name, line, kind, body, path, **marks))
    return found


def _read(match: re.Match[str]) -> tuple[Kind, str, str]:
    """Returns kind, text and path of a block."""
    if match["indented"] is not None:
        return "commands", re.sub(r"^    ", "", match["indented"], flags=re.MULTILINE), ""
    word, text = match["word"], match["fenced"]
    if word in WORDS:
        return WORDS[word], text, ""
    assert word in ("python", "toml"), f"```{word} is not supported: see tests/support/pages.py"
    path = PATH.match(text)
    if path is not None:
        kind: Kind = "quotation" if path[1].startswith("nanoengine/") else "file"
        return kind, text[path.end() :], path[1]
    return ("session" if text.startswith(">>> ") else "script"), text, ""


def of_kind(*kinds: Kind) -> list[Block]:
    """Returns the blocks of these kinds on all pages."""
    return [block for page in PAGES for block in blocks_of(page) if block.kind in kinds]


def output_after(block: Block) -> str | None:
    """Returns the output that a page shows for a script: the next block, if it is `text`."""
    blocks = blocks_of(ROOT / block.page)
    at = blocks.index(block) + 1
    return blocks[at].text if at < len(blocks) and blocks[at].kind == "output" else None


def difference(shown: str, printed: str) -> str:
    """Returns the difference between an output on a page and the real output, "" if there is none.

    `...` matches anything, and a line break matches a space."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    checker, example = doctest.OutputChecker(), doctest.Example("", shown)
    # Why: doctest treats a line of `...` as a continuation only in the source.
    if checker.check_output(shown, printed, flags):
        return ""
    return checker.output_difference(example, printed, flags)


class Command(NamedTuple):
    """A command of a page, and its shown output."""

    arguments: list[str]
    shown: str


def commands_of(block: Block) -> list[Command]:
    """Returns the commands of a console or an indented block; comments and `\\` are parsed as in a
    shell."""
    text = block.text.replace("\\\n", " ")
    if block.kind == "commands":
        lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
        return [Command(shlex.split(line, comments=True), "") for line in lines]
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert parts[0] == "", f"{block.name}: a console must begin with `$ `"
    found = []
    for part in parts[1:]:
        line, _, shown = part.partition("\n")
        found.append(Command(shlex.split(line, comments=True), shown))
    return found
