"""share_of: which panels of a weight are whose, to read and to touch first.

A system with several sockets gives a page of memory to the socket whose thread touches it first. So
a weight's pages are touched by the workers that read them, before anybody writes it.
"""

from __future__ import annotations

from numba import prange

from nanoengine.kernels.jit import compiled

PAGE = 4096  # bytes; of a larger page the first touch counts for all


@compiled(fastmath=(), part=True)
def share_of(count, worker, num_workers):
    """(lo, hi): of `count` things in a row those from lo to hi - 1 are this worker's."""
    return count * worker // num_workers, count * (worker + 1) // num_workers


@compiled(parallel=True, fastmath=())
def touch(memory, num_workers):
    """Touches each page of flat bytes, which hold nothing yet. Why by bytes: panels are equally
    long, so all but one panel where two shares meet is touched by the worker that reads it."""
    for worker in prange(num_workers):
        lo, hi = share_of(len(memory), worker, num_workers)
        for at in range(lo, hi, PAGE):
            memory[at] = 0
