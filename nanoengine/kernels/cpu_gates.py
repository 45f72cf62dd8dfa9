"""Output gates of attention heads: part of `cpu_decoder.decoder_layers` for families that have
them. The reference implementation is in `GenericAttention.forward`.

Legend: T tokens, H query heads, D head dim.
"""

from __future__ import annotations

from nanoengine.kernels.cpu_layers import FASTMATH
from nanoengine.kernels.exp import exp
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import SMALL, parallel_for


@compiled(fastmath=FASTMATH, inline=True)
def _sigmoid(x, one):
    e = exp(-abs(x))
    return (one if x >= 0 else e) / (one + e)


@compiled(fastmath=FASTMATH)
def _apply_gates(attended, gates, count, lo, hi):
    width, one = attended.shape[1] // count, attended.dtype.type(1)
    for t in range(lo, hi):
        row, gate = attended[t], gates[t]
        if width == 1:  # Why a separate loop: so LLVM vectorizes it.
            for i in range(count):
                row[i] *= _sigmoid(gate[i], one)
        else:
            for head in range(count):
                weight, head_values = _sigmoid(gate[head], one), row[head * width :]
                for i in range(width):
                    head_values[i] *= weight


@compiled(fastmath=FASTMATH)
def apply_gates(attended, gates, count, workers):
    """In place: multiplies attended [T, H * D] by the sigmoids of the first `count` columns of
    `gates`: H * D, or H."""
    workers = 1 if attended.size <= SMALL else workers
    parallel_for(_apply_gates, len(attended), workers, (attended, gates, count))
