"""Compiled code on disk: a place that can't be written and a damaged file cost time, no more."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nanoengine.kernels.isa import CURRENT

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
from nanoengine.kernels.jit import compiled

@compiled(fastmath=())
def double(x):
    return 2 * x

@compiled(fastmath=())
def triple(x):
    return double(x) + x
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL, encoding="utf-8")
    return path


def load(source: Path) -> ModuleType:
    """The module anew, as another process has it."""
    spec = importlib.util.spec_from_file_location("kernel", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_place_for_compiled_code_kernels_compile_and_say_what_helps(source: Path) -> None:
    (source.parent / "__pycache__").write_text("in the way")  # holds for root too
    code = "import kernel; print(kernel.triple(14), kernel.double(4))"
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"), "/dev/null/none")
    for unset in (set(), {"NUMBA_CACHE_DIR"}):
        env = {k: v for k, v in {**os.environ, **nowhere}.items() if k not in unset}
        done = subprocess.run(
            [sys.executable, "-B", "-c", code],
            env={**env, "PYTHONPATH": f"{ROOT}:{source.parent}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "42 8\n", done.stderr
        assert done.stderr.count("NUMBA_CACHE_DIR") == 1, done.stderr


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("left", [0, 10, -3])
def test_a_torn_file_of_compiled_code_is_compiled_again(
    suffix: str, left: int, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(source).triple(14) == 42
    assert "damaged" not in caplog.text
    caplog.clear()
    files = sorted((source.parent / "__pycache__").glob(f"*{suffix}"))
    assert len(files) == 2
    for file in files:
        file.write_bytes(file.read_bytes()[:left])
    again = load(source)
    assert again.triple(14) == 42
    assert sum(again.triple.stats.cache_hits.values()) == 0
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * len(caplog.records)
    assert "damaged" in caplog.text
    caplog.clear()
    third = load(source)
    assert third.triple(14) == 42
    assert sum(third.triple.stats.cache_hits.values()) == 1, "what was compiled again is kept"
    assert caplog.records == []


def test_a_disk_that_takes_no_compiled_code_is_a_warning(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(source)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(module.triple._cache._cache_file), "_save_data", full)
    assert module.triple(14) == 42
    assert "No space left" in caplog.text and "NUMBA_CACHE_DIR" in caplog.text


def test_a_process_that_compiles_says_so_once_and_one_that_finds_the_code_is_silent(
    source: Path,
) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{source.parent}"}
    env["NUMBA_CACHE_DIR"] = str(source.parent / "cache")

    def stderr_of(code: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert stderr_of("import kernel") == ""
    first = stderr_of("import kernel; kernel.triple(14); kernel.double(4)")
    assert first.splitlines() == [first.strip()], first
    assert f"compiling kernels for this CPU ({CURRENT.name}): once" in first
    assert env["NUMBA_CACHE_DIR"] in first
    assert stderr_of("import kernel; kernel.triple(14); kernel.double(4)") == ""
    assert "compiling" in stderr_of("import kernel; kernel.double(1.5)")  # other types
