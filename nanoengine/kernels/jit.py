"""compiled: numba's njit with the options that all kernels share, and a cache that knows them all.

numba keeps compiled code on disk and looks at the file of a function alone to tell whether it is
still good. A kernel that calls one of another file would keep that one's old code, so here the code
is good as long as no file of this room has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit

from nanoengine.kernels.isa import CURRENT


@cache
def stamp(room: Path) -> str:
    """A digest of all sources in a directory."""
    digest = hashlib.sha256()
    for path in sorted(room.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def compiled(*, fastmath: Collection[str], parallel: bool = False) -> Callable[..., Any]:
    """Compiles the function at its first call and keeps the code on disk.

    Args:
        fastmath: LLVM's flags. None of ours has "nnan" or "ninf": a row with NaN or infinity must
            come out as NaN, there and only there.
        parallel: `prange` runs on all threads.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = njit(
            function,
            cache=True,
            nogil=True,
            error_model="numpy",
            fastmath=set(fastmath),
            parallel=parallel,
        )
        kernel._cache._cache_file._source_stamp = stamp(Path(__file__).parent)
        # Why the key, not the stamp: code for two instruction sets is kept side by side.
        key = kernel._cache._index_key
        kernel._cache._index_key = lambda *of_call: (*key(*of_call), CURRENT.name)
        return kernel

    return decorate
