"""Compiled code on disk: the cache directory and its permissions.

A read-only directory or a damaged file costs time and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nanoengine.kernels import jit
from nanoengine.kernels.isa import CURRENT

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/*.py",
    "nanoengine/kernels/aot.txt",
    "setup.py",
    "tools/aot.py",
)

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
SPECIALIZED = """
from nanoengine.kernels.jit import specialize, compiled

@specialize()
def twice(x):
    from other_kernel import double

    return lambda x: double(x)

@compiled(fastmath=())
def triple(x):
    return twice(x) + x
"""
PARALLEL = """
from nanoengine.kernels.pool import parallel_for

@compiled(fastmath=())
def triple_some(values, lo, hi):
    for i in range(lo, hi):
        values[i] = triple(values[i])

@compiled(fastmath=())
def triple_all(values):
    parallel_for(triple_some, len(values), 2, (values,))
"""


USE = "import kernel; print(kernel.triple(14), kernel.double(4))"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOENGINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL, encoding="utf-8")
    return path


def load(source: Path) -> ModuleType:
    """Imports the module again, as another process would."""
    spec = importlib.util.spec_from_file_location("kernel", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cached(source: Path) -> list[Path]:
    return sorted((source.parent / "cache").glob("*/*"))


def hits(kernel: Any) -> int:
    return sum(kernel.stats.cache_hits.values())


def start(source: Path, code: str = USE, **variables: str) -> subprocess.Popen[str]:
    """Starts another process that runs the code; an empty string unsets a variable."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{source.parent}", **variables}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", code],
        env={name: value for name, value in env.items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def messages(process: subprocess.Popen[str], printed: str = "42 8\n") -> list[str]:
    """The lines on stderr of a process that succeeded."""
    out, err = process.communicate()
    assert (process.returncode, out) == (0, printed), err
    return err.splitlines()


def test_a_process_reports_compilation_and_is_silent_if_it_finds_the_code(
    source: Path,
) -> None:
    place = os.environ["NANOENGINE_CACHE"]
    assert messages(start(source, "import kernel"), "") == []
    before, after = messages(start(source))
    assert before == f"compiling kernels for {CURRENT.name}, once: the code is cached in {place}"
    assert re.fullmatch(r"compiled 2 kernels in \d+\.\d s", after)
    assert messages(start(source)) == []
    imports = USE + "; import sys; print('numba.np.linalg' in sys.modules)"
    assert messages(start(source, imports), "42 8\nFalse\n") == [], "no module of the compiler"
    other_types = "import kernel; print(kernel.double(1.5))"
    assert "compiled 1 kernels" in messages(start(source, other_types), "3.0\n")[1]


def test_two_processes_that_start_at_once_fill_the_cache_for_a_third(source: Path) -> None:
    for process in [start(source) for _ in range(2)]:
        messages(process)
    assert messages(start(source)) == []
    assert {path.suffix for path in cached(source)} == {".nbc"}, "a temporary file is left"


def test_a_process_finds_code_to_which_cached_code_refers(source: Path) -> None:
    """The file name contains LLVM's flags, and the iteration order of a set differs per process."""
    source.write_text(KERNEL.replace("=()", "=('contract', 'nsz', 'reassoc')"), encoding="utf-8")
    messages(start(source, "import kernel; kernel.triple(14)", PYTHONHASHSEED="1"), "")
    (triple,) = (path for path in cached(source) if "triple" in path.name)
    triple_of_1 = triple.read_bytes()
    for path in cached(source):
        path.unlink()
    messages(start(source, "import kernel; kernel.double(14)", PYTHONHASHSEED="2"), "")
    triple.write_bytes(triple_of_1)
    assert messages(start(source)) == []


def test_a_process_loads_kernels_that_another_process_has_specialized(source: Path) -> None:
    """The second process never imports the module of the implementation, which is chosen at compile
    time."""
    source.with_name("other_kernel.py").write_text(KERNEL, encoding="utf-8")
    source.write_text(SPECIALIZED, encoding="utf-8")
    code = "import kernel; print(kernel.triple(14))"
    assert "compiled 2 kernels" in messages(start(source, code), "42\n")[1]
    assert messages(start(source, code), "42\n") == []


def test_without_a_home_the_cache_is_a_directory_that_only_the_user_can_write(source: Path) -> None:
    nowhere = {"HOME": "/dev/null/none", "XDG_CACHE_HOME": "", "NANOENGINE_CACHE": ""}
    nowhere["TMPDIR"] = str(source.parent)
    place = source.parent / f"nanoengine-{os.getuid()}"
    assert f"once: the code is cached in {place}" in messages(start(source, **nowhere))[0]
    assert place.stat().st_mode & 0o777 == 0o700
    assert messages(start(source, **nowhere)) == []
    place.chmod(0o777)
    before, _ = messages(start(source, **nowhere))
    assert "at each start" in before and str(place) in before and "NANOENGINE_CACHE" in before
    place.rename(source.parent / "real")
    place.symlink_to(source.parent / "real")
    (source.parent / "real").chmod(0o700)
    assert "at each start" in messages(start(source, **nowhere))[0]


def test_a_configured_cache_directory_that_cannot_be_written_is_reported(source: Path) -> None:
    before, _ = messages(start(source, NANOENGINE_CACHE="/dev/null/none"))
    assert "at each start: cannot write to /dev/null/none; set NANOENGINE_CACHE" in before


@pytest.mark.parametrize("left", [0, 10, -3])
def test_a_truncated_cache_file_is_compiled_again(left: int, source: Path) -> None:
    assert load(source).triple(14) == 42
    assert len(cached(source)) == 2
    for file in cached(source):
        file.write_bytes(file.read_bytes()[:left])
    again = load(source)
    assert again.triple(14) == 42
    assert hits(again.triple) == 0
    third = load(source)
    assert third.triple(14) == 42
    assert hits(third.triple) == 1, "the code compiled again is cached"


def test_code_of_older_sources_is_compiled_again(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source).triple(14)
    with monkeypatch.context() as edited:
        edited.setattr(jit, "source_digest", lambda _: b"another")
        module = load(source)
        assert module.triple(14) == 42 and hits(module.triple) == 0
    assert len(cached(source)) == 2, "the new code replaces the older code"


def test_a_failed_write_to_the_cache_is_a_warning(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert load(source).triple(14) == 42
    assert "No space left" in caplog.text and "NANOENGINE_CACHE" in caplog.text


def test_code_compiled_at_install_is_used_and_not_modified(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source).triple(14)
    (directory,) = (source.parent / "cache").iterdir()
    built = {path.name: path.stat() for path in directory.iterdir()}
    monkeypatch.setattr(jit, "BUILT", directory.rename(source.parent / "built"))
    monkeypatch.setenv("NANOENGINE_CACHE", "/dev/null/none")
    module = load(source)
    assert module.triple(14) == 42 and module.triple(1.5) == 4.5
    assert hits(module.triple) == 1, "other types are compiled"
    files = {path.name: path.stat() for path in jit.BUILT.iterdir()}
    assert files.keys() == built.keys()
    assert all(files[name].st_mtime_ns == was.st_mtime_ns for name, was in built.items())


def test_the_table_of_kernels_compiled_at_install_is_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.aot", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_an_install_reports_kernels_that_do_not_compile(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NANOENGINE_ISAS": "sse9"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING: kernels could not be compiled" in done.stdout
    assert (tmp_path / "nanoengine" / "kernels" / "jit.py").exists()


def test_a_cached_caller_is_compiled_again_if_its_callee_has_changed(
    source: Path,
) -> None:
    """Otherwise the process would abort: the caller's code refers to a missing symbol."""
    assert load(source).triple(14) == 42
    source.write_text(KERNEL.replace("2 * x", "x + x + x + x"), encoding="utf-8")
    other = load(source)
    assert other.triple(14) == 70
    assert hits(other.triple) == 0


def functions_in(kernel: Any) -> set[str]:
    """The names of all functions in a kernel that was compiled for one signature."""
    (found,) = kernel.overloads.values()
    return {function.name for function in found.library.get_defined_functions()}


def test_a_kernel_is_not_copied_into_its_callers(source: Path) -> None:
    """A copy in each caller took half of the compile time."""
    module = load(source)
    assert module.triple(14) == 42
    (double,) = module.double.overloads.values()
    assert double.fndesc.llvm_func_name in functions_in(module.double)
    assert double.fndesc.llvm_func_name not in functions_in(module.triple)


def test_the_code_of_an_inline_function_exists_only_in_its_callers(source: Path) -> None:
    """It can then be inlined into its callers' loops and is optimized for each caller."""
    source.write_text(KERNEL.replace("(fastmath=())", "(fastmath=(), inline=True)", 1))
    module = load(source)
    assert module.triple(14) == 42
    (double,) = module.double.overloads.values()
    assert double.library.get_pointer_to_function(double.fndesc.llvm_func_name) == 0
    assert [file.stem.split("-")[0] for file in cached(source)] == ["kernel.triple"]
    assert load(source).triple(14) == 42
    with pytest.raises(TypeError, match="double is inline: only kernels"):
        module.double(14)


def test_only_compiled_code_can_call_names_with_an_underscore(source: Path) -> None:
    """numba generates no Python wrapper for such a function, so a Python call would crash."""
    source.write_text(KERNEL.replace("double", "_double"), encoding="utf-8")
    module = load(source)
    assert module.triple(14) == 42
    with pytest.raises(TypeError, match="_double can only be called by compiled code"):
        module._double(14)


def test_a_kernel_is_not_copied_into_a_parallel_caller(source: Path) -> None:
    source.write_text(KERNEL + PARALLEL, encoding="utf-8")
    for _ in "cold", "from the disk":
        module = load(source)
        values = np.arange(100)
        module.triple_all(values)
        assert values.tolist() == list(range(0, 300, 3))
    (triple,) = module.triple.overloads.values()
    assert triple.fndesc.llvm_func_name not in functions_in(module.triple_all)
    assert hits(module.triple_all) == 1


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
def test_new_arrays_equal_those_of_numpy(dtype: type, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(ARRAYS, encoding="utf-8")
    a, b, c = load(tmp_path / "kernel.py").both(5, np.ones((2, 4, 6), dtype))
    for array, expected in (
        (a, np.full((5, 3), 5, dtype)),
        (b, np.zeros(5, np.int64)),
        (c, np.zeros((2, 4, 6), np.bool_)),
    ):
        assert array.dtype == expected.dtype and array.flags.c_contiguous
        np.testing.assert_array_equal(array, expected)
