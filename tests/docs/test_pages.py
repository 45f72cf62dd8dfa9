"""Every code block of README and docs runs unchanged and prints what the page shows.

The kinds of blocks are described in `tests/support/pages.py`.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
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
from nanoengine.errors import ConfigError
from tests.support import pages, stand_ins
from tests.support.pages import ROOT, Block


def params(blocks: list[Block]) -> list[object]:
    return [pytest.param(block, id=block.name) for block in blocks]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Creates an empty working directory. Afterwards, modules imported from it are unloaded, and
    entries that they added to the engine's tables are removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    old_modules, tables = set(sys.modules), [(table, dict(table)) for table in (FAMILIES, BACKENDS)]
    yield tmp_path
    for table, entries in tables:
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - old_modules:
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


PAGES_WITH_SESSIONS = {block.page for block in pages.of_kind("session")}


@pytest.mark.parametrize("page", sorted(PAGES_WITH_SESSIONS))
def test_sessions_print_the_output_that_the_page_shows(page: str, scratch: Path) -> None:
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
    assert failed == 0, "stdout has each example whose output differs"


@pytest.mark.parametrize("quotation", params(pages.of_kind("quotation")))
def test_quotations_equal_the_code(quotation: Block) -> None:
    assert quotation.text in (ROOT / quotation.path).read_text(encoding="utf-8")


def runnable(*kinds: pages.Kind) -> list[Block]:
    return [block for block in pages.of_kind(*kinds) if not block.why_not]


@pytest.mark.filterwarnings("ignore:no effect in nanoengine")
@pytest.mark.parametrize("script", params(runnable("script")))
def test_a_script_prints_the_output_that_the_page_shows(
    script: Block, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(script.page, scratch)
    exec(compile(script.text, script.name, "exec"), {"__name__": "__main__"})
    printed, shown = capsys.readouterr().out, pages.output_after(script)
    if shown is not None:
        assert not pages.difference(shown, printed), pages.difference(shown, printed)
    asserts = any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(script.text)))
    assert asserts or len(printed.split()) > 8, "a script must print or assert something"


# --- commands -------------------------------------------------------------------------------------


@contextlib.contextmanager
def exits_with_status_0() -> Iterator[None]:
    """Fails if a program exits with another status than 0."""
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise AssertionError(f"status {error.code}") from error


def run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs `nanoengine ...`, `python -m ...` or `python script.py ...` in this process.

    Returns:
        Its output; "" if it is redirected to a file.
    """
    program, *rest = (re.sub("^~", "home", argument) for argument in arguments)
    printed = io.StringIO()
    rest, target = (rest[: rest.index(">")], rest[-1]) if ">" in rest else (rest, None)
    stand_ins.write(rest, Path())
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert target is None or "/" not in target, "a command may write only to its working directory"
    with contextlib.redirect_stdout(printed), exits_with_status_0():
        if program == "nanoengine":
            assert main(rest) == 0
        elif program == "python" and rest[0] == "-m":
            monkeypatch.setattr(sys, "argv", rest[1:])
            monkeypatch.delitem(sys.modules, rest[1], raising=False)
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        elif program == "python":
            monkeypatch.setattr(sys, "argv", rest)
            monkeypatch.syspath_prepend((ROOT / rest[0]).parent)
            runpy.run_path(str(ROOT / rest[0]), run_name="__main__")
        else:
            raise AssertionError(f"{program!r} cannot be run in a test: mark the block as not run")
    if target is not None:
        Path(target).write_text(printed.getvalue(), encoding="utf-8")
        return ""
    return printed.getvalue()


PAGES_WITH_COMMANDS = dict.fromkeys(block.page for block in runnable("console", "commands"))


