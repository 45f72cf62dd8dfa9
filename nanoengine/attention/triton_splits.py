"""Programs that share the splits of one context, and which of them puts their results together.

    program 0   splits 0, 2, 4 ─► scratch ─► counts itself: 1 of 2, done
    program 1   splits 1, 3    ─► scratch ─► counts itself: 2 of 2, merges the splits 0 ... 4

`triton_kernels.py` calls this. Splits are merged in their order, so the result doesn't depend on
which program comes last. That program also sets the counter back to 0, for the next launch or the
next replay of a CUDA graph.

They have been run in Triton's interpreter and compiled ahead of time; they have not run on a GPU
yet.

Source: a counter by which the last program finds itself is NVIDIA's threadFenceReduction sample and
the semaphores of Stream-K (Osama et al. 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_COUNTERS = 2**14
"""So many sequences times KV heads fill any GPU: beyond, each has one program and needs no
counter."""


def make_counters(device: torch.device) -> torch.Tensor:
    """Counters for one backend, [NUM_COUNTERS] int32, all 0 between launches.

    Why kept and not made for each launch: a CUDA graph would have to clear them, which is a kernel.
    Launches that share them must not overlap; those of a backend follow each other on one stream.
    """
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def counted_last(counter, programs):
    """True in the last of `programs` to come here: it sees all that they have stored before.

    The counter is 0 before and after.
    """
    # Why: one thread counts, for all threads of the program.
    tl.debug_barrier()
    last = True
    if programs > 1:
        # Why acq_rel: what was stored before a count is seen after a later one.
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
        if last:
            tl.store(counter, 0)
    return last
