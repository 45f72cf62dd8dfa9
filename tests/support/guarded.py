"""Runs tests of rarely changed code only when that code has changed, and in `make test-all`.

    pytestmark = pytest.mark.guards("nanoengine/kernels/*.py")

A marked test is skipped while the guarded files and its own file are the ones with which it last
passed: tests/guarded.json has their digest. `--guarded only` runs all of these tests and no others,
and writes the digests of those that passed. A file named on the command line runs without this
check.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HINT = "run them with: make test-guarded"


def add_option(parser: pytest.Parser) -> None:
    """Called by `pytest_addoption` of a conftest."""
    parser.addoption(
        "--guarded",
        choices=("changed", "only", "all"),
        default="changed",
        help="changed: skip guarded tests whose files have not changed; only: run all guarded"
        " tests and no others, and record which passed; all: run all tests",
    )


def key_of(file: str, globs: Iterable[str]) -> str:
    """The name of a group: its test file, relative to the root, and the guarded files."""
    return " ".join([file, *sorted(set(globs) - {file})])


@functools.cache
def digest_of(root: Path, key: str) -> str:
    """The digest of a group's files, names and contents; raises if a glob finds no file."""
    digest = hashlib.sha256()
    paths: set[Path] = set()
    for glob in key.split(" "):
        found = [
            path for path in root.glob(glob) if path.is_file() and "__pycache__" not in path.parts
        ]
        if not found:
            raise pytest.UsageError(f"a guard matches no file: {glob!r} in {key!r}")
        paths.update(found)
    for path in sorted(paths):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]


def _is_long(item: pytest.Item) -> bool:
    """A soak test runs only on request, whatever it guards."""
    return item.get_closest_marker("soak") is not None


class Guarded:
    """The plugin: selects the tests to run, and in the controller process writes digests.

    Args:
        root: base of globs and of test file names.
        record: the file of digests.
    """

    def __init__(self, config: pytest.Config, root: Path, record: Path) -> None:
        self.mode: str = config.getoption("--guarded")
        self.root, self.record = root, record
        self.known: dict[str, str] = {}
        if record.exists():
            self.known = json.loads(record.read_text(encoding="utf-8"))
        self.is_worker = hasattr(config, "workerinput")
        self.named = {
            path.resolve()
            for path in (Path(arg.partition("::")[0]) for arg in config.args)
            if path.is_file()
        }
        self.num_deselected = 0
        is_named = config.args_source is pytest.Config.ArgsSource.ARGS
        self.is_part = is_named or config.option.collectonly
        self.totals: dict[str, int] = {}
        self.done: Counter[str] = Counter()
        self.failed: set[str] = set()

    def key(self, item: pytest.Item) -> str | None:
        """The group of a test; None: it has no guard."""
        globs = [glob for mark in item.iter_markers("guards") for glob in mark.args]
        return key_of(item.path.relative_to(self.root).as_posix(), globs) if globs else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselects unneeded tests. Why first: a group is complete before -k selects a part."""
        keys = [self.key(item) for item in items]
        totals = Counter(
            key for key, item in zip(keys, items, strict=True) if key and not _is_long(item)
        )
        selected, deselected = [], []
        for item, key in zip(items, keys, strict=True):
            if key is not None:
                item.user_properties.append(("guards", [key, totals[key]]))
            (selected if self._runs(item, key) else deselected).append(item)
        if deselected:
            if self.mode == "changed":
                self.num_deselected = sum(not _is_long(item) for item in deselected)
            config.hook.pytest_deselected(items=deselected)
            items[:] = selected

    def _runs(self, item: pytest.Item, key: str | None) -> bool:
        if self.mode == "all" or (self.mode == "changed" and item.path in self.named):
            return True
        if self.mode == "only":
            return key is not None
        return key is None or self.known.get(key) != digest_of(self.root, key)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts passed and skipped tests per group; skipped ones cannot run on this machine."""
        for name, value in report.user_properties:
            if name != "guards":
                continue
            key, self.totals[key] = value[0], value[1]
            if report.failed:
                self.failed.add(key)
            elif report.skipped or report.when == "call":
                self.done[key] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A worker reports how many tests it deselected; the controller writes the digests."""
        if self.is_worker:
            output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
            output["num_deselected"] = self.num_deselected
        elif self.mode == "only" and not self.is_part and exitstatus in (0, 1):
            complete = [key for key, total in self.totals.items() if self.done[key] == total]
            passed = sorted(set(complete) - self.failed)
            text = json.dumps({key: digest_of(self.root, key) for key in passed}, indent=1)
            self.record.write_text(text + "\n", encoding="utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """The number that a pytest-xdist worker deselected; it is the same for all workers."""
        output = getattr(node, "workeroutput", {})
        self.num_deselected = max(self.num_deselected, output.get("num_deselected", 0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line about the tests that did not run."""
        if self.num_deselected:
            terminalreporter.line(
                f"{self.num_deselected} tests were deselected, because their guarded files have not"
                f" changed since they passed; {HINT}"
            )
