"""The threads that run pieces of kernels (`pool.py`): as many as torch uses."""

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

WAIT = 200e-6  # seconds that a thread looks for work before it sleeps
REST = 3e-3  # seconds of sleep to free a core; Perf: the best of 1, 3 and 8 ms
SAMPLE = 2000  # looks, 30 us or so

_awake = threading.Event()
_threads: list[threading.Thread] = []


def num_workers() -> int:
    """Number of threads that a kernel may use, the same as torch's. Wakes those that sleep."""
    workers = min(torch.get_num_threads(), pool.MOST)
    if len(_threads) < workers - 1:
        start_workers()
    if not _awake.is_set():
        _awake.set()
    return workers


def start_workers() -> None:
    """Starts the missing threads; the thread that calls kernels counts as the first."""
    pool.serve.compile((types.int64,))
    if not pool.WORDS[pool.LOOKS]:
        pool.WORDS[pool.LOOKS] = _looks_in(WAIT)
    for worker in range(len(_threads) + 1, min(torch.get_num_threads(), pool.MOST)):
        name = f"nanoengine worker {worker}"
        thread = threading.Thread(target=_work, args=(worker,), name=name, daemon=True)
        _threads.append(thread)
        thread.start()


def _looks_in(seconds: float) -> int:
    """How often a waiting thread can look at the memory in this time."""
    pool.look(1)  # compiles it
    start = time.perf_counter()
    pool.look(SAMPLE)
    return int(SAMPLE * seconds / (time.perf_counter() - start)) + 1


def _work(worker: int) -> None:
    # Why: OpenMP has left the thread that started this one with one core.
    if BINDING & os.environ.keys() and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    cores: set[int] = set()  # cores of this thread, while it is restricted to some of them
    while not pool.WORDS[pool.STOP]:
        why = pool.serve(worker)
        if cores or why != pool.IDLE:
            with contextlib.suppress(OSError):  # forbidden, or the cores have changed
                cores = cores or os.sched_getaffinity(0)
                away = {int(pool.WORDS[pool.CORE])} if why != pool.IDLE else set()
                os.sched_setaffinity(0, cores - away or cores)
        if why == pool.CROWD:
            time.sleep(REST)
        if why == pool.IDLE:
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


def _forget() -> None:
    """Called in a forked process, which has none of the threads."""
    _threads.clear()
    pool.WORDS[pool.BUSY] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def why_so_many() -> str:
    """What determines `num_workers`, as a text for users."""
    if "OMP_NUM_THREADS" in os.environ:
        return f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if torch.get_num_threads() == allowed_cores() < affinity():
        return f"the quota of its control group is {cpu_quota():g} cores; OMP_NUM_THREADS sets it"
    if BINDING & os.environ.keys():
        return "torch's choice; OpenMP binds each to its cores"
    return (
        f"torch's choice, of {affinity()} cores that this process may use; OMP_NUM_THREADS sets it"
    )
