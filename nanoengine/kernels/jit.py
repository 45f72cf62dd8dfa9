"""compiled: numba's compiler with the options that all kernels share, and a cache that knows them.

numba keeps compiled code on disk and looks at the file of a function alone to tell whether it is
still good. A kernel that calls one of another file would keep that one's old code, so here the code
is good as long as no file of this room has changed. Where no cache can be written, kernels are
compiled at each start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache
from numba.extending import overload

from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.linking import Kernel, Part

log = logging.getLogger(__name__)


@cache
def stamp(room: Path) -> str:
    """A digest of all sources in a directory."""
    digest = hashlib.sha256()
    for path in sorted(room.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiled(
    *, fastmath: Collection[str], parallel: bool = False, part: bool = False
) -> Callable[..., Any]:
    """Compiles the function at its first call and keeps the code on disk, where that can be.

    What has an underscore before its name is called by compiled code only.

    Args:
        fastmath: LLVM's flags. None of ours has "nnan" or "ninf": a row with NaN or infinity must
            come out as NaN, there and only there.
        parallel: `prange` runs on all threads.
        part: written into each kernel that calls it, and compiled with that. For what is called
            in loops.
    """

    def decorate(function: Callable[..., Any]) -> Kernel | Part:
        options = {
            "nopython": True,
            "nogil": True,
            "boundscheck": None,
            "error_model": "numpy",
            "fastmath": set(fastmath),
            "parallel": parallel,
            "no_cfunc_wrapper": True,
            "no_cpython_wrapper": part or function.__qualname__.startswith("_"),
        }
        if part:
            return Part(function, options)
        kernel = Kernel(function, options)
        try:
            kernel._cache = KernelCache(function)
        except RuntimeError:  # Why: numba's way to say that it may write nowhere.
            _warn("no directory for them can be written")
        return kernel

    return decorate


def by_types(fastmath: Collection[str] = ()) -> Callable[..., Any]:
    """A function of compiled code whose text follows from the types of its arguments: the decorated
    one is called with these when a caller is compiled, and returns the function that is meant."""

    def decorate(choose: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(choose)
        def name(*arguments: Any) -> Any:
            raise TypeError(f"{choose.__name__} is for compiled code")

        overload(name, jit_options={"fastmath": set(fastmath)})(choose)
        return name

    return decorate


class KernelCache(FunctionCache):
    """numba's cache of one function, for which a damaged file and a full disk are no errors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file._source_stamp = stamp(Path(__file__).parent)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code for these types; None: it must be compiled."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:  # Why: a torn pickle raises nearly anything.
            self._forget()
            _warn(f"{self.cache_path} has damaged files ({error})")
            found = None
        if found is None:
            _tell(self.cache_path)
        return found

    def _index_key(self, *of_call: Any) -> tuple[Any, ...]:
        """Why with the instruction set: code for two of them is kept side by side."""
        return (*super()._index_key(*of_call), CURRENT.name)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps compiled code for the next start."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            self._forget()
            _warn(str(error))

    def _forget(self) -> None:
        """Why: an index without its new data would name the data of an older source."""
        with contextlib.suppress(OSError):
            Path(self._cache_file._index_path).unlink(missing_ok=True)


@functools.cache
def _tell(directory: str) -> None:
    """Once in a process that compiles anything: ten seconds of silence look like a hang."""
    log.warning(
        "compiling kernels for this CPU (%s): once, some ten seconds; the code is kept in %s",
        CURRENT.name,
        directory,
    )


@functools.cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    log.warning(
        "compiled kernels can't be read or kept: %s. They are compiled now, which takes some ten"
        " seconds at each start unless NUMBA_CACHE_DIR names a directory that you, and only you,"
        " can write",
        reason,
    )
