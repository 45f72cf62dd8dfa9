"""The threads that run pieces of kernels (`pool.py`), as many as torch uses."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time

import torch
from numba import types

from nanoengine.kernels import pool
from nanoengine.settings.cores import BINDING, affinity, allowed_cores, cpu_quota

SPIN_SECONDS = 200e-6  # for which a thread spins before it sleeps
YIELD_SECONDS = 3e-3  # of sleep to free a core; Perf: the best of 1, 3 and 8 ms
SPIN_SAMPLE = 2000  # spins to measure their speed, 30 us or so

_awake = threading.Event()
_threads: list[threading.Thread] = []


def num_workers() -> int:
    """Number of threads that a kernel may use, the same as torch's. Wakes sleeping threads."""
    workers = min(torch.get_num_threads(), pool.MAX_WORKERS)
    if len(_threads) < workers - 1:
        start_workers()
    if not _awake.is_set():
        _awake.set()
    return workers


def start_workers() -> None:
    """Starts the missing threads; the thread that calls kernels counts as the first."""
    pool.serve.compile((types.int64,))
    if not pool.WORDS[pool.SPINS]:
        pool.WORDS[pool.SPINS] = _spins_in(SPIN_SECONDS)
    for worker in range(len(_threads) + 1, min(torch.get_num_threads(), pool.MAX_WORKERS)):
        name = f"nanoengine worker {worker}"
        thread = threading.Thread(target=_work, args=(worker,), name=name, daemon=True)
        _threads.append(thread)
        thread.start()


def _spins_in(seconds: float) -> int:
    """How often a waiting thread reads the shared memory in this time."""
    pool.spin(1)  # compiles it
    start = time.perf_counter()
    pool.spin(SPIN_SAMPLE)
    return int(SPIN_SAMPLE * seconds / (time.perf_counter() - start)) + 1


def _work(worker: int) -> None:
    # Why: OpenMP may have bound the thread that started this one to one core.
    if BINDING & os.environ.keys() and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    cores: set[int] = set()  # cores of this thread, while it is restricted to some of them
    while not pool.WORDS[pool.STOP]:
        reason = pool.serve(worker)
        if cores or reason != pool.IDLE:
            with contextlib.suppress(OSError):  # forbidden, or the cores have changed
                cores = cores or os.sched_getaffinity(0)
                excluded = {int(pool.WORDS[pool.CORE])} if reason != pool.IDLE else set()
                os.sched_setaffinity(0, cores - excluded or cores)
        if reason == pool.YIELD:
            time.sleep(YIELD_SECONDS)
        if reason == pool.IDLE:
            cores = set()
            _awake.clear()
            _awake.wait()


@atexit.register
def _stop() -> None:
    """Stops the threads. Why: a thread that returns from compiled code needs a running
    interpreter."""
    pool.WORDS[pool.STOP] = 1
    _awake.set()
    for thread in _threads:
        thread.join(timeout=1)


def _reset_after_fork() -> None:
    """Called in a forked process, in which the threads do not exist."""
    _threads.clear()
    pool.WORDS[pool.BUSY] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def thread_reason() -> str:
    """What determines `num_workers`, as text for users."""
    if "OMP_NUM_THREADS" in os.environ:
        return f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if torch.get_num_threads() == allowed_cores() < affinity():
        return f"the control group's quota of {cpu_quota():g} cores; OMP_NUM_THREADS overrides it"
    if BINDING & os.environ.keys():
        return "torch's default; OpenMP binds each thread to a core"
    return f"torch's default for {affinity()} available cores; OMP_NUM_THREADS overrides it"
