"""Decoder layers on the CPU as one call, which runs the kernels of their submodules in order.

    x, residual ─ norm ─ qkv ─ norm, RoPE, store ─ attend ─
                  o ─ norm ─ gate_up ─ gate ─ down ─ x, residual

Some families also have post-norms after o and down, or only those (`LayerConfig.norms`).
`cpu_experts.py` computes an MLP that is a mixture of experts. Mixers other than attention, and
operations after the MLP in some families, are in other files: see `MIXERS` and `apply_after_mlp`.

Why one call: each kernel call from Python costs about 10 us, and a layer has nine of them. The
layer's submodules call the same kernels separately, so the results are the same bit for bit.
The reference implementation is `DecoderLayer.forward`; `tests/layers/test_fused_layers.py` compares
them.

Arguments that never change come from an `ArgumentTable`. Weights are as in `matmul.py`.

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
from nanoengine.kernels.attention_microkernels import elements_per_word, scale_row
from nanoengine.kernels.cpu_attention import attend, prefetch_slots
from nanoengine.kernels.cpu_layers import (
    ADD_RESIDUAL,
    FASTMATH,
    NO_RESIDUAL,
    gate,
    gate_row,
    rms_norm,
    rotate_and_store,
)
from nanoengine.kernels.cpu_linear import ROW_BLOCK, block_rows, item_range, plan_items
from nanoengine.kernels.gemm import PANEL, PANELS
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.matmul import has_whole_panels, matmul, matmul_panels, to_operand
from nanoengine.kernels.pool import SMALL, parallel_for

LayerTail = namedtuple(
    "LayerTail",
    "o attention_output_norm mlp_norm mlp eps norms_before norms_after scale",
)
"""Operands after the mixer: the weight of the output projection; norms [N], any array where a norm
is absent; a `GatedMLP` or an `ExpertMLP`; the epsilon of the norms; whether mixer and MLP have
pre-norms, and post-norms; the factor on the outputs of both."""

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
GATED_PANELS = 120


@compiled(fastmath=FASTMATH, inline=True)
def add_and_norm(x, residual, norm, eps, has_norm, workers):
    """In place: residual += x, and x becomes the norm of the residual, or its copy without a
    norm."""
    if has_norm:
        rms_norm(x, residual, ADD_RESIDUAL, norm, eps, x, workers)
    else:
        for t in range(len(x)):
            for i in range(x.shape[1]):
                residual[t, i] += x[t, i]
                x[t, i] = residual[t, i]


@compiled(fastmath=FASTMATH, inline=True)
def _post_norm(x, norm, eps, has_post_norm, scale, workers):
    """In place: applies the post-norm, if any, and the scale to the output of attention or MLP."""
    if has_post_norm:
        rms_norm(x, x, NO_RESIDUAL, norm, eps, x, workers)
    if scale != 1:
        for t in range(len(x)):
            for i in range(x.shape[1]):
                x[t, i] *= scale


@specialize()
def store_gated(gates, ups, activation, buffer, out, at):
    """Writes the gated product of two rows to out, from element `at` on. `buffer` is used if out
    holds pairs of bfloat16."""

    def floats(gates, ups, activation, buffer, out, at):
        gate_row(gates, ups, activation, out[at : at + len(gates)])

    def pairs(gates, ups, activation, buffer, out, at):
        gate_row(gates, ups, activation, buffer)
        scale_row(buffer, 0, np.float32(1), out, at // 2, len(buffer))

    return pairs if out.dtype == types.uint32 else floats


@compiled(fastmath=FASTMATH)
def _store_rows(gate_up, activation, buffer, out, at):
    """`store_gated` for each row of out. Why a kernel: it borrows the arrays of `_activate_panels`,
    whose reference counts would otherwise be updated for each row."""
    for t in range(len(out)):
        store_gated(gate_up[0, t], gate_up[1, t], activation, buffer, out[t], at)


@compiled(fastmath=FASTMATH)
def _activate_panels(inputs, weight, activation, out, tiles, parts, lo, hi):
    """`activate` for work items lo ... hi - 1 of `plan_items`."""
    inner, step = out.shape[1] * elements_per_word(out) // PANEL, hi - lo if parts <= 1 else 1
    row = empty((GATED_PANELS * PANEL,), np.float32)
    for item in range(lo, hi, step):
        start, stop, tile, tile_stop = item_range(item, step, len(out), tiles, parts)
        blocks, panel_end = -(-(stop - start) // ROW_BLOCK), min(tile_stop * PANELS, inner)
        for block in range(blocks):
            first, last = block_rows(stop - start, block, blocks)
            first, last = start + first, start + last
            for panel in range(tile * PANELS, panel_end, GATED_PANELS):
                count = min(GATED_PANELS, panel_end - panel)
                both = empty((2, last - first, count * PANEL), np.float32)
                for i in range(2):
                    at = i * inner + panel
                    matmul_panels(inputs, first, last, weight, at, both[i], at, at + count)
                _store_rows(both, activation, row[: count * PANEL], out[first:last], panel * PANEL)


@compiled(fastmath=FASTMATH, inline=True)
def _matmul_and_gate(x, weight, activation, out, workers):
    gate_up = empty((len(x), 2 * out.shape[1]), x.dtype)
    matmul(x, weight, gate_up, workers)
    gate(gate_up, activation, out, workers)


@compiled(fastmath=FASTMATH, inline=True)
def _matmul_and_gate_panels(x, weight, activation, out, workers):
    tiles = -(-out.shape[1] * elements_per_word(out) // (PANELS * PANEL))
    count, parts = plan_items(len(x), tiles, workers)
    operands = to_operand(x, weight, workers), weight, activation, out, tiles, parts
    parallel_for(_activate_panels, count, workers, operands)


@specialize(FASTMATH)
def activate(x, weight, activation, out, workers):
    """out [T, I] = the gated activation of x times a weight with 2 I outputs, as floats or pairs.

    Why in one pass: the product is twice as wide as the result, and would be written to memory and
    read again.
    """

    def fused(x, weight, activation, out, workers):
        if out.shape[1] % PANEL or not has_whole_panels(weight):
            _matmul_and_gate(x, weight, activation, out, workers)
        else:
            _matmul_and_gate_panels(x, weight, activation, out, workers)

    if out.dtype != types.uint32 and len(weight) <= 3:
        return fused
    kernel = _matmul_and_gate_panels if out.dtype == types.uint32 else _matmul_and_gate
    return lambda x, weight, activation, out, workers: kernel(x, weight, activation, out, workers)


@specialize(FASTMATH)
def gated_mlp(x, mlp, eps, has_post_norm, factor, workers):
    """In place: x [L, N] becomes the output of a gated MLP or of a mixture of experts."""
    if mlp.instance_class is ExpertMLP:
        from nanoengine.kernels.cpu_experts import mixture

        def moe_mlp(x, mlp, eps, has_post_norm, factor, workers):
            out = empty(x.shape, x.dtype)
            mixture(x, *mlp.mixture, out, workers)
            for t in range(len(x)):
                for i in range(x.shape[1]):
                    x[t, i] = out[t, i]
            _post_norm(x, mlp.output_norm, eps, has_post_norm, factor, workers)

        return moe_mlp

    def dense_mlp(x, mlp, eps, has_post_norm, factor, workers):
        operand = mlp.operand
        gated = empty((len(x), mlp.inner // elements_per_word(operand)), operand.dtype)
        activate(x, mlp.gate_up, mlp.activation, gated, workers)
        matmul(gated, mlp.down, x, workers)
        _post_norm(x, mlp.output_norm, eps, has_post_norm, factor, workers)

    return dense_mlp


@compiled(fastmath=FASTMATH)
def finish_layer(attended, residual, all_rows, rows, x_out, residual_out, tail, workers):
    """A layer from its output projection on, see `decoder_layers`.

    Args:
        attended: [T, inputs of o].
        tail: a `LayerTail`.
    """
    if not all_rows:
        selected = empty((len(rows), attended.shape[1]), attended.dtype)
        for i in range(len(rows)):  # Why loops: numba's own copies take seconds to compile
            for d in range(attended.shape[1]):
                selected[i, d] = attended[rows[i], d]
            for d in range(residual.shape[1]):
                residual_out[i, d] = residual[rows[i], d]
        attended = selected
    eps, has_post_norms, scale = tail.eps, tail.norms_after, tail.scale
    matmul(attended, tail.o, x_out, workers)
    _post_norm(x_out, tail.attention_output_norm, eps, has_post_norms, scale, workers)
    add_and_norm(x_out, residual_out, tail.mlp_norm, eps, tail.norms_before, workers)
    gated_mlp(x_out, tail.mlp, eps, has_post_norms, scale, workers)


@specialize()
def norm_value_heads(projected, value_norm, sizes, workers):
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
def apply_output_gate(attended, projected, gates, workers):
    """In place: multiplies attended [T, H * D] by the sigmoids of the output gates, if there are
    any. They precede the heads in the projection."""
    if len(gates) == 0:
        return lambda attended, projected, gates, workers: None
    from nanoengine.kernels.cpu_gates import apply_gates

    return lambda attended, projected, gates, workers: apply_gates(
        attended, projected, gates[0], workers
    )


@compiled(fastmath=FASTMATH)
def attend_heads(x, step, layer_cache, mixer, workers):
    """Returns the attention output [T, H * D] for normed rows x [T, N].

    Args:
        step: begins with the arrays of `CPUBackend.step_arrays`.
        layer_cache: k_cache and v_cache, contiguous, [B, K, P, D].
        mixer: an `Attention`: the weights qkv and the norm of heads [H + K, D]; attention's operand
            and its sinks [H], if any; the number of output gates that qkv gives before the heads,
            (H,) or (H * D,), or (); ones [D] and an epsilon if values are normed, else () (the
            values are the projected keys if qkv has no values); (H, K, D, P); the outputs of qkv;
            the KV heads that are stored, K or 0; the window; the kind of head norm and its epsilon;
            the scale and softcap of scores.
    """
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step[:9]
    (num_heads, _, head_dim, block_size), (k_cache, v_cache) = mixer.sizes, layer_cache
    tokens, stored_sizes = len(x), (num_heads, mixer.stored_heads, head_dim, block_size)

    projected = empty((tokens, mixer.columns), x.dtype)
    if projected.size <= SMALL:  # This thread will write them, see `rotate_and_store`.
        prefetch_slots(slots, k_cache, v_cache, stored_sizes)
    matmul(x, mixer.qkv, projected, workers)
    heads = norm_value_heads(projected, mixer.value_norm, stored_sizes, workers)
    q = empty((tokens, num_heads, head_dim), x.dtype)
    rotate_and_store(
        heads, table, mixer.head_norm, mixer.norm_eps, mixer.norm_kind, slots, k_cache, v_cache, q,
        stored_sizes, workers,
    )  # fmt: skip
    attended = empty((tokens, num_heads * head_dim), x.dtype)
    attend(
        q, k_cache, v_cache, tables, tasks, bounds, merges, parts, mixer.sizes, mixer.scale,
        mixer.softcap, mixer.window, mixer.operand, mixer.sinks, attended.reshape(q.shape),
        partial_out, partial_stats, workers,
    )  # fmt: skip
    apply_output_gate(attended, projected, mixer.gates, workers)
    return attended


MIXERS: dict[type, Any] = {Attention: attend_heads}
"""Maps the type of a mixer's operands to its kernel, which is called with (normed rows x [T, N],
step, layer_cache, operands, workers) and returns [T, inputs of o]. The file of each mixer adds an
entry."""


@specialize()
def run_mixer(x, step, layer_cache, mixer, workers):
    """Returns the mixer's output [T, inputs of o] for normed rows x [T, N]."""
    kernel = MIXERS[mixer.instance_class]
    return lambda x, step, layer_cache, mixer, workers: kernel(x, step, layer_cache, mixer, workers)


