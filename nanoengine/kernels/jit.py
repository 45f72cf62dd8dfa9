"""compiled: numba's compiler with the options that all kernels share, and a cache for their code.

    the package's `built`  ─►  the user's directory  ─►  compile, and keep it there
    written at install         `places`                  at each start, if nothing can be written

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
from nanoengine.kernels.linking import Kernel, Part

log = logging.getLogger(__name__)

ROOM = Path(__file__).parent
BUILT = ROOM / "built"
VARIABLE = "NANOENGINE_CACHE"


@cache
def stamp(room: Path) -> bytes:
    """A digest of all sources in a directory."""
    digest = hashlib.sha256()
    for path in sorted(room.glob("*.py")):
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


def compiled(*, fastmath: Collection[str], part: bool = False) -> Callable[..., Any]:
    """Compiles the function at its first call and keeps the code on disk if possible.

    Functions whose name begins with an underscore are called only by compiled code.

    Args:
        fastmath: LLVM's flags. None of ours has "nnan" or "ninf": a row with NaN or infinity must
            come out as NaN, there and only there.
        part: linked into each kernel that calls it, and compiled with it. For functions that are
            called in loops.
    """

    def decorate(function: Callable[..., Any]) -> Kernel | Part:
        options = {
            "nopython": True,
            "nogil": True,
            "boundscheck": None,
            "error_model": "numpy",
            "fastmath": Flags(fastmath),
            "no_cfunc_wrapper": True,
            "no_cpython_wrapper": part or function.__qualname__.startswith("_"),
        }
        if part:
            return Part(function, options)
        kernel = Kernel(function, options)
        kernel._cache = KernelCache(function)
        return kernel

    return decorate


def specialize(fastmath: Collection[str] = ()) -> Callable[..., Any]:
    """A function of compiled code that is chosen by the types of its arguments. The decorated
    function is called with these types when a caller is compiled, and returns the function to
    use."""

    def decorate(choose: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(choose)
        def name(*arguments: Any) -> Any:
            raise TypeError(f"{choose.__name__} is for compiled code")

        overload(name, jit_options={"fastmath": set(fastmath)})(choose)
        return name

    return decorate


def places() -> list[Path]:
    """Directories in which code may be kept for this user, the best first."""
    if named := os.environ.get(VARIABLE):
        return [Path(named).absolute()]
    found = [Path(AppDirs("nanoengine", appauthor=False).user_cache_dir)]
    with contextlib.suppress(FileNotFoundError):  # no directory for temporary files can be written
        user = os.getuid() if hasattr(os, "getuid") else "user"
        found.append(Path(tempfile.gettempdir(), f"nanoengine-{user}"))
    return [place for place in found if place.is_absolute()]  # without a home it begins with "~"


def _is_safe(place: Path) -> bool:
    """Whether only this user can write there, or the user has named it: code in it will be
    executed."""
    if os.environ.get(VARIABLE) or not hasattr(os, "getuid"):
        return True
    try:
        found = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def place_to_keep() -> Path | None:
    """The first of `places` that can be written."""
    for place in places():
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        if _is_safe(place):
            return place
    return None


class KernelCache(FunctionCache):
    """The compiled code of one function: a file for each signature and compiler.

    A file begins with a digest of the sources and of its contents. A file that is damaged, or older
    than the sources, is compiled again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Does not call numba's own, which would look for a writable directory."""
        self._py_func = function
        self._room = Path(function.__code__.co_filename).parent
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    cache_path = property(lambda self: str(BUILT))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for these types; None if it must be compiled."""
        target_context.refresh()
        for path in self._where(self._file(sig, target_context)):
            try:
                digest, data = (content := path.read_bytes())[:32], content[32:]
            except OSError:
                continue
            if digest == _digest(data):
                try:
                    return CompileResult._rebuild(target_context, *pickle.loads(data))
                except LookupError:  # Why: a function that it calls has changed.
                    continue
        BURST.begin()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps compiled code for the next start."""
        BURST.end()
        place = place_to_keep()
        if place is None:
            return
        assert not data.library.has_dynamic_globals, f"{self._name} holds addresses"
        content = dumps(data._reduce())
        path = place / self._room_of_user() / self._file(sig, data.target_context)
        beside = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True)
            beside.write_bytes(_digest(content) + content)
            with self._guard_against_spurious_io_errors():
                beside.replace(path)  # Why: a reader finds all of it, or nothing.
        except OSError as error:
            with contextlib.suppress(OSError):
                beside.unlink()
            _warn(f"{error}; {VARIABLE} may name another directory")

    def _where(self, file: str) -> Iterator[Path]:
        """Paths at which a file may be, the best first."""
        yield BUILT / file
        own = self._room_of_user()
        yield from (place / own / file for place in places() if _is_safe(place))

    def _room_of_user(self) -> str:
        """Why by path: several versions of the package may be installed and used alternately."""
        return f"{self._room.name}-{hashlib.sha256(bytes(self._room)).hexdigest()[:16]}"

    def _file(self, sig: Any, target_context: Any) -> str:
        """The name of the file for a signature's code, as compiled by this process."""
        compiler = numba.__version__, sys.implementation.cache_tag, repr(CURRENT)
        key = (*self._index_key(sig, target_context.codegen()), *compiler)
        return f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.nbc"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(stamp(ROOM) + data).digest()


class Burst:
    """Logs a series of compiled kernels in two lines, because seconds of silence look like a
    hang."""

    QUIET = 1.0  # s without a compilation, after which the series ends

    def __init__(self) -> None:
        self._depth, self._kernels, self._seconds, self._began = 0, 0, 0.0, 0.0
        self._timer = threading.Timer(0, lambda: None)
        atexit.register(self._tell)

    def begin(self) -> None:
        """Called when the compilation of a kernel begins, perhaps inside another one."""
        self._timer.cancel()
        if self._depth == self._kernels == 0:
            if place := place_to_keep():
                where = f"once, and keeping them in {place}"
            else:
                tried = " or ".join(map(str, places())) or "any directory"
                where = f"at each start, as nothing can be written in {tried}: {VARIABLE}"
                where += " may name another directory"
            log.warning("compiling kernels for %s, %s", CURRENT.name, where)
        if self._depth == 0:
            self._began = time.perf_counter()
        self._depth += 1

    def end(self) -> None:
        """Called when the kernel is compiled."""
        self._depth -= 1
        self._kernels += 1
        if self._depth == 0:
            self._seconds += time.perf_counter() - self._began
            self._timer = threading.Timer(self.QUIET, self._tell)
            self._timer.daemon = True
            self._timer.start()

    def _tell(self) -> None:
        self._timer.cancel()
        kernels, seconds = self._kernels, self._seconds
        self._kernels, self._seconds = 0, 0.0
        if kernels:
            log.warning("compiled %d kernels in %.1f s", kernels, seconds)


BURST = Burst()


@functools.cache
def _warn(reason: str) -> None:
    """Warns once for each reason."""
    log.warning("compiled kernels can't be kept: %s", reason)
