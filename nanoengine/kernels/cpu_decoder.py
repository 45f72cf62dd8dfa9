"""Decoder layers on the CPU as one call, which runs the kernels of their parts in order.

    x, residual ─ norm ─ qkv ─ norm, RoPE, store ─ attend ─
                  o ─ norm ─ gate_up ─ gate ─ down ─ x, residual

Some families also have post-norms after o and down, or only those (`LayerConfig.norms`).
`cpu_experts.py` computes an MLP that is a mixture of experts; if no kernel supports it, the call
ends before the MLP. Mixers other than attention, and what follows the MLP in some families, are in
files of their own: `MIXERS` and `leave` name them.

Why one call: each kernel call from Python costs about 10 us, and a layer has nine of them. The
kernels are those that the layer's parts call separately, so the results are the same bit for bit.
The reference implementation is `DecoderLayer.forward`; `tests/layers/test_fused_layers.py` compares
them.

What is the same in each step comes from an `ArgumentTable`. Weights are as in `matmul.py`.

Perf: Python's share of the time per token, 16 layers, one Zen 3 core: docs/experiments.md.

Legend: T tokens, L rows after attention, N hidden size, I inner size of the MLP, H / K query / KV
heads, D head dim.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from numba import types

from nanoengine.kernels.argument_table import table_entry
from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_microkernels import numbers_a_word, scale_row
from nanoengine.kernels.cpu_attention import ask_for_slots, attend
from nanoengine.kernels.cpu_layers import (
    ADDS,
    ALONE,
    FASTMATH,
    gate,
    gate_row,
    rms_norm,
    rotate_and_store,
)
from nanoengine.kernels.cpu_linear import (
    ROW_BLOCK,
    cut,
    rows_of_block,
    share_of_cut,
)
from nanoengine.kernels.gemm import PANEL, PANELS
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.matmul import as_multiplied, multiply, multiply_panels, starts_panels
from nanoengine.kernels.pool import SMALL, parallel_for

LayerTail = namedtuple(
    "LayerTail",
    "o attention_output_norm mlp_norm mlp eps norms_before norms_after scale",
)
"""Operands after the mixer: weights of the output projection; norms [N], any array where a norm is
absent; a `GatedMLP`, an `ExpertMLP` or (); the epsilon of the norms; whether there are norms
before, and after, mixer and MLP; the factor on the outputs of both."""

GatedMLP = namedtuple("GatedMLP", "gate_up down output_norm operand inner activation")
"""Two weights, a norm, an empty array with the dtype of down's inputs (pairs only if I is a
multiple of 16), I, and the index of the activation in `GATES`."""

ExpertMLP = namedtuple("ExpertMLP", "mixture output_norm")
"""The arguments of `cpu_experts.mixture` between x and out, and a norm."""

Attention = namedtuple(
    "Attention",
    "qkv head_norm operand sinks gates value_norm sizes columns stored_heads window norm_kind"
    " norm_eps scale softcap",
)
"""Operands of `attend_heads`."""

# Panels whose gates are computed at once: more would need much memory. Not a power of two: rows
# would map to a few sets of the cache.
GATED = 120


@compiled(fastmath=FASTMATH, part=True)
def enter(x, residual, norm, eps, before, workers):
    """In place: residual += x, and x becomes the norm of the residual, or its copy without a
    norm."""
    if before:
        rms_norm(x, residual, ADDS, norm, eps, x, workers)
    else:
        for t in range(len(x)):
            for i in range(x.shape[1]):
                residual[t, i] += x[t, i]
                x[t, i] = residual[t, i]


@compiled(fastmath=FASTMATH, part=True)
def _leave(x, norm, eps, behind, scale, workers):
    """In place: applies the post-norm, if any, and the scale to the output of attention or MLP."""
    if behind:
        rms_norm(x, x, ALONE, norm, eps, x, workers)
    if scale != 1:
        for t in range(len(x)):
            for i in range(x.shape[1]):
                x[t, i] *= scale


@specialize()
def keep_gated(gates, ups, activation, row, out, at):
    """Writes the gated product of two rows to out, from element `at` on. `row` is a buffer that is
    used if out holds pairs of bfloat16."""

    def floats(gates, ups, activation, row, out, at):
        gate_row(gates, ups, activation, out[at : at + len(gates)])

    def pairs(gates, ups, activation, row, out, at):
        gate_row(gates, ups, activation, row)
        scale_row(row, 0, np.float32(1), out, at // 2, len(row))

    return pairs if out.dtype == types.uint32 else floats


@compiled(fastmath=FASTMATH)
def _keep_rows(both, activation, row, out, at):
    """`keep_gated` for each row of out. Why a kernel: it borrows the arrays that `_activate_panels`
    has made. Otherwise each row would update their reference counts."""
    for t in range(len(out)):
        keep_gated(both[0, t], both[1, t], activation, row, out[t], at)


@compiled(fastmath=FASTMATH)
def _activate_panels(inputs, weight, activation, out, tiles, parts, lo, hi):
    """`activate` for items lo ... hi - 1 of a `cut` into tiles of gates."""
    inner, step = out.shape[1] * numbers_a_word(out) // PANEL, hi - lo if parts <= 1 else 1
    row = empty((GATED * PANEL,), np.float32)
    for item in range(lo, hi, step):
        start, behind, tile, stop = share_of_cut(item, step, len(out), tiles, parts)
        blocks, end = -(-(behind - start) // ROW_BLOCK), min(stop * PANELS, inner)
        for block in range(blocks):
            first, last = rows_of_block(behind - start, block, blocks)
            first, last = start + first, start + last
            for panel in range(tile * PANELS, end, GATED):
                count = min(GATED, end - panel)
                both = empty((2, last - first, count * PANEL), np.float32)
                for i in range(2):
                    at = i * inner + panel
                    multiply_panels(inputs, first, last, weight, at, both[i], at, at + count)
                _keep_rows(both, activation, row[: count * PANEL], out[first:last], panel * PANEL)


@compiled(fastmath=FASTMATH, part=True)
def _multiply_and_gate(x, weight, activation, out, workers):
    both = empty((len(x), 2 * out.shape[1]), x.dtype)
    multiply(x, weight, both, workers)
    gate(both, activation, out, workers)


@compiled(fastmath=FASTMATH, part=True)
def _in_panels(x, weight, activation, out, workers):
    tiles = -(-out.shape[1] * numbers_a_word(out) // (PANELS * PANEL))
    count, parts = cut(len(x), tiles, workers)
    operands = as_multiplied(x, weight, workers), weight, activation, out, tiles, parts
    parallel_for(_activate_panels, count, workers, operands)


@specialize(FASTMATH)
def activate(x, weight, activation, out, workers):
    """out [T, I] = the gated activation of x times a weight with 2 I outputs, as floats or pairs.

    Why in one pass: the product is twice as wide as the result, and would go to memory and back.
    """

    def together(x, weight, activation, out, workers):
        if out.shape[1] % PANEL or not starts_panels(weight):
            _multiply_and_gate(x, weight, activation, out, workers)
        else:
            _in_panels(x, weight, activation, out, workers)

    if out.dtype == types.uint32:
        return lambda x, weight, activation, out, workers: _in_panels(
            x, weight, activation, out, workers
        )
    if len(weight) <= 3:
        return together
    return lambda x, weight, activation, out, workers: _multiply_and_gate(
        x, weight, activation, out, workers
    )


@specialize(FASTMATH)
def gated_mlp(x, mlp, eps, behind, factor, workers):
    """In place: x [L, N] becomes the output of a gated MLP or of a mixture of experts; does nothing
    if `mlp` is ()."""
    if len(mlp) == 0:
        return lambda x, mlp, eps, behind, factor, workers: None
    if mlp.instance_class is ExpertMLP:
        from nanoengine.kernels.cpu_experts import mixture

        def mixed(x, mlp, eps, behind, factor, workers):
            out = empty(x.shape, x.dtype)
            mixture(x, *mlp.mixture, out, workers)
            for t in range(len(x)):
                for i in range(x.shape[1]):
                    x[t, i] = out[t, i]
            _leave(x, mlp.output_norm, eps, behind, factor, workers)

        return mixed

    def computed(x, mlp, eps, behind, factor, workers):
        operand = mlp.operand
        gated = empty((len(x), mlp.inner // numbers_a_word(operand)), operand.dtype)
        activate(x, mlp.gate_up, mlp.activation, gated, workers)
        multiply(gated, mlp.down, x, workers)
        _leave(x, mlp.output_norm, eps, behind, factor, workers)

    return computed


@compiled(fastmath=FASTMATH)
def finish_layer(attended, residual, all_rows, rows, x_on, residual_on, rest, workers):
    """A layer from its output projection on, see `decoder_layers`.

    Args:
        attended: [T, inputs of o].
        rest: a `LayerTail`.
    """
    if not all_rows:
        kept = empty((len(rows), attended.shape[1]), attended.dtype)
        for i in range(len(rows)):  # Why loops: numba's own copies take seconds to compile
            for d in range(attended.shape[1]):
                kept[i, d] = attended[rows[i], d]
            for d in range(residual.shape[1]):
                residual_on[i, d] = residual[rows[i], d]
        attended = kept
    eps, after, scale = rest.eps, rest.norms_after, rest.scale
    multiply(attended, rest.o, x_on, workers)
    _leave(x_on, rest.attention_output_norm, eps, after, scale, workers)
    enter(x_on, residual_on, rest.mlp_norm, eps, rest.norms_before, workers)
    gated_mlp(x_on, rest.mlp, eps, after, scale, workers)


@specialize()
def heads_of(projected, value_norm, sizes, workers):
    """The argument `heads` of `rotate_and_store`, from the projection [T, columns]; sizes: (H, K,
    D, P)."""
    if len(value_norm) == 0:
        return lambda projected, value_norm, sizes, workers: projected
    from nanoengine.kernels.cpu_gemma4 import norm_values

    def normed(projected, value_norm, sizes, workers):
        heads = projected.reshape(len(projected), -1, sizes[2])
        return norm_values(heads, value_norm, *sizes[:2], workers) if sizes[1] else heads

    return normed


@specialize()
def weigh(attended, projected, gates, workers):
    """In place: multiplies attended [T, H * D] by the sigmoids of the gates, which precede the
    heads in the projection, if there are any."""
    if len(gates) == 0:
        return lambda attended, projected, gates, workers: None
    from nanoengine.kernels.cpu_gates import weigh_rows

    return lambda attended, projected, gates, workers: weigh_rows(
        attended, projected, gates[0], workers
    )


@compiled(fastmath=FASTMATH)
def attend_heads(x, step, memory, mixer, workers):
    """Returns the attention output [T, H * D] for normed rows x [T, N].

    Args:
        step: starts with the arrays of `CPUBackend.step_arrays`.
        memory: k_cache and v_cache, contiguous, [B, K, P, D].
        mixer: an `Attention`: the weights qkv and the norm of heads [H + K, D]; attention's operand
            and its sinks [H], if any; the number of output gates that qkv gives before the heads,
            (H,) or (H * D,), or (); ones [D] and an epsilon if values are normed, else () (the
            values are the projected keys if qkv has no values); (H, K, D, P); the outputs of qkv;
            the KV heads that are stored, K or 0; the window; the kind of head norm and its epsilon;
            the scale and softcap of scores.
    """
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step[:9]
    (num_heads, _, head_dim, block_size), (k_cache, v_cache) = mixer.sizes, memory
    tokens, stored = len(x), (num_heads, mixer.stored_heads, head_dim, block_size)

    projected = empty((tokens, mixer.columns), x.dtype)
    if projected.size <= SMALL:  # This thread will write them, see `rotate_and_store`.
        ask_for_slots(slots, k_cache, v_cache, stored)
    multiply(x, mixer.qkv, projected, workers)
    heads = heads_of(projected, mixer.value_norm, stored, workers)
    q = empty((tokens, num_heads, head_dim), x.dtype)
    rotate_and_store(
        heads, table, mixer.head_norm, mixer.norm_eps, mixer.norm_kind, slots, k_cache, v_cache, q,
        stored, workers,
    )  # fmt: skip
    attended = empty((tokens, num_heads * head_dim), x.dtype)
    attend(
        q, k_cache, v_cache, tables, tasks, bounds, merges, parts, mixer.sizes, mixer.scale,
        mixer.softcap, mixer.window, mixer.operand, mixer.sinks, attended.reshape(q.shape),
        partial_out, partial_stats, workers,
    )  # fmt: skip
    weigh(attended, projected, mixer.gates, workers)
    return attended


MIXERS: dict[type, Any] = {Attention: attend_heads}
"""Maps the type of a mixer's operands to its kernel, called with (normed rows x [T, N], step,
memory, operands, workers), which returns [T, inputs of o]. The file of each mixer adds its own."""


@specialize()
def mixed(x, step, memory, mixer, workers):
    """Returns the mixer's output [T, inputs of o] for normed rows x [T, N]."""
    kernel = MIXERS[mixer.instance_class]
    return lambda x, step, memory, mixer, workers: kernel(x, step, memory, mixer, workers)


