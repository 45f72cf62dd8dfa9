"""The operations of Gemma 4 layers that other families don't have, in `cpu_decoder.decoder_layers`.

    x, residual ─ norm ─ qkv ─ norm, RoPE, store (values are normed too; or q alone) ─ attend ─
                  o ─ norm ─ gate_up ─ gate ─ down ─ residual ─ * per-layer input ─ residual, 0

Values are normed, without a weight. They may be the projected keys, or an earlier layer's keys and
values may be reused. Each layer has a per-layer input, and a factor on its whole output: the output
is the residual then, and x is 0. The reference implementation is `Gemma4Layer` of
`models/gemma4.py`.

Legend: T tokens, L rows after attention, N hidden size, H / K query / KV heads, D head dim.
"""

from __future__ import annotations

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.cpu_layers import FASTMATH, NO_RESIDUAL, gate_row, norm_row, rms_norm
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.matmul import matmul
from nanoengine.kernels.pool import SMALL, parallel_for


@compiled(fastmath=FASTMATH)
def _norm_values(projected, heads, ones, eps, num_kv_heads, lo, hi):
    """Norms the value heads, which are last; if they are not projected, they are the normed
    keys."""
    for t in range(lo, hi):
        for h in range(projected.shape[1]):
            source, out = projected[t, h], heads[t, h]
            for d in range(len(out)):
                out[d] = source[d]
        for h in range(heads.shape[1] - num_kv_heads, heads.shape[1]):
            source = projected[t, h - heads.shape[1] + projected.shape[1]]
            norm_row(source, ones, eps, heads[t, h])


@compiled(fastmath=FASTMATH)
def norm_values(projected, value_norm, num_heads, num_kv_heads, workers):
    """Returns heads [T, H + 2 K, D] with normed values, from projected heads, which have K fewer
    heads if the values are the keys; `value_norm`: of `cpu_decoder.Attention`."""
    (ones, eps), (tokens, _, size) = value_norm, projected.shape
    heads = empty((tokens, num_heads + 2 * num_kv_heads, size), projected.dtype)
    parallel_for(
        _norm_values, tokens, 1 if heads.size <= SMALL else workers,
        (projected, heads, ones, eps, num_kv_heads),
    )  # fmt: skip
    return heads


@compiled(fastmath=FASTMATH)
def _gate_inputs(gated, inputs, index, activation, all_rows, rows, lo, hi):
    for t in range(lo, hi):
        row = gated[t]
        gate_row(row, inputs[t if all_rows else rows[t], index], activation, row)


@specialize(FASTMATH)
def _add_input(x, residual, all_rows, rows, inputs, operands, eps, workers):
    """Adds the contribution of the per-layer input to the residual, if there is one; x is a
    buffer."""
    if len(operands) == 0:
        return lambda x, residual, all_rows, rows, inputs, operands, eps, workers: None

    def add_contribution(x, residual, all_rows, rows, inputs, operands, eps, workers):
        gate, projection, norm, index, activation = operands
        gated = empty((len(x), inputs.shape[2]), x.dtype)
        matmul(residual, gate, gated, workers)
        parallel_for(
            _gate_inputs, len(x), 1 if gated.size <= SMALL else workers,
            (gated, inputs, index, activation, all_rows, rows),
        )  # fmt: skip
        matmul(gated, projection, x, workers)
        rms_norm(x, x, NO_RESIDUAL, norm, eps, x, workers)
        for t in range(len(x)):
            for n in range(x.shape[1]):
                residual[t, n] += x[t, n]

    return add_contribution


@compiled(fastmath=FASTMATH)
def add_per_layer_input(x, residual, all_rows, rows, inputs, after_mlp, workers):
    """In place: adds x and the contribution of the per-layer input to the residual; x becomes 0.

    Args:
        inputs: per-layer inputs of all layers, [T, layers, I].
        after_mlp: the weights gate and projection of the per-layer input, its norm, its index and
            the index of the activation, or (); the factor [1] on the output; the norm's epsilon.
    """
    operands, factor, eps = after_mlp
    for t in range(len(x)):
        for n in range(x.shape[1]):
            residual[t, n] += x[t, n]
    _add_input(x, residual, all_rows, rows, inputs, operands, eps, workers)
    for t in range(len(x)):
        for n in range(x.shape[1]):
            residual[t, n] *= factor[0]
            x[t, n] = 0
