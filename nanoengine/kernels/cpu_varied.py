"""Decoder layers of Gemma 4 as one call on the CPU, beside `cpu_decoder.py`.

    x, residual ─ norm ─ qkv ─ norm, rotate, store (values are normed too; or q alone) ─ attend ─
                  o ─ norm ─ gate_up ─ gate ─ down ─ residual ─ * the layer's input ─ residual, 0

What is different: values are normed, without a weight; they may be the keys as projected, or keys
and values those that an earlier layer has stored; a layer has an input of its own, and a factor on
all that leaves it, which is why x is then 0. Called by `layers/cpu_varied.py`; the readable form is
`VariedLayer` of `models/varied.py`.

Legend: T tokens, L rows behind attention, N hidden size, H / K query / KV heads, D head dim.
"""

from __future__ import annotations

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.cpu_attention import attend, combine
from nanoengine.kernels.cpu_decoder import enter, finish_layer
from nanoengine.kernels.cpu_layers import (
    ALONE,
    FASTMATH,
    SMALL,
    gate_row,
    norm_row,
    rms_norm,
    rotate_and_store,
)
from nanoengine.kernels.held import of_place
from nanoengine.kernels.jit import by_types, compiled
from nanoengine.kernels.multiply import multiply
from nanoengine.kernels.pool import parallel_for


@compiled(fastmath=FASTMATH)
def _norm_values(projected, heads, ones, eps, of_keys, lo, hi):
    """The last heads are normed; where these are not projected, from the keys before them."""
    for t in range(lo, hi):
        for h in range(projected.shape[1]):
            source, out = projected[t, h], heads[t, h]
            for d in range(len(out)):
                out[d] = source[d]
        for h in range(heads.shape[1] - of_keys, heads.shape[1]):
            source = projected[t, h - heads.shape[1] + projected.shape[1]]
            norm_row(source, ones, eps, heads[t, h])


@compiled(fastmath=FASTMATH)
def _gate_inputs(gated, inputs, index, activation, all_rows, rows, lo, hi):
    for t in range(lo, hi):
        row = gated[t]
        gate_row(row, inputs[t if all_rows else rows[t], index], activation, row)


@by_types(FASTMATH)
def _add_input(x, residual, all_rows, rows, inputs, own, eps, workers):
    """x becomes what the layer's input adds to the residual, if there is one; else 0."""
    if len(own) == 0:

        def nothing(x, residual, all_rows, rows, inputs, own, eps, workers):
            for t in range(len(x)):
                for i in range(x.shape[1]):
                    x[t, i] = 0

        return nothing

    def added(x, residual, all_rows, rows, inputs, own, eps, workers):
        gate, projection, norm, index, activation = own
        gated = empty((len(x), inputs.shape[2]), x.dtype)
        multiply(residual, gate, gated, workers)
        parallel_for(
            _gate_inputs, len(x), 1 if gated.size <= SMALL else workers,
            (gated, inputs, index, activation, all_rows, rows),
        )  # fmt: skip
        multiply(gated, projection, x, workers)
        rms_norm(x, x, ALONE, norm, eps, x, workers)

    return added


@compiled(fastmath=FASTMATH)
def varied_layers(
    x, residual, all_rows, rows, x_on, residual_on, step, layers, first, last, workers
):
    """As `cpu_decoder.decoder_layers`, but for a fourth group of a layer's `first`: the KV heads
    that are stored, K or 0, whether values are keys as projected, and ones [D].

    Args:
        step: has the inputs of all layers [T, layers, I] besides.
        layers: has a fifth part of each layer besides: the weights gate and projection of its
            input, its norm, its place and the gate's number, or nothing; and the factor [1].
    """
    (table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats), tokens = (
        step[:9], len(x)
    )  # fmt: skip
    for i in range(first, last):
        k_cache, v_cache, of_attention, second, (of_input, factor) = of_place(layers, i)
        weights, kind, numbers, (of_keys, are_keys, ones) = of_attention
        norm, qkv, head_norm, operand, sinks = weights
        heads_and_dims, window, normed, before = kind
        eps, head_eps, scale, softcap = numbers
        num_heads, _, head_dim, block_size = heads_and_dims
        count = num_heads + 2 * of_keys
        stored = num_heads, of_keys, head_dim, block_size

        enter(x, residual, norm, eps, before, workers)
        projected = empty((tokens, count - of_keys * are_keys, head_dim), x.dtype)
        multiply(x, qkv, projected.reshape(tokens, -1), workers)
        heads = projected
        if of_keys:
            heads = empty((tokens, count, head_dim), x.dtype)
            parallel_for(
                _norm_values, tokens, 1 if heads.size <= SMALL else workers,
                (projected, heads, ones, eps, of_keys),
            )  # fmt: skip
        q = empty((tokens, num_heads, head_dim), x.dtype)
        rotate_and_store(
            heads, table, head_norm, head_eps, normed, slots, k_cache, v_cache, q, stored, workers
        )
        of_heads = empty(q.shape, x.dtype)
        attend(
            q, k_cache, v_cache, tables, tasks, bounds, heads_and_dims, scale, softcap, window,
            operand, sinks, of_heads, partial_out, partial_stats, workers,
        )  # fmt: skip
        if len(merges):
            combine(
                merges, parts, heads_and_dims, sinks, of_heads, partial_out, partial_stats, workers
            )
        attended = of_heads.reshape(tokens, num_heads * head_dim)
        finish_layer(attended, residual, before, all_rows, rows, x_on, residual_on, second, workers)
        for t in range(len(x_on)):
            for n in range(x_on.shape[1]):
                residual_on[t, n] += x_on[t, n]
        _add_input(x_on, residual_on, all_rows, rows, step[9], of_input, eps, workers)
        for t in range(len(x_on)):
            for n in range(x_on.shape[1]):
                residual_on[t, n] = (residual_on[t, n] + x_on[t, n]) * factor[0]
                x_on[t, n] = 0
