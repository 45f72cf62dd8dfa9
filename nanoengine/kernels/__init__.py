"""Compiled kernels that layers and attention call: flat arrays and ints, nothing of the package."""

import os

import torch

# Where OpenMP binds threads to cores, torch has left this thread with one core. numba, which is
# imported after this, would take that for all there are.
BINDING = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}
if BINDING & os.environ.keys():
    cores = min(torch.get_num_threads(), os.cpu_count() or 1)
    os.environ.setdefault("NUMBA_NUM_THREADS", str(cores))
