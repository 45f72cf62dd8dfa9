"""numba's kernels on torch's threads: how many, and that they share one pool."""

from __future__ import annotations

import importlib.util
import os
import threading
import warnings

import numba
import torch

from nanoengine.kernels import BINDING

_TOLD = threading.local()
"""`workers`: what this thread has told numba."""


def share_threads_with_torch() -> None:
    """Runs numba's kernels on torch's OpenMP threads, as many as torch uses.

    Why: two pools of spinning threads fight for the cores. Perf: a linear layer and an attention
    kernel of 3.5 ms each, alternating, take 7.2 ms on one pool and 11.7 ms on two (2 Zen 3 cores).
    """
    # Without it numba picks another layer, and the warning below names that.
    if importlib.util.find_spec("numba.np.ufunc.omppool") is not None:
        numba.config.THREADING_LAYER = "omp"
    threads = torch.get_num_threads()
    call_on(num_workers())
    # Why: numba's start sets OpenMP's thread count, which is torch's too, to all cores.
    torch.set_num_threads(threads)
    if numba.threading_layer() != "omp":
        warnings.warn(
            f"numba runs on its threading layer {numba.threading_layer()!r} because 'omp' could not"
            " be used; attention and torch compete for the cores and both are slower",
            RuntimeWarning,
            stacklevel=2,
        )


def why_so_many() -> str:
    """What decides `num_workers`, for people."""
    if torch.get_num_threads() > numba.config.NUMBA_NUM_THREADS:
        return "NUMBA_NUM_THREADS, or as many as numba finds cores"
    if "OMP_NUM_THREADS" in os.environ:
        return f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if BINDING & os.environ.keys():  # and has left this thread one core of those it may use
        return "torch's choice; OpenMP binds each to its cores"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"torch's choice, of {allowed} cores that this process may use; OMP_NUM_THREADS sets it"


def num_workers() -> int:
    """Threads that a kernel may use: as many as torch uses."""
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


def call_on(workers: int) -> None:
    """The kernels that this thread calls from now on run on so many threads.

    Why for each thread: numba counts so, and an engine may be built in another one. Why noted here:
    within a step it takes numba 10 us to be told the same again. What others tell it is not seen.
    """
    if getattr(_TOLD, "workers", None) != workers:
        numba.set_num_threads(workers)
        _TOLD.workers = workers
