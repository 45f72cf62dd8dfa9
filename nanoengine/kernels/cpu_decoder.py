"""Decoder layers on the CPU as one call: the kernels of their parts, in order.

    x, residual ─ norm ─ qkv ─ norm, rotate, store ─ attend ─
                  o ─ norm ─ gate_up ─ gate ─ down ─ x, residual

Some families have norms behind o and down too, or only there (`LayerPlan.norms`). Where the MLP is
a mixture of experts, `cpu_experts.py` computes it; where no kernel does, the call ends before it.

Why one call: each kernel called from Python costs it about 10 us, and a layer is nine of them. Each
is the one that the layer's parts call by themselves, so the results are the same bit for bit; the
readable form is `DecoderLayer.forward`, `tests/layers/test_cpu_decoder.py` compares them.

What is the same at each step comes from a `Held`. Weights are as in `multiply.py`.

Perf: Python's share of a token of a model of 16 layers, one Zen 3 core: docs/experiments.md.

Legend: T tokens, L rows behind attention, N hidden size, I inner size of the MLP, H / K query / KV
heads, D head dim.
"""

from __future__ import annotations

import numpy as np
from numba import types

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_tiles import numbers_a_word, scale_row
from nanoengine.kernels.cpu_attention import ask_for_slots, attend, combine
from nanoengine.kernels.cpu_layers import (
    ADDS,
    ALONE,
    FASTMATH,
    SMALL,
    gate,
    gate_row,
    rms_norm,
    rotate_and_store,
)
from nanoengine.kernels.cpu_linear import (
    ROW_BLOCK,
    as_read,
    cut,
    linear_panels,
    rounded_rows,
    rows_of_block,
    share_of_cut,
)
from nanoengine.kernels.cpu_quantized import linear8_panels, quantize_rows, sums8
from nanoengine.kernels.held import of_place
from nanoengine.kernels.jit import by_types, compiled
from nanoengine.kernels.multiply import multiply
from nanoengine.kernels.pool import parallel_for
from nanoengine.kernels.tiles import PANEL, PANELS

# Panels whose gates are made at once: more would need much memory. Not a power of two: rows would
# share a few sets of the cache.
GATED = 120


@compiled(fastmath=FASTMATH, part=True)
def enter(x, residual, norm, eps, before, workers):
    """In place: residual += x, and x becomes the norm of it, or without a norm the same."""
    if before:
        rms_norm(x, residual, ADDS, norm, eps, x, workers)
    else:
        for t in range(len(x)):
            for i in range(x.shape[1]):
                residual[t, i] += x[t, i]
                x[t, i] = residual[t, i]


@compiled(fastmath=FASTMATH, part=True)
def _leave(x, norm, eps, behind, scale, workers):
    """In place: what attention or MLP adds, normed where a norm is behind it, times the scale."""
    if behind:
        rms_norm(x, x, ALONE, norm, eps, x, workers)
    if scale != 1:
        for t in range(len(x)):
            for i in range(x.shape[1]):
                x[t, i] *= scale


@by_types()
def as_multiplied(x, weight, workers):
    """x [T, inputs] as `some_panels` reads it: a tuple of arrays, rows first."""

    def of_bytes(x, weight, workers):
        values, scales, offsets = quantize_rows(x, workers)
        return values, scales, sums8(offsets)

    if weight[0].dtype == types.uint32:
        return lambda x, weight, workers: (rounded_rows(x, workers),)
    return of_bytes if len(weight) == 3 else lambda x, weight, workers: (x,)


