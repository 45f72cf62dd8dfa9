"""Compiled code on disk: a place that can't be written and a damaged file cost time, no more."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
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


def test_a_caller_on_the_disk_is_compiled_again_when_what_it_calls_is_another_function(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the process would end: the caller's code asks for a name that nobody has."""
    assert load(source).triple(14) == 42
    source.write_text(KERNEL.replace("2 * x", "x + x + x + x"), encoding="utf-8")
    other = load(source)
    assert other.triple(14) == 70
    assert sum(other.triple.stats.cache_hits.values()) == 0
    assert "is another function" in caplog.text


def test_a_kernel_s_code_is_there_once_whoever_calls_it(source: Path) -> None:
    """A copy in each caller took half of the time to compile."""
    module = load(source)
    assert module.triple(14) == 42
    (triple,), (double,) = (kernel.overloads.values() for kernel in (module.triple, module.double))
    name = double.fndesc.llvm_func_name
    assert name in {function.name for function in double.library.get_defined_functions()}
    assert name not in {function.name for function in triple.library.get_defined_functions()}


def test_only_compiled_code_calls_what_has_an_underscore(source: Path) -> None:
    """numba writes nothing for calls from Python then, and such a call would end the process."""
    source.write_text(KERNEL.replace("double", "_double"), encoding="utf-8")
    module = load(source)
    assert module.triple(14) == 42
    with pytest.raises(TypeError, match="_double is called by compiled code only"):
        module._double(14)


PARALLEL = """
import numpy as np
from nanoengine.kernels.jit import compiled, shared

@compiled(parallel=True, fastmath=())
def count(thread, turns, sizes):
    for i in shared(thread, len(turns)):
        turns[i] += np.ones(sizes[0]).sum() + sizes[1]

@compiled(fastmath=())
def twice(turns, sizes):
    count(turns, sizes)
    count(turns, sizes)
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_turns_of_a_loop(threads: int, tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(PARALLEL, encoding="utf-8")
    for number in (0, 1, 2, 7, 64):
        code = load(source)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        turns = np.zeros(number, np.int64)
        code.twice(turns, (2, 1))
        assert turns.tolist() == [6] * number
    assert sum(code.twice.stats.cache_hits.values()) == 1


def test_a_thread_without_memory_is_an_error_of_the_call(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(PARALLEL, encoding="utf-8")
    with pytest.raises(MemoryError):
        load(source).twice(np.zeros(4, np.int64), (1 << 60, 1))
