"""compiled: numba's compiler with the options that all kernels share, and a cache for their code.

    the package's `built`  ─►  the user's directory  ─►  compile, and keep the code there
    written at install         `cache_dirs`              at each start, if nothing can be written

numba's own cache only checks the file of a function to decide whether its code is valid, and keeps
code for one CPU. Here code is valid until a file of this directory changes, on every CPU with the
same instruction set. It can therefore be compiled while the package is installed (`aot.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import pickle
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.extending import overload
from numba.misc.appdirs import AppDirs

from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.linking import InlineFunction, Kernel

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent
BUILT = SOURCE_DIR / "built"
VARIABLE = "NANOENGINE_CACHE"


@cache
def source_digest(directory: Path) -> bytes:
    """A digest of all sources in a directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


class Flags(set[str]):
    """LLVM's flags in a fixed order. numba writes them into the name of a function's code. The
    order of a set differs from process to process, so one process would not find the code of
    another."""

    def __repr__(self) -> str:
        return str(sorted(self))

    def copy(self) -> Flags:
        return Flags(self)


def compiled(*, fastmath: Collection[str], inline: bool = False) -> Callable[..., Any]:
    """A decorator: compiles the function at its first call and keeps the code on disk if possible.

    Functions whose name begins with an underscore are called only by compiled code.

    Args:
        fastmath: LLVM's flags. None of ours has "nnan" or "ninf": a row with NaN or infinity must
            come out as NaN, there and only there.
        inline: the function is linked into each kernel that calls it, and compiled with it. For
            functions that are called in loops.
    """

    def decorate(function: Callable[..., Any]) -> Kernel | InlineFunction:
        options = {
            "nopython": True,
            "nogil": True,
            "boundscheck": None,
            "error_model": "numpy",
            "fastmath": Flags(fastmath),
            "no_cfunc_wrapper": True,
            "no_cpython_wrapper": inline or function.__qualname__.startswith("_"),
        }
        if inline:
            return InlineFunction(function, options)
        kernel = Kernel(function, options)
        kernel._cache = KernelCache(function)
        return kernel

    return decorate


def specialize(fastmath: Collection[str] = ()) -> Callable[..., Any]:
    """A decorator: the implementation of a function is chosen by the types of its arguments. The
    decorated function is called with these types when a caller is compiled, and returns the
    implementation."""

    def decorate(choose: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(choose)
        def stub(*arguments: Any) -> Any:
            raise TypeError(f"{choose.__name__} can only be called by compiled code")

        overload(stub, jit_options={"fastmath": set(fastmath)})(choose)
        return stub

    return decorate


def cache_dirs() -> list[Path]:
    """Directories in which code may be kept for this user, the best first."""
    if configured := os.environ.get(VARIABLE):
        return [Path(configured).absolute()]
    paths = [Path(AppDirs("nanoengine", appauthor=False).user_cache_dir)]
    with contextlib.suppress(FileNotFoundError):  # no directory for temporary files can be written
        user = os.getuid() if hasattr(os, "getuid") else "user"
        paths.append(Path(tempfile.gettempdir(), f"nanoengine-{user}"))
    return [path for path in paths if path.is_absolute()]  # without a home it begins with "~"


def _is_safe(directory: Path) -> bool:
    """Whether only this user can write there, or the user has configured it. Why: code in it will
    be executed."""
    if os.environ.get(VARIABLE) or not hasattr(os, "getuid"):
        return True
    try:
        info = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def writable_cache_dir() -> Path | None:
    """The first of `cache_dirs` that can be written."""
    for directory in cache_dirs():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError:
            continue
        if _is_safe(directory):
            return directory
    return None


class KernelCache(FunctionCache):
    """The compiled code of one function: a file for each signature and compiler.

    A file begins with a digest of the sources and of its contents. A file that is damaged, or older
    than the sources, is compiled again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Does not call numba's own, which would look for a writable directory."""
        self._py_func = function
        self._source_dir = Path(function.__code__.co_filename).parent
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    cache_path = property(lambda self: str(BUILT))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for these types; None if it must be compiled."""
        # Why not `refresh`: its imports take 0.2 s, and only the compiler needs them.
        numba.core.runtime.rtsys.initialize(target_context)
        for path in self._paths(self._file(sig, target_context)):
            try:
                digest, data = (content := path.read_bytes())[:32], content[32:]
            except OSError:
                continue
            if digest == _digest(data):
                try:
                    return CompileResult._rebuild(target_context, *pickle.loads(data))
                except LookupError:  # Why: a function that it calls has changed.
                    continue
        COMPILE_LOG.begin()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps compiled code for the next start."""
        COMPILE_LOG.end()
        directory = writable_cache_dir()
        if directory is None:
            return
        assert not data.library.has_dynamic_globals, f"{self._name} contains addresses"
        content = dumps(data._reduce())
        path = directory / self._user_subdir() / self._file(sig, data.target_context)
        temporary = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(_digest(content) + content)
            with self._guard_against_spurious_io_errors():
                temporary.replace(path)  # Why: a reader finds all of it, or nothing.
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            _warn(str(error))

    def _paths(self, file: str) -> Iterator[Path]:
        """Paths at which a file may be, the best first."""
        yield BUILT / file
        subdir = self._user_subdir()
        yield from (directory / subdir / file for directory in cache_dirs() if _is_safe(directory))

    def _user_subdir(self) -> str:
        """Why by path: several versions of the package may be installed and used alternately."""
        return f"{self._source_dir.name}-{hashlib.sha256(bytes(self._source_dir)).hexdigest()[:16]}"

    def _file(self, sig: Any, target_context: Any) -> str:
        """The name of the file for a signature's code, as compiled by this process."""
        compiler = numba.__version__, sys.implementation.cache_tag, repr(CURRENT)
        key = (*self._index_key(sig, target_context.codegen()), *compiler)
        return f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.nbc"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(source_digest(SOURCE_DIR) + data).digest()


class CompileLog:
    """Logs a series of compiled kernels in two lines, because seconds of silence look like a
    hang."""

    QUIET = 1.0  # seconds without a compilation, after which the series ends

    def __init__(self) -> None:
        self._depth, self._kernels, self._seconds, self._start = 0, 0, 0.0, 0.0
        self._timer = threading.Timer(0, lambda: None)
        atexit.register(self._log_total)

    def begin(self) -> None:
        """Called when the compilation of a kernel begins, perhaps inside another one."""
        self._timer.cancel()
        if self._depth == self._kernels == 0:
            if directory := writable_cache_dir():
                detail = f"once: the code is cached in {directory}"
            else:
                tried = " or ".join(map(str, cache_dirs())) or "any directory"
                detail = f"at each start: cannot write to {tried}; set {VARIABLE} to another one"
            log.warning("compiling kernels for %s, %s", CURRENT.name, detail)
        if self._depth == 0:
            self._start = time.perf_counter()
        self._depth += 1

    def end(self) -> None:
        """Called when the kernel is compiled."""
        self._depth -= 1
        self._kernels += 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._start
            self._timer = threading.Timer(self.QUIET, self._log_total)
            self._timer.daemon = True
            self._timer.start()

    def _log_total(self) -> None:
        self._timer.cancel()
        kernels, seconds = self._kernels, self._seconds
        self._kernels, self._seconds = 0, 0.0
        if kernels:
            log.warning("compiled %d kernels in %.1f s", kernels, seconds)


COMPILE_LOG = CompileLog()


@functools.cache
def _warn(reason: str) -> None:
    """Warns once for each reason."""
    log.warning("cannot cache compiled kernels: %s; set %s to another directory", reason, VARIABLE)