@pytest.mark.guards(
    "README.md", "docs/*.md", "examples/*.py", "benchmarks/*.py", "tests/support/stand_ins.py",
    "nanoengine/cli/*.py", "nanoengine/observe/*.py",
)  # fmt: skip
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS)
def test_commands_print_the_output_that_the_page_shows(
    page: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, scratch)
    differences = []
    for block in runnable("console", "commands"):
        if block.page == page:
            for arguments, shown in pages.commands_of(block):
                printed = run_command(arguments + block.options.split(), monkeypatch)
                if block.kind == "console":
                    differences += filter(None, [pages.difference(shown, printed)])
    assert not differences, "\n".join(differences)


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def command_error(arguments: list[str]) -> str:
    """Returns why a command is invalid on every machine; "" if it is valid."""
    while arguments and re.match(r"\w+=", arguments[0]):
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("$"):
        return ""
    program, *rest = arguments[0].removeprefix(".venv/bin/"), *arguments[1:]
    if program == "make":
        unknown = [word for word in rest if "=" not in word and word not in make_targets()]
        return f"no target {unknown}" if unknown else ""
    if program == "pip":
        extras = re.findall(r"nanoengine\[(\w+)\]|\.\[([\w,]+)\]", " ".join(rest))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        requested = {name for pair in extras for part in pair for name in part.split(",") if name}
        unknown = sorted(requested - set(project["optional-dependencies"]))
        return f"no extra {unknown}" if unknown else ""
    if program == "python" and rest[0] == "-m":
        return "" if importlib.util.find_spec(rest[1]) else f"no module {rest[1]}"
    if program == "python" and rest[0] != "bench.py":
        return "" if (ROOT / rest[0]).is_file() else f"no file {rest[0]}"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        if program == "python":
            options.parse(rest[1:])
        elif program != "nanoengine" or rest[0] not in COMMANDS:
            return f"no command {program} {rest[0]}"
        elif (options_class := find_command(rest[0])[1]) is not None and "..." not in rest:
            try:
                parse(options_class, "nanoengine", rest[1:])
            except ConfigError as error:
                return str(error)
    return errors.getvalue()


REASONS = re.compile(
    "installs|downloads data sets|measures for|is a placeholder|an exercise whose line is changed"
    "|needs (a GPU|other engines|Ray|a model with tools)"
)
"""Why a block can't run in a test: small files in the place of large ones would not help."""


def test_only_what_no_test_can_run_is_not_run() -> None:
    blocks = [block for block in pages.of_kind(*pages.KINDS) if block.why_not]
    wrong = [
        f"{block.name}: {block.why_not}"
        for block in blocks
        if not REASONS.search(block.why_not)
        or not all((ROOT / test).is_file() for test in re.findall(r"tests/\S+", block.why_not))
    ]
    assert not wrong, (
        "run these blocks, with small files (tests/support/stand_ins.py) or less work"
        " (`<!-- run with: OPTIONS -->`), or give one of REASONS and existing tests:\n"
        + "\n".join(wrong)
    )


def test_commands_that_are_not_run_are_valid() -> None:
    blocks = [block for block in pages.of_kind("console", "commands") if block.why_not]
    errors = {
        f"{block.name}: {' '.join(arguments)}": error
        for block in blocks
        for arguments, _ in pages.commands_of(block)
        if (error := command_error(arguments))
    }
    assert errors == {}


def test_commands_within_sentences_exist() -> None:
    known = {"nanoengine": set(COMMANDS), "make": make_targets()}
    found = [
        (page.name, program, name)
        for page in pages.PAGES
        for program, name in re.findall(r"`(nanoengine|make) ([\w-]+)", page.read_text("utf-8"))
    ]
    assert len(found) > 30
    assert [words for words in found if words[2] not in known[words[1]]] == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("make tests", "no target ['tests']"),
        ("pip install 'nanoengine[plots]'", "no extra ['plots']"),
        ("python benchmarks/none.py", "no file benchmarks/none.py"),
        ("nanoengine wonder", "no command nanoengine wonder"),
        ("nanoengine bench --smok", "--smok"),
        ("python bench.py --ablat", "--ablat"),
    ],
)
def test_an_invalid_command_is_reported(line: str, error: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "unwritten.md"
    block = Block(page.name, 1, "commands", line + "\n")
    ((arguments, _),) = pages.commands_of(block)
    assert error in command_error(arguments)


# --- the parser of pages --------------------------------------------------------------------------


def test_every_output_follows_a_command_or_a_script() -> None:
    """Other outputs would not be compared."""
    kinds = ("script", "session", "diff", "output")
    for page in pages.PAGES:
        blocks = pages.blocks_of(page)
        for previous, block in zip([None, *blocks], blocks, strict=False):
            if block.kind == "output":
                assert previous is not None, block.name
                assert previous.kind in kinds, block.name


def test_every_mark_is_directly_above_a_block() -> None:
    marks = [re.findall("<!-- (?:not )?run", page.read_text("utf-8")) for page in pages.PAGES]
    blocks = [block for block in pages.of_kind(*pages.KINDS) if block.why_not or block.options]
    assert len(blocks) == sum(map(len, marks)) > 5


def test_differences_are_reported_except_in_place_of_an_ellipsis() -> None:
    shown = "steps  3,915\nsimulated in  ... s\n"
    assert pages.difference(shown, "steps           3,915\nsimulated in    1.97 s\n") == ""
    assert pages.difference(shown, "steps           3,916\nsimulated in    1.97 s\n") != ""
