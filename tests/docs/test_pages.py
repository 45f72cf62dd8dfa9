"""Every code block of README and docs runs unchanged and prints what the page shows.

The kinds of blocks are described in `tests/support/pages.py`.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.suite import options
from nanoengine.attention import BACKENDS
from nanoengine.checkpoint.families import FAMILIES
from nanoengine.cli.main import COMMANDS, find_command, main, parse
from tests.support import pages
from tests.support.pages import ROOT, Block

NEEDS = "StructuredOutputs("
"""Marks scripts that need an optional package."""
GRAMMARS = [
    pytest.mark.extra,
    pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance"),
]


def params(blocks: list[Block]) -> list[object]:
    return [
        pytest.param(block, id=block.name, marks=GRAMMARS if NEEDS in block.text else ())
        for block in blocks
    ]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Creates an empty working directory. Afterwards, modules imported from it are unloaded, and
    entries that they added to the engine's tables are removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before, tables = set(sys.modules), [(table, dict(table)) for table in (FAMILIES, BACKENDS)]
    yield tmp_path
    for table, rows in tables:
        table.clear()
        table.update(rows)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write_files(page: str, scratch: Path) -> None:
    """Writes the files that a page shows; directories get an `__init__.py`."""
    for block in pages.of_kind("file"):
        if block.page == page:
            path = scratch / block.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            if path.parent != scratch:
                (path.parent / "__init__.py").touch()


SESSIONS = {block.page for block in pages.of_kind("session")}


@pytest.mark.parametrize("page", sorted(SESSIONS))
def test_sessions_of_a_page_print_what_it_shows(page: str, scratch: Path) -> None:
    write_files(page, scratch)
    parser = doctest.DocTestParser()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    names: dict[str, object] = {}
    failed = 0
    for block in pages.blocks_of(ROOT / page):
        if block.kind == "session":
            test = parser.get_doctest(block.text, names, page, page, block.line - 1)
            failed += runner.run(test, clear_globs=False).failed
            names = test.globs
    assert failed == 0, "below, each example that prints something else"


@pytest.mark.parametrize("quotation", params(pages.of_kind("quotation")))
def test_quotations_are_the_code(quotation: Block) -> None:
    assert quotation.text in (ROOT / quotation.path).read_text(encoding="utf-8")


def runnable(*kinds: pages.Kind) -> list[Block]:
    return [block for block in pages.of_kind(*kinds) if not block.why_not]


@pytest.mark.filterwarnings("ignore:no effect in nanoengine")
@pytest.mark.parametrize("script", params(runnable("script")))
def test_a_script_runs_and_prints_what_is_shown(
    script: Block, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(script.page, scratch)
    exec(compile(script.text, script.name, "exec"), {"__name__": "__main__"})
    printed, shown = capsys.readouterr().out, pages.output_after(script)
    if shown is not None:
        assert not pages.difference(shown, printed), pages.difference(shown, printed)
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(script.text)))
    assert asserts or len(printed.split()) > 8, "a script that shows nothing teaches nothing"


# --- commands -------------------------------------------------------------------------------------


@contextlib.contextmanager
def ends_well() -> Iterator[None]:
    """A program may end with SystemExit and status 0."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"status {end.code}") from end


