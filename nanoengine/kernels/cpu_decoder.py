"""One decoder layer on the CPU as one call: the kernels of its parts, in order.

    x, residual ─ norm ─ qkv ─ norm, rotate, store ─ attend ─     `attention_half`
                  o ─ norm ─ gate_up ─ gate ─ down ─ x, residual  `mlp_half`

Why one call: each kernel called from Python costs it about 10 us, and a layer is nine of them. Why
two halves: in the last layer not all rows go on from attention (`models/decoder.py`). Each kernel
is the one that the layer's parts call by themselves, so the results are the same bit for bit; the
readable form is `DecoderLayer.forward`, `tests/test_cpu_decoder.py` compares them.

Groups of arguments are plain tuples, which numba takes from Python in a quarter of the time of
named ones. A weight is a tuple too, whose form says what it is:

    (panels, bias)                                            float32: `cpu_linear.linear`
    (values, scales, bias)                                    int8: `cpu_quantized.linear8`
    (values, scales, group_scales, zeros, units, bias)        int4: `cpu_quantized.linear4`
    (values, bits, scales, zeros, group_size, bias)           weight-only: `linear_dequantized`

Perf: Python's share of a token of a model of 16 layers, one Zen 3 core: docs/experiments.md.

Legend: T tokens, L rows behind attention, N hidden size, I inner size of the MLP, H / K query / KV
heads, D head dim.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from nanoengine.kernels.cpu_attention import attend, combine
from nanoengine.kernels.cpu_layers import FASTMATH, add_rms_norm, gate, rotate_and_store
from nanoengine.kernels.cpu_linear import linear, linear_dequantized
from nanoengine.kernels.cpu_quantized import linear4, linear8
from nanoengine.kernels.jit import compiled


def multiply(x, weight, out, workers):
    """out[T, outputs] = x[T, inputs] times the weight, by the kernel for its form."""
    raise TypeError("multiply is for compiled code: call the kernel itself")


@overload(multiply)
def _multiply(x, weight, out, workers):
    """Chooses the kernel when the caller is compiled."""
    if len(weight) == 2:
        return lambda x, weight, out, workers: linear(x, weight[0], weight[1], out, workers)
    if len(weight) == 3:
        return lambda x, weight, out, workers: linear8(
            x, weight[0], weight[1], weight[2], out, workers
        )
    kernel = linear4 if isinstance(weight[1], types.Array) else linear_dequantized
    return lambda x, weight, out, workers: kernel(
        x, weight[0], weight[1], weight[2], weight[3], weight[4], weight[5], out, workers
    )


@compiled(fastmath=FASTMATH)
def attention_half(x, residual, step, k_cache, v_cache, half, workers):
    """Up to attention: [T, H * D]. The residual grows by x, and x is overwritten.

    Args:
        x, residual: [T, N], what the layer before added, and what was there before it.
        step: of `CPUBackend.step_arrays`.
        k_cache, v_cache: contiguous, [B, K, P, D].
        half: three groups: the weights norm [N], qkv, norm of heads [H + K, D], and attention's
            operand; (H, K, D, P), the window, whether heads are normed; the epsilons of the layer's
            and the heads' norms, the scale and softcap of scores.
    """
    (norm, qkv, head_norm, operand), (heads_and_dims, window, normed), numbers = half
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step
    eps, head_eps, scale, softcap = numbers
    num_heads, num_kv_heads, head_dim, _ = heads_and_dims
    tokens = len(x)

    add_rms_norm(x, residual, norm, eps, workers)
    projected = np.empty((tokens, (num_heads + 2 * num_kv_heads) * head_dim), x.dtype)
    multiply(x, qkv, projected, workers)
    q = np.empty((tokens, num_heads, head_dim), x.dtype)
    rotate_and_store(
        projected.reshape(tokens, num_heads + 2 * num_kv_heads, head_dim), table, head_norm,
        head_eps, normed, slots, k_cache, v_cache, q, heads_and_dims, workers,
    )  # fmt: skip
    attended = np.empty(q.shape, x.dtype)
    attend(
        q, k_cache, v_cache, tables, tasks, bounds, heads_and_dims, scale, softcap, window, operand,
        attended, partial_out, partial_stats,
    )  # fmt: skip
    if len(merges):
        combine(merges, parts, heads_and_dims, attended, partial_out, partial_stats)
    return attended.reshape(tokens, num_heads * head_dim)


@compiled(fastmath=FASTMATH)
def mlp_half(attended, x, residual, half, workers):
    """From attention on: x becomes what the MLP adds, the residual grows by what attention adds.

    Args:
        attended: [L, H * D], all rows of `attention_half`'s result, or some.
        x, residual: [L, N]; what x holds is not read.
        half: three groups: the weights o, norm [N], gate_up, down; I, whether the gate is GELU; the
            norm's epsilon.
    """
    (o, norm, gate_up, down), (inner, gelu), eps = half
    multiply(attended, o, x, workers)
    add_rms_norm(x, residual, norm, eps, workers)
    both = np.empty((len(x), 2 * inner), x.dtype)
    multiply(x, gate_up, both, workers)
    gated = np.empty((len(x), inner), x.dtype)
    gate(both, gelu, gated, workers)
    multiply(gated, down, x, workers)


@compiled(fastmath=FASTMATH)
def decoder_layer(x, residual, step, k_cache, v_cache, first, second, workers):
    """Both halves over the same rows, in place: x becomes what this layer adds last."""
    attended = attention_half(x, residual, step, k_cache, v_cache, first, workers)
    mlp_half(attended, x, residual, second, workers)