@specialize()
def apply_after_mlp(x, residual, all_rows, rows, step, after_mlp, workers):
    """In place: applies a layer's operations after the MLP to x and the residual. `after_mlp`:
    their operands, or () if there are none."""
    if len(after_mlp) == 0:
        return lambda x, residual, all_rows, rows, step, after_mlp, workers: None
    from nanoengine.kernels.cpu_gemma4 import add_per_layer_input as kernel

    return lambda x, residual, all_rows, rows, step, after_mlp, workers: kernel(
        x, residual, all_rows, rows, step[9], after_mlp, workers
    )


@compiled(fastmath=FASTMATH)
def decoder_layers(
    x, residual, all_rows, rows, x_out, residual_out, step, layers, first, last, workers
):
    """In place: runs layers; x becomes the output of the last layer's last submodule, and the
    residual becomes the sum without it.

    In a model's last layer only some rows may be needed after attention (`models/decoder.py`), some
    of them several times. The results are then in separate arrays.

    Args:
        x, residual: [T, N], the output of the previous layer's last submodule, and the residual.
        all_rows, rows: whether all rows are needed after attention; if not, which rows: [L] int64.
            Then only one layer runs.
        x_out, residual_out: [L, N], the results if not all rows are needed; else x and residual.
        step: the arrays of the step that mixers of this kind need.
        layers: an `ArgumentTable` with, per layer, its KV cache or recurrent states, its first norm
            [N], the operands of its mixer, its `LayerTail`, and the operands of `apply_after_mlp`.
        first, last: the layers first ... last - 1 run.
    """
    for i in range(first, last):
        layer_cache, norm, mixer, tail, after_mlp = table_entry(layers, i)
        add_and_norm(x, residual, norm, tail.eps, tail.norms_before, workers)
        mixer_output = run_mixer(x, step, layer_cache, mixer, workers)
        finish_layer(mixer_output, residual, all_rows, rows, x_out, residual_out, tail, workers)
        apply_after_mlp(x_out, residual_out, all_rows, rows, step, after_mlp, workers)