def run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs `nanoengine ...`, `python -m ...` or `python script.py ...` in this process.

    Returns:
        What it prints.
    """
    program, *rest = arguments
    printed = io.StringIO()
    rest, target = (rest[: rest.index(">")], rest[-1]) if ">" in rest else (rest, None)
    assert target is None or "/" not in target, "a page's command may not write elsewhere"
    with contextlib.redirect_stdout(printed), ends_well():
        if program == "nanoengine":
            assert main(rest) == 0
        elif program == "python" and rest[0] == "-m":
            monkeypatch.setattr(sys, "argv", rest[1:])
            monkeypatch.delitem(sys.modules, rest[1], raising=False)
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        elif program == "python":
            monkeypatch.setattr(sys, "argv", rest)
            runpy.run_path(str(ROOT / rest[0]), run_name="__main__")
        else:
            raise AssertionError(f"no test knows how to run {program!r}: mark the block not run")
    if target is not None:
        Path(target).write_text(printed.getvalue(), encoding="utf-8")
        return ""
    return printed.getvalue()


WITH_COMMANDS = dict.fromkeys(block.page for block in runnable("console", "commands"))


@pytest.mark.guards(
    "README.md", "docs/*.md", "examples/*.py", "nanoengine/cli/*.py", "nanoengine/observe/*.py"
)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_a_page_run_and_print_what_it_shows(
    page: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, scratch)
    wrong = []
    for block in runnable("console", "commands"):
        if block.page == page:
            for arguments, shown in pages.commands_of(block):
                printed = run_command(arguments, monkeypatch)
                if block.kind == "console":
                    wrong += filter(None, [pages.difference(shown, printed)])
    assert not wrong, "\n".join(wrong)


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def why_wrong(arguments: list[str]) -> str:
    """Returns why a command could not run on any machine; "" if it could."""
    while arguments and re.match(r"\w+=", arguments[0]):
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("$"):
        return ""
    program, *rest = arguments[0].removeprefix(".venv/bin/"), *arguments[1:]
    if program == "make":
        unknown = [word for word in rest if "=" not in word and word not in targets()]
        return f"no target {unknown}" if unknown else ""
    if program == "pip":
        extras = re.findall(r"nanoengine\[(\w+)\]|\.\[([\w,]+)\]", " ".join(rest))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        wanted = {name for pair in extras for part in pair for name in part.split(",") if name}
        unknown = sorted(wanted - set(project["optional-dependencies"]))
        return f"no extra {unknown}" if unknown else ""
    if program == "python" and rest[0] == "-m":
        return "" if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
    if program == "python" and rest[0] != "bench.py":
        return "" if (ROOT / rest[0]).is_file() else f"no file {rest[0]}"
    complaints = io.StringIO()
    with contextlib.redirect_stderr(complaints), contextlib.suppress(SystemExit):
        if program == "python":
            options.parse(rest[1:])
        elif program != "nanoengine" or rest[0] not in COMMANDS:
            return f"no command {program} {rest[0]}"
        elif (options_class := find_command(rest[0])[1]) is not None and "..." not in rest:
            parse(options_class, "nanoengine", rest[1:])
    return complaints.getvalue()


def test_commands_that_are_not_run_could_be() -> None:
    blocks = [block for block in pages.of_kind("console", "commands") if block.why_not]
    wrong = {
        f"{block.name}: {' '.join(arguments)}": why
        for block in blocks
        for arguments, _ in pages.commands_of(block)
        if (why := why_wrong(arguments))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("make tests", "no target ['tests']"),
        ("pip install 'nanoengine[plots]'", "no extra ['plots']"),
        ("python benchmarks/none.py", "no file benchmarks/none.py"),
        ("nanoengine wonder", "no command nanoengine wonder"),
        ("nanoengine bench --smok", "--smok"),
        ("python bench.py --ablat", "--ablat"),
    ],
)
def test_a_command_that_is_not_there_is_noticed(line: str, why: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "unwritten.md"
    block = Block(page.name, 1, "commands", line + "\n")
    ((arguments, _),) = pages.commands_of(block)
    assert why in why_wrong(arguments)


# --- the parser of pages --------------------------------------------------------------------------


def test_no_page_shows_an_output_of_nothing() -> None:
    """An output without a command would be compared with nothing."""
    kinds = ("script", "session", "diff", "output")
    for page in pages.PAGES:
        blocks = pages.blocks_of(page)
        for before, block in zip([None, *blocks], blocks, strict=False):
            if block.kind == "output":
                assert before is not None, block.name
                assert before.kind in kinds, block.name


def test_each_mark_stands_above_its_block() -> None:
    marks = sum(page.read_text(encoding="utf-8").count("<!-- not") for page in pages.PAGES)
    assert sum(bool(block.why_not) for block in pages.of_kind(*pages.KINDS)) == marks > 5


def test_a_difference_is_noticed_and_what_varies_is_not() -> None:
    shown = "steps  3,915\nsimulated in  ... s\n"
    assert pages.difference(shown, "steps           3,915\nsimulated in    1.97 s\n") == ""
    assert pages.difference(shown, "steps           3,916\nsimulated in    1.97 s\n") != ""


# --- notebooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=str)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    """`make test-extras` runs the whole notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
