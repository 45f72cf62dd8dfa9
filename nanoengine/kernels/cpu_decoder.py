"""Decoder layers on the CPU as one call: the kernels of their parts, in order.

    x, residual ─ norm ─ qkv ─ norm, rotate, store ─ attend ─
                  o ─ norm ─ gate_up ─ gate ─ down ─ x, residual

Some families have norms behind o and down too, or only there (`LayerPlan.norms`). Where the MLP is
a mixture of experts, `cpu_experts.py` computes it; where no kernel does, the call ends before it.
What stands in attention's place in others, and behind the MLP, has files of its own: `mixed` and
`leave` say which.

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
from nanoengine.kernels.held import of_place
from nanoengine.kernels.jit import by_types, compiled
from nanoengine.kernels.multiply import as_multiplied, multiply, multiply_panels, starts_panels
from nanoengine.kernels.pool import SMALL, parallel_for
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


@by_types(FASTMATH)
def activate(x, weight, activation, out, workers):
    """out [T, I] = what the gate makes of x times the weight of [2 I] outputs, or pairs of it.

    Why in one pass: what is multiplied would go to memory and back, twice as wide as the result.
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
    """A layer from its output projection on, see `decoder_layers`.

    Args:
        attended: [T, inputs of o].
        second: three groups: the weights o, norm behind the mixer, norm before the MLP; gate_up,
            down, norm behind the MLP, an empty array of what down multiplies (pairs only where I
            is a multiple of 16), I and the gate's number, or nothing; the norms' epsilon, whether
            they are behind, and the factor on what is added.
    """
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
def heads_of(projected, own, sizes, workers):
    """What `rotate_and_store` calls heads, of what was projected [T, columns]; `own` is that of
    `attend_heads`, sizes: (H, K, D, P)."""
    if len(own) == 0 or not isinstance(own[0], types.Array):
        return lambda projected, own, sizes, workers: projected
    from nanoengine.kernels.cpu_varied import norm_values

    def normed(projected, own, sizes, workers):
        heads = projected.reshape(len(projected), -1, sizes[2])
        return norm_values(heads, own, *sizes[:2], workers) if sizes[1] else heads

    return normed


@by_types()
def weigh(attended, projected, own, workers):
    """In place: attended [T, H * D] times the sigmoids of the gates before the heads, if any."""
    if len(own) == 0 or isinstance(own[0], types.Array):
        return lambda attended, projected, own, workers: None
    from nanoengine.kernels.cpu_gates import weigh_rows

    return lambda attended, projected, own, workers: weigh_rows(
        attended, projected, own[0], workers
    )


@compiled(fastmath=FASTMATH)
def attend_heads(x, step, memory, mixer, workers):
    """[T, H * D]: what attention gives normed rows x [T, N].

    Args:
        step: of `CPUBackend.step_arrays`, first.
        memory: k_cache and v_cache, contiguous, [B, K, P, D].
        mixer: three groups: qkv, the norm of heads [H + K, D], attention's operand, sinks [H], if
            any, and what some families have of their own; (H, K, D, P), the outputs of qkv, the KV
            heads that are stored, K or 0, the window, and how heads are normed; the epsilon of the
            heads' norms, the scale and softcap of scores. Their own is how many gates of what is
            attended qkv gives before the heads, H or H * D; or ones [D] and an epsilon: values are
            normed, and are the keys as projected where qkv gives none.
    """
    (qkv, head_norm, operand, sinks, own), kind, (eps, scale, softcap) = mixer
    heads_and_dims, columns, kept, window, normed = kind
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step[:9]
    (num_heads, _, head_dim, block_size), (k_cache, v_cache) = heads_and_dims, memory
    tokens, stored = len(x), (num_heads, kept, head_dim, block_size)

    projected = empty((tokens, columns), x.dtype)
    if projected.size <= SMALL:  # This thread will write them, see `rotate_and_store`.
        ask_for_slots(slots, k_cache, v_cache, stored)
    multiply(x, qkv, projected, workers)
    heads = heads_of(projected, own, stored, workers)
    q = empty((tokens, num_heads, head_dim), x.dtype)
    rotate_and_store(
        heads, table, head_norm, eps, normed, slots, k_cache, v_cache, q, stored, workers
    )
    attended = empty((tokens, num_heads * head_dim), x.dtype)
    of_heads = attended.reshape(q.shape)
    attend(
        q, k_cache, v_cache, tables, tasks, bounds, merges, parts, heads_and_dims, scale, softcap,
        window, operand, sinks, of_heads, partial_out, partial_stats, workers,
    )  # fmt: skip
    weigh(attended, projected, own, workers)
    return attended


@by_types()
def mixed(x, step, memory, mixer, workers):
    """[T, inputs of o]: what a mixer gives normed rows x [T, N]. The number of its parts says what
    it is: 2, a convolution between two gates; 3, attention; 4, latent attention; 5, the delta rule;
    6, Mamba-2's."""
    if len(mixer) == 4:
        from nanoengine.kernels.cpu_latent_layer import attend_by_latents as kernel
    elif len(mixer) == 6:
        from nanoengine.kernels.cpu_mamba import mamba as kernel
    elif len(mixer) == 5:
        from nanoengine.kernels.cpu_states import delta as kernel
    elif len(mixer) == 2:
        from nanoengine.kernels.cpu_states import convolution as kernel
    else:
        kernel = attend_heads
    return lambda x, step, memory, mixer, workers: kernel(x, step, memory, mixer, workers)


@by_types()
def leave(x, residual, all_rows, rows, step, last, workers):
    """What a layer with something behind its MLP, `last`, does with both results, in place."""
    if len(last) == 0:
        return lambda x, residual, all_rows, rows, step, last, workers: None
    from nanoengine.kernels.cpu_varied import leave_with_input as kernel

    return lambda x, residual, all_rows, rows, step, last, workers: kernel(
        x, residual, all_rows, rows, step[9], last, workers
    )


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
        step: what mixers of this kind need of it.
        layers: a `Held` of each layer's memory; its first norm [N], its mixer, the norms' epsilon,
            and whether norms are before mixer and MLP; what `finish_layer` calls second; and what
            `leave` calls last, or nothing. Norms that are not there are any array.
        first, last: the layers from first to last - 1 run.
    """
    for i in range(first, last):
        memory, (norm, mixer, (eps, before)), second, behind = of_place(layers, i)
        enter(x, residual, norm, eps, before, workers)
        found = mixed(x, step, memory, mixer, workers)
        finish_layer(found, residual, before, all_rows, rows, x_on, residual_on, second, workers)
        leave(x_on, residual_on, all_rows, rows, step, behind, workers)
