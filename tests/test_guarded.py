"""The plugins that skip guarded tests and end hanging tests; each test runs its own pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.guarded import ROOT

# Why: each run starts a process, which takes a second.
pytestmark = pytest.mark.guards("tests/support/guarded.py", "tests/support/limits.py")

CONFTEST = """
from pathlib import Path
from tests.support import guarded, limits

def pytest_addoption(parser):
    guarded.add_option(parser)

def pytest_configure(config):
    root = Path(__file__).parent
    config.pluginmanager.register(guarded.Guarded(config, root, root / "guarded.json"))
    config.pluginmanager.register(limits.Limits())
"""
TESTS = """
import pytest

@pytest.mark.guards("guarded/*.py")
@pytest.mark.parametrize("i", [0, 1])
def test_guarded(i):
    assert "bad" not in open("guarded/a.py").read()

@pytest.mark.guards("guarded/*.py")
@pytest.mark.soak
def test_soak():
    raise AssertionError

@pytest.mark.guards("guarded/b.py")
@pytest.mark.skip
def test_skipped():
    pass

def test_unguarded():
    pass
"""
INI = """
[pytest]
addopts = -q -m "not soak" -p no:cacheprovider
testpaths = .
markers =
    guards: as in this repository
    soak: as in this repository
"""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout"}


class Suite:
    """A small test suite with guards, and a method to run it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "guarded").mkdir()
        for name, text in {
            "conftest.py": CONFTEST,
            "test_it.py": TESTS,
            "pytest.ini": INI,
            "guarded/a.py": "good",
            "guarded/b.py": "",
        }.items():
            (directory / name).write_text(text)

    def run(self, *args: str) -> tuple[dict[str, int], str]:
        """Returns the count of tests per outcome (passed, failed, ...) and the output."""
        code = f"import sys, pytest; sys.path.insert(0, {str(ROOT)!r}); sys.exit(pytest.main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=self.directory, env=os.environ | ALONE, capture_output=True, text=True, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        found = re.findall(r"(\d+) (passed|failed|skipped|deselected)", output.splitlines()[-1])
        return {what: int(count) for count, what in found}, output

    def record(self) -> dict[str, str]:
        """Returns the recorded digests."""
        found: dict[str, str] = json.loads((self.directory / "guarded.json").read_text())
        return found


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_passed_test_runs_again_after_its_guarded_files_have_changed(suite, workers):
    assert suite.run(*workers)[0]["passed"] == 3  # no digest is recorded yet
    assert not (suite.directory / "guarded.json").exists()
    assert suite.run("--guarded", "only", *workers)[0]["passed"] == 2
    before = suite.record()
    assert list(before) == ["test_it.py guarded/*.py", "test_it.py guarded/b.py"]

    counts, output = suite.run(*workers)
    assert counts["passed"] == 1
    assert "3 tests were deselected" in output and "make test-guarded" in output
    assert suite.run("--guarded", "all", *workers)[0]["passed"] == 3
    assert suite.run("test_it.py", *workers)[0]["passed"] == 3  # named tests always run

    (suite.directory / "guarded" / "a.py").write_text("bad")
    counts, output = suite.run(*workers)
    assert (counts["passed"], counts["failed"]) == (1, 2) and "1 tests were deselected" in output
    suite.run("--guarded", "only", *workers)
    assert suite.record() == {key: before[key] for key in ["test_it.py guarded/b.py"]}


def test_running_a_part_records_nothing(suite):
    suite.run("--guarded", "only", "-k", "1")
    assert suite.record() == {}
    suite.run("--guarded", "only")
    full = suite.record()
    suite.run("--guarded", "only", "--collect-only")
    assert suite.record() == full
    (suite.directory / "guarded.json").unlink()
    suite.run("--guarded", "only", "test_it.py")
    assert full and not (suite.directory / "guarded.json").exists()


def test_new_files_and_the_test_file_change_the_digest(suite):
    suite.run("--guarded", "only")
    (suite.directory / "guarded" / "c.py").write_text("")
    assert suite.run()[0]["passed"] == 3
    suite.run("--guarded", "only")
    assert suite.run()[0]["passed"] == 1
    (suite.directory / "test_it.py").write_text(TESTS + "\n")
    assert suite.run()[0]["passed"] == 3


def test_a_guard_that_matches_no_file_is_an_error(suite):
    (suite.directory / "test_it.py").write_text(TESTS.replace("guarded/b.py", "guarded/z.py"))
    assert "a guard matches no file: 'guarded/z.py'" in suite.run()[1]


HANGS = """
import subprocess, sys, threading, time
import pytest

@pytest.mark.timeout(2)
def test_that_waits_for_a_process():
    code = "import time\\ndef deep_in_a_child(): time.sleep(600)\\ndeep_in_a_child()"
    threading.Thread(target=in_a_thread, daemon=True).start()
    subprocess.run([sys.executable, "-c", code], capture_output=True)

def in_a_thread():
    time.sleep(600)

def test_after_it():
    import psutil
    assert not psutil.Process().children()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGALRM: pytest-timeout ends tests itself")
def test_a_hanging_test_fails_and_shows_its_threads_and_processes(suite):
    (suite.directory / "test_it.py").write_text(HANGS)
    counts, output = suite.run()
    assert counts == {"passed": 1, "failed": 1}
    assert "test_that_waits_for_a_process took longer than 2 s" in output
    assert "in in_a_thread" in output and "in test_that_waits_for_a_process" in output
    assert "deep_in_a_child" in output.partition("process ")[2].replace("def deep_in_a_child", "")
