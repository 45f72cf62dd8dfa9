"""Fused CPU kernels between matrix multiplications: norms, gates, RoPE and KV store.

Compiled by numba for float32 and float64; flat arrays, offsets and ints. Each kernel makes one pass
over its rows. Little work runs on the calling thread (`SMALL`), since waking the others costs about
as much as a few thousand elements.

Each row is computed by itself in a fixed order, so its result has the same bits in any batch. The
reference implementations are `Kernels` (`layers/kernels.py`) and `attention/base.py`.

Legend: T rows (tokens), N size of a row, H / K query / KV heads, D head dim, P block size.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_microkernels import loop_vectors
from nanoengine.kernels.cpu_attention import store_head
from nanoengine.kernels.emit import emit_intrinsic
from nanoengine.kernels.exp import exp
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import SMALL, parallel_for

# Why no "nnan" and "ninf": a NaN in one row must come out as NaN, there and only there.
FASTMATH = ("reassoc", "contract", "nsz")
NO_NORM, EACH_HEAD, ALL_HEADS, FACTORS_ONLY = 0, 1, 2, 3  # how query and key heads are normed
# Why not Python's: numba would compile a function for each literal.
ADD_RESIDUAL, NO_RESIDUAL = np.bool_(True), np.bool_(False)


@compiled(fastmath=FASTMATH, inline=True)
def _scale_of_row(row, eps):
    """1 / sqrt(mean of squares + eps)."""
    total = row.dtype.type(0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return row.dtype.type(1) / np.sqrt(total / row.dtype.type(len(row)) + eps)


@compiled(fastmath=FASTMATH, inline=True)
def _silu_row(gate, up, out):
    one = out.dtype.type(1)
    for i in range(len(out)):
        x = gate[i]
        e = exp(-abs(x))
        out[i] = (x if x >= 0 else x * e) / (one + e) * up[i]


@compiled(fastmath=FASTMATH, inline=True)
def _gelu_tanh_row(gate, up, out):
    real = out.dtype.type
    one, half, two = real(1), real(0.5), real(2)
    slope, cubic = real(0.7978845608028654), real(0.044715)  # sqrt(2 / pi)
    for i in range(len(out)):
        x = gate[i]
        t = slope * (x + cubic * x * x * x)
        e = exp(-two * abs(t))
        out[i] = half * x * (one + np.copysign((one - e) / (one + e), t)) * up[i]


@compiled(fastmath=FASTMATH, inline=True)
def _clamped_swiglu_row(gate, up, out):
    real = out.dtype.type
    one, slope, limit = real(1), real(1.702), real(7)
    for i in range(len(out)):
        x, y = gate[i], up[i]
        x = limit if x > limit else x  # Why comparisons: they let NaN through
        y = limit if y > limit else -limit if y < -limit else y
        e = exp(-slope * abs(x))
        out[i] = (x if x >= 0 else x * e) / (one + e) * (y + one)


GATES = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}
"""Maps the name of an activation to its `kind` in `gate`."""


@compiled(fastmath=FASTMATH, inline=True)
def norm_row(x, weight, eps, out):
    scale = _scale_of_row(x, eps)
    for i in range(len(x)):
        out[i] = x[i] * scale * weight[i]


@compiled(fastmath=FASTMATH)
def _norm_rows(x, residual, add_residual, weight, eps, out, lo, hi):
    for t in range(lo, hi):
        if add_residual:
            row, added = residual[t], x[t]
            for i in range(len(row)):
                row[i] += added[i]
            norm_row(row, weight, eps, out[t])
        else:
            norm_row(x[t], weight, eps, out[t])


@compiled(fastmath=FASTMATH)
def rms_norm(x, residual, add_residual, weight, eps, out, workers):
    """out[t] = x[t] / rms(x[t]) * weight; all [T, N], weight [N]; out may be x.

    add_residual: ADD_RESIDUAL: residual += x in place, and the residual is normed; NO_RESIDUAL: x
    is normed.
    """
    operands = x, residual, add_residual, weight, eps, out
    parallel_for(_norm_rows, len(x), 1 if x.size <= SMALL else workers, operands)


@compiled(fastmath=FASTMATH)
def gate_row(gate, up, kind, out):
    """out = act(gate) * up, all [I]; `kind` is a value of `GATES`."""
    if kind == 0:
        _silu_row(gate, up, out)
    elif kind == 1:
        _gelu_tanh_row(gate, up, out)
    else:
        _clamped_swiglu_row(gate, up, out)


@compiled(fastmath=FASTMATH)
def _gate_rows(gate_up, kind, out, lo, hi):
    size = out.shape[1]
    for t in range(lo, hi):
        gate_row(gate_up[t, :size], gate_up[t, size:], kind, out[t])


@compiled(fastmath=FASTMATH)
def gate(gate_up, kind, out, workers):
    """out[t] = act(gate_up[t, :I]) * gate_up[t, I:]; `kind` is a value of `GATES`."""
    workers = 1 if out.size <= SMALL else workers
    parallel_for(_gate_rows, len(out), workers, (gate_up, kind, out))


@emit_intrinsic()
def _apply_rope(emit, x, at, table, table_at, weight, weight_at, scale, normed, half, out, out_at):
    """Multiplies one head by the norm's scale and weight, if `normed`, and applies RoPE to pairs
    (x[i], x[i + D / 2])."""
    builder = emit.builder
    source, angles, weights, scale, normed, half, target = emit.operands(
        x, at, table, table_at, weight, weight_at, scale, normed, half, out, out_at
    )

    def rotate(tile, i):
        def load_halves(pointer):
            return tile.load(tile.at(pointer, i)), tile.load(tile.at(pointer, i, half))

        values, factors, (cos, sin) = load_halves(source), load_halves(weights), load_halves(angles)
        scaled = (builder.fmul(value, tile.splat(scale)) for value in values)
        u, v = (
            builder.select(builder.trunc(normed, ir.IntType(1)), builder.fmul(a, b), value)
            for a, b, value in zip(scaled, factors, values, strict=True)
        )
        first = tile.fma(u, cos, builder.fneg(builder.fmul(v, sin)))
        tile.store(first, tile.at(target, i))
        tile.store(tile.fma(v, cos, builder.fmul(u, sin)), tile.at(target, i, half))

    loop_vectors(emit, emit.kinds.x, half, rotate)


@compiled(fastmath=FASTMATH)
def _rotate_tokens(heads, table, weight, eps, normed, slots, k_cache, v_cache, q, sizes, lo, hi):
    num_heads, num_kv_heads, head_dim, _ = sizes
    key, scale, row = empty((head_dim,), q.dtype), q.dtype.type(1), heads.reshape(-1)
    angles, weights, queries = table.reshape(-1), weight.reshape(-1), q.reshape(-1)
    columns = len(row) // max(1, len(q))
    first = columns - (num_heads + 2 * num_kv_heads) * head_dim
    for t in range(lo, hi):
        for h in range(num_heads + num_kv_heads):
            at = t * columns + first + h * head_dim
            if normed == EACH_HEAD or (normed == ALL_HEADS and h in (0, num_heads)):
                count = 1 if normed == EACH_HEAD else num_kv_heads if h else num_heads
                scale = _scale_of_row(row[at : at + count * head_dim], eps)
            out, out_at = (queries, (t * num_heads + h) * head_dim) if h < num_heads else (key, 0)
            _apply_rope(
                row, at, angles, t * head_dim, weights, h * head_dim, scale, normed != NO_NORM,
                head_dim // 2, out, out_at,
            )  # fmt: skip
            if h >= num_heads:
                value = row[at + num_kv_heads * head_dim :][:head_dim]
                store_head(key, value, slots[t], h - num_heads, k_cache, v_cache, sizes)


@compiled(fastmath=FASTMATH)
def rotate_and_store(
    heads, table, weight, eps, normed, slots, k_blocks, v_blocks, q, sizes, workers
):
    """Norms query and key heads and applies RoPE; queries go to q, keys and values to their slots.

    Args:
        heads: [T, H + 2 K, D], query, key and value heads; or [T, columns], which end with these.
        table: [T, D], cos then sin of each token's angles.
        weight: [H + K, D], not read with NO_NORM.
        normed: NO_NORM; EACH_HEAD; ALL_HEADS: all query heads as one row, and all key heads as one;
            FACTORS_ONLY: heads are multiplied by the weight and not normed.
        slots: [T] int64; k_blocks, v_blocks: contiguous, [B, K, P, D], see `cpu_attention`.
        sizes: (H, K, D, P).
    """
    k_cache, v_cache = k_blocks.reshape(-1), v_blocks.reshape(-1)
    size = (sizes[0] + 2 * sizes[1]) * sizes[2]
    parallel_for(
        _rotate_tokens, len(q), 1 if len(q) * size <= SMALL else workers,
        (heads, table, weight, eps, normed, slots, k_cache, v_cache, q, sizes),
    )  # fmt: skip
