"""Compiled code on disk: a place that can't be written and a damaged file cost time, no more."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
PARALLEL = """
from numba import prange

@compiled(parallel=True, fastmath=())
def triple_all(turns):
    for i in prange(len(turns)):
        turns[i] = triple(turns[i])
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


def cached(source: Path, suffix: str) -> list[Path]:
    return sorted((source.parent / "__pycache__").glob(f"*{suffix}"))


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
    files = cached(source, suffix)
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


def functions_in(kernel: Any) -> set[str]:
    """Names of the functions in the code of a kernel that was compiled for one signature."""
    (found,) = kernel.overloads.values()
    return {function.name for function in found.library.get_defined_functions()}


def test_a_kernel_s_code_is_there_once_whoever_calls_it(source: Path) -> None:
    """A copy in each caller took half of the time to compile."""
    module = load(source)
    assert module.triple(14) == 42
    (double,) = module.double.overloads.values()
    assert double.fndesc.llvm_func_name in functions_in(module.double)
    assert double.fndesc.llvm_func_name not in functions_in(module.triple)


def test_a_part_s_code_is_in_its_callers_and_nowhere_else(source: Path) -> None:
    """So it can become part of their loops, and is optimized once for each of them."""
    source.write_text(KERNEL.replace("(fastmath=())", "(fastmath=(), part=True)", 1))
    module = load(source)
    assert module.triple(14) == 42
    (double,) = module.double.overloads.values()
    assert double.library.get_pointer_to_function(double.fndesc.llvm_func_name) == 0
    assert [file.stem.split("-")[0] for file in cached(source, ".nbi")] == ["kernel.triple"]
    assert load(source).triple(14) == 42
    with pytest.raises(TypeError, match="double is a part of kernels"):
        module.double(14)


def test_only_compiled_code_calls_what_has_an_underscore(source: Path) -> None:
    """numba writes nothing for calls from Python then, and such a call would end the process."""
    source.write_text(KERNEL.replace("double", "_double"), encoding="utf-8")
    module = load(source)
    assert module.triple(14) == 42
    with pytest.raises(TypeError, match="_double is called by compiled code only"):
        module._double(14)


def test_a_kernel_in_a_loop_on_threads_is_called_by_its_name_too(source: Path) -> None:
    source.write_text(KERNEL + PARALLEL, encoding="utf-8")
    for _ in "cold", "from the disk":
        module = load(source)
        turns = np.arange(100)
        module.triple_all(turns)
        assert turns.tolist() == list(range(0, 300, 3))
    (triple,) = module.triple.overloads.values()
    assert triple.fndesc.llvm_func_name not in functions_in(module.triple_all)
    assert sum(module.triple_all.stats.cache_hits.values()) == 1


ARRAYS = """
import numpy as np
from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.jit import compiled

@compiled(fastmath=())
def both(rows, like):
    a, b = empty((rows, 3), like.dtype), zeros((rows,), np.int64)
    a[:] = rows
    return a, b, zeros(like.shape, np.bool_)
"""


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_new_arrays_are_numpy_s(dtype: type, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(ARRAYS, encoding="utf-8")
    a, b, c = load(tmp_path / "kernel.py").both(5, np.ones((2, 4, 6), dtype))
    for made, wanted in (
        (a, np.full((5, 3), 5, dtype)),
        (b, np.zeros(5, np.int64)),
        (c, np.zeros((2, 4, 6), np.bool_)),
    ):
        assert made.dtype == wanted.dtype and made.flags.c_contiguous
        np.testing.assert_array_equal(made, wanted)
