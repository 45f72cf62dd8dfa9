"""Gates on what attention's heads have attended: part of `cpu_decoder.decoder_layers` for families
that have them. The readable form is in `TorchAttention.forward`.

Legend: T tokens, H query heads, D head dim.
"""

from __future__ import annotations

from nanoengine.kernels.cpu_layers import FASTMATH, SMALL
from nanoengine.kernels.exp import exp
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for


@compiled(fastmath=FASTMATH)
def _weigh_rows(attended, gates, lo, hi):
    for t in range(lo, hi):
        row, gate, one = attended[t], gates[t], attended.dtype.type(1)
        for i in range(len(row)):
            e = exp(-abs(gate[i]))
            row[i] *= (one if gate[i] >= 0 else e) / (one + e)


@compiled(fastmath=FASTMATH)
def weigh_rows(attended, gates, workers):
    """In place: attended [T, H * D] times the sigmoids of the first H * D columns of `gates`."""
    workers = 1 if attended.size <= SMALL else workers
    parallel_for(_weigh_rows, len(attended), workers, (attended, gates))