@specialize()
def leave(x, residual, all_rows, rows, step, last, workers):
    """Applies what follows a layer's MLP, `last`, to both results in place; nothing if it is ()."""
    if len(last) == 0:
        return lambda x, residual, all_rows, rows, step, last, workers: None
    from nanoengine.kernels.cpu_gemma4 import leave_with_input as kernel

    return lambda x, residual, all_rows, rows, step, last, workers: kernel(
        x, residual, all_rows, rows, step[9], last, workers
    )


@compiled(fastmath=FASTMATH)
def decoder_layers(
    x, residual, all_rows, rows, x_on, residual_on, step, layers, first, last, workers
):
    """In place: x becomes what the last layer adds last, the residual the sum of everything before
    it.

    In a model's last layer only some rows may go on after attention (`models/decoder.py`), and some
    several times. The results are then in separate arrays.

    Args:
        x, residual: [T, N], what the previous layer added last, and the sum before it.
        all_rows, rows: whether all rows go on; if not, which: [L] int64. Then only one layer runs.
        x_on, residual_on: [L, N], the results if not all rows go on; else x and residual.
        step: the arrays of the step that mixers of this kind need.
        layers: an `ArgumentTable` with, per layer, its memory, its first norm [N], the operands of
            its mixer, its `LayerTail`, and the operands of `leave`, or ().
        first, last: the layers from first to last - 1 run.
    """
    for i in range(first, last):
        memory, norm, mixer, rest, after_mlp = table_entry(layers, i)
        enter(x, residual, norm, rest.eps, rest.norms_before, workers)
        found = mixed(x, step, memory, mixer, workers)
        finish_layer(found, residual, all_rows, rows, x_on, residual_on, rest, workers)
        leave(x_on, residual_on, all_rows, rows, step, after_mlp, workers)