@by_types()
def some_panels(inputs, first, last, weight, panel, count, out):
    """out [R, 16 * count] = rows first ... last - 1 times `count` panels of the weight."""

    def of_floats(inputs, first, last, weight, panel, count, out):
        x, (w, bias) = inputs[0][first:last], weight
        w = as_read(w)[panel * (len(w) // (len(bias) // PANEL)) :]
        linear_panels(x, w, bias[panel * PANEL :], out, 0, count)

    def of_bytes(inputs, first, last, weight, panel, count, out):
        (values, scales, starts), (w, w_scales, bias) = inputs, weight
        linear8_panels(
            values[first:last], scales[first:last], starts[first:last],
            w[panel * PANEL * values.shape[1] :], w_scales[panel * PANEL :], bias[panel * PANEL :],
            out, 0, count,
        )  # fmt: skip

    return of_bytes if len(weight) == 3 else of_floats


@by_types()
def keep_gated(gates, ups, activation, row, out, at):
    """What the gate makes of two rows, from number `at` of out on; by way of `row` where out is of
    pairs of bfloat16."""

    def floats(gates, ups, activation, row, out, at):
        gate_row(gates, ups, activation, out[at : at + len(gates)])

    def pairs(gates, ups, activation, row, out, at):
        gate_row(gates, ups, activation, row)
        scale_row(row, 0, np.float32(1), out, at // 2, len(row))

    return pairs if out.dtype == types.uint32 else floats


@compiled(fastmath=FASTMATH)
def _keep_rows(both, activation, row, out, at):
    """`keep_gated` for each row of out. Why a kernel: it borrows what `_activate_panels` has made,
    and each row would count references to it."""
    for t in range(len(out)):
        keep_gated(both[0, t], both[1, t], activation, row, out[t], at)


@compiled(fastmath=FASTMATH)
def _activate_panels(inputs, weight, activation, out, tiles, parts, lo, hi):
    """`activate` for things lo ... hi - 1 of a `cut` by tiles of gates."""
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
                    some_panels(inputs, first, last, weight, i * inner + panel, count, both[i])
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


@by_types(FASTMATH)
def activate(x, weight, activation, out, workers):
    """out [T, I] = what the gate makes of x times the weight of [2 I] outputs, or pairs of it.

    Why in one pass: what is multiplied would go to memory and back, twice as wide as the result.
    """

    def together(x, weight, activation, out, workers):
        if out.shape[1] % PANEL:
            _multiply_and_gate(x, weight, activation, out, workers)
        else:
            _in_panels(x, weight, activation, out, workers)

    if out.dtype == types.uint32:
        return lambda x, weight, activation, out, workers: _in_panels(
            x, weight, activation, out, workers
        )
    in_groups = weight[0].dtype in (types.uint8, types.int8) and len(weight) == 2
    if not in_groups and len(weight) <= 3:
        return together
    return lambda x, weight, activation, out, workers: _multiply_and_gate(
        x, weight, activation, out, workers
    )


@by_types(FASTMATH)
def gated_mlp(x, mlp, eps, behind, factor, workers):
    """In place: x [L, N] becomes what a gated MLP gives, or a mixture of experts; nothing where
    `mlp` is ()."""
    if len(mlp) == 0:
        return lambda x, mlp, eps, behind, factor, workers: None
    if isinstance(mlp[-1], types.Array):
        from nanoengine.kernels.cpu_experts import mixture

        def mixed(x, mlp, eps, behind, factor, workers):
            router, correction, routing, gate_up, down, sizes, shared, output_norm = mlp
            out = empty(x.shape, x.dtype)
            mixture(x, router, correction, routing, gate_up, down, sizes, shared, out, workers)
            for t in range(len(x)):
                for i in range(x.shape[1]):
                    x[t, i] = out[t, i]
            _leave(x, output_norm, eps, behind, factor, workers)

        return mixed

    def computed(x, mlp, eps, behind, factor, workers):
        gate_up, down, output_norm, operand, inner, activation = mlp
        gated = empty((len(x), inner // numbers_a_word(operand)), operand.dtype)
        activate(x, gate_up, activation, gated, workers)
        multiply(gated, down, x, workers)
        _leave(x, output_norm, eps, behind, factor, workers)

    return computed


@compiled(fastmath=FASTMATH)
def finish_layer(
    attended, residual, before, all_rows, rows, x_on, residual_on, second, workers
):  # fmt: skip
    """A layer from its output projection on, see `decoder_layers`; attended: [T, its inputs]."""
    if not all_rows:
        kept = empty((len(rows), attended.shape[1]), attended.dtype)
        for i in range(len(rows)):  # Why loops: numba's own copies take seconds to compile
            for d in range(attended.shape[1]):
                kept[i, d] = attended[rows[i], d]
            for d in range(residual.shape[1]):
                residual_on[i, d] = residual[rows[i], d]
        attended = kept
    (o, attention_output_norm, mlp_norm), mlp, (mlp_eps, behind, factor) = second
    multiply(attended, o, x_on, workers)
    _leave(x_on, attention_output_norm, mlp_eps, behind, factor, workers)
    enter(x_on, residual_on, mlp_norm, mlp_eps, before, workers)
    gated_mlp(x_on, mlp, mlp_eps, behind, factor, workers)


@by_types()
def heads_of(projected, gates, size, workers):
    """The query, key and value heads of what was projected, behind gates [T, size], if any."""
    if len(gates) == 0:
        return lambda projected, gates, size, workers: projected
    from nanoengine.kernels.cpu_gates import columns_from

    return lambda projected, gates, size, workers: columns_from(projected, size, workers)


@by_types()
def weigh(attended, projected, gates, workers):
    """In place: attended [T, H * D] times the sigmoids of the gates before the heads, if any."""
    if len(gates) == 0:
        return lambda attended, projected, gates, workers: None
    from nanoengine.kernels.cpu_gates import weigh_rows

    return lambda attended, projected, gates, workers: weigh_rows(attended, projected, workers)


@compiled(fastmath=FASTMATH)
def _decoder_layer(
    x, residual, all_rows, rows, x_on, residual_on, step, k_cache, v_cache, first, second, workers
):  # fmt: skip
    """One of `decoder_layers`.

    Args:
        k_cache, v_cache: contiguous, [B, K, P, D].
        first: three groups: the weights norm [N], qkv, norm of heads [H + K, D], attention's
            operand, and sinks [H], if any; (H, K, D, P), the window, how heads are normed,
            whether norms are before attention and MLP; the epsilons of the layer's and the heads'
            norms, the scale and softcap of scores. A fourth, of anything: qkv gives H gates of
            what is attended before the heads.
        second: three groups: the weights o, norm behind attention, norm before the MLP; gate_up,
            down, norm behind the MLP, an empty array of what down multiplies (pairs only where I
            is a multiple of 16), I and the gate's number, or nothing; the norms' epsilon, whether
            they are behind, and the factor on what is added. Norms that are not there are any
            array.
    """
    weights, (heads_and_dims, window, normed, before), numbers = first[:3]
    norm, qkv, head_norm, operand, sinks = weights
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step
    eps, head_eps, scale, softcap = numbers
    num_heads, num_kv_heads, head_dim, _ = heads_and_dims
    tokens, gates = len(x), first[3:]
    of_gates = len(gates) * num_heads * head_dim

    projected = empty((tokens, of_gates + (num_heads + 2 * num_kv_heads) * head_dim), x.dtype)
    if projected.size <= SMALL:  # This thread will write them, see `rotate_and_store`.
        ask_for_slots(slots, k_cache, v_cache, heads_and_dims)
    enter(x, residual, norm, eps, before, workers)
    multiply(x, qkv, projected, workers)
    heads = heads_of(projected, gates, of_gates, workers)
    q = empty((tokens, num_heads, head_dim), x.dtype)
    rotate_and_store(
        heads.reshape(tokens, num_heads + 2 * num_kv_heads, head_dim), table, head_norm,
        head_eps, normed, slots, k_cache, v_cache, q, heads_and_dims, workers,
    )  # fmt: skip
    of_heads = empty(q.shape, x.dtype)
    attend(
        q, k_cache, v_cache, tables, tasks, bounds, heads_and_dims, scale, softcap, window, operand,
        sinks, of_heads, partial_out, partial_stats, workers,
    )  # fmt: skip
    if len(merges):
        combine(merges, parts, heads_and_dims, sinks, of_heads, partial_out, partial_stats, workers)
    attended = of_heads.reshape(tokens, num_heads * head_dim)
    weigh(attended, projected, gates, workers)
    finish_layer(attended, residual, before, all_rows, rows, x_on, residual_on, second, workers)


@compiled(fastmath=FASTMATH)
def decoder_layers(
    x, residual, all_rows, rows, x_on, residual_on, step, layers, first, last, workers
):
    """In place: x becomes what the last layer adds last, the residual grows by what came before it.

    In a model's last layer not all rows go on from attention (`models/decoder.py`), and some go on
    several times: both results are then in arrays of their own.

    Args:
        x, residual: [T, N], what the layer before added, and what was there before it.
        all_rows, rows: whether all go on; if not, which: [L] int64. Then only one layer runs.
        x_on, residual_on: [L, N], the results where not all rows go on; else x and residual.
        step: of `CPUBackend.step_arrays`.
        layers: a `Held` of each layer's k_cache, v_cache, first and second, see `_decoder_layer`.
        first, last: the layers from first to last - 1 run.
    """
    for i in range(first, last):
        k_cache, v_cache, attention, mlp = of_place(layers, i)
        _decoder_layer(
            x, residual, all_rows, rows, x_on, residual_on, step, k_cache, v_cache, attention, mlp,
            workers,
        )  # fmt: skip
