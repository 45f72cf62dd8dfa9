"""MLA (multi-head latent attention) in `cpu_decoder.decoder_layers`.

    norm ─┬─ q (or q_a ─ norm ─ q_b) ─ RoPE, times key matrices ─┐
          └─ kv_a ─ norm, RoPE, store ───────────────────────── attend ─ times value matrices ─ o

Each head's matrices are small, so the panels of all heads are divided among workers. The reference
implementation is `MLAAttention` of `models/mla.py`.

Legend: T tokens, L rows after attention, N hidden size, H query heads, D elements of a key.
"""

from __future__ import annotations

from collections import namedtuple

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_microkernels import to_cache_dtype
from nanoengine.kernels.cpu_decoder import MIXERS
from nanoengine.kernels.cpu_layers import FASTMATH, NO_RESIDUAL, norm_row, rms_norm
from nanoengine.kernels.cpu_linear import FASTMATH as ONE_CHAIN
from nanoengine.kernels.cpu_linear import linear_panels
from nanoengine.kernels.cpu_mla import attend_latents
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.matmul import matmul
from nanoengine.kernels.pool import SMALL, parallel_for

MLAAttention = namedtuple(
    "MLAAttention",
    "query_a query kv_a kv_norm key_up value_up no_sinks nope_dim value_size padded_key"
    " padded_value sizes eps scale",
)
"""Operands of `attend_mla`."""


@compiled(fastmath=ONE_CHAIN)
def _panels_of_heads(x, weight, bias, out, lo, hi):
    panels = out.shape[2] // PANEL
    step = x.shape[2] * out.shape[2]  # elements of one head's matrix
    for head in range(lo // panels, -(-hi // panels)):
        first = head * panels
        linear_panels(
            x[head], weight[head * step :], bias, out[head], max(lo - first, 0),
            min(hi - first, panels),
        )  # fmt: skip


@compiled(fastmath=ONE_CHAIN)
def heads_times_matrices(x, weight, out, workers):
    """out[H, T, outputs] = x[H, T, inputs] times each head's matrix; weight: panels of all heads,
    padded to whole panels per head, and zeros for a bias."""
    panels, bias = weight
    operands = x, panels, bias, out
    parallel_for(_panels_of_heads, x.shape[0] * (out.shape[2] // PANEL), workers, operands)


@compiled(fastmath=FASTMATH)
def _swap_axes(source, out, width, lo, hi):
    for i in range(lo, hi):
        for j in range(len(out)):
            line, target = source[i, j], out[j, i]
            for d in range(width):
                target[d] = line[d]


@compiled(fastmath=FASTMATH)
def swap_axes(source, out, width, workers):
    """out[j, i, :width] = source[i, j, :width]."""
    workers = 1 if out.size <= SMALL else workers
    parallel_for(_swap_axes, out.shape[1], workers, (source, out, width))


@compiled(fastmath=FASTMATH, inline=True)
def _rope(x, cos, sin, out):
    half = len(cos)
    for i in range(half):
        out[i] = x[i] * cos[i] - x[half + i] * sin[i]
        out[half + i] = x[half + i] * cos[i] + x[i] * sin[i]


@compiled(fastmath=FASTMATH)
def _rope_tokens(q, keys, norm, eps, table, queries, slots, cache, nope_dim, lo, hi):
    """Applies RoPE to the last elements of queries and keys, norms the other elements of keys, and
    stores the keys."""
    half, size, rank = table.shape[1] // 2, keys.shape[1], len(norm)
    key = empty((size,), keys.dtype)
    for t in range(lo, hi):
        cos, sin = table[t, :half], table[t, half:]
        for h in range(queries.shape[1]):
            _rope(q[t, h, nope_dim:], cos, sin, queries[t, h, rank:])
        norm_row(keys[t, :rank], norm, eps, key[:rank])
        _rope(keys[t, rank:], cos, sin, key[rank:])
        line = cache[slots[t] * size : (slots[t] + 1) * size]
        for d in range(size):
            line[d] = to_cache_dtype(key[d], cache)


@specialize(FASTMATH)
def _project_queries(x, first, query, eps, out, workers):
    """out = x times q; or x times q_a, normed, times q_b."""
    if len(first) == 0:
        return lambda x, first, query, eps, out, workers: matmul(x, query, out, workers)

    def low_rank(x, first, query, eps, out, workers):
        query_a, norm = first
        low = empty((len(x), len(norm)), x.dtype)
        matmul(x, query_a, low, workers)
        rms_norm(low, low, NO_RESIDUAL, norm, eps, low, workers)
        matmul(low, query, out, workers)

    return low_rank


@compiled(fastmath=FASTMATH)
def attend_mla(x, step, layer_cache, mixer, workers):
    """Returns the attention output [T, H * value size] of MLA for normed rows x [T, N].

    Args:
        layer_cache: the cache, contiguous, [B, 1, P, D]; twice.
        mixer: a `MLAAttention`: the weights q_a and its norm, or (), q, kv_a, its norm, the
            heads' matrices for keys and for values, no sinks; the elements of a head's query
            without RoPE, and of its value; the outputs of the heads' matrices, padded to panels;
            sizes of `attend_latents`; the epsilon of the norms, and the scale of scores.
    """
    query_a, query, kv_a, kv_norm, key_up, value_up, no_sinks, nope_dim, value_size = mixer[:9]
    padded_key, padded_value, sizes, eps, scale = mixer[9:]
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step
    (num_heads, size, rank, _), tokens, cache = sizes, len(x), layer_cache[0]

    keys = empty((tokens, size), x.dtype)
    matmul(x, kv_a, keys, workers)
    projected = empty((tokens, num_heads * (nope_dim + size - rank)), x.dtype)
    _project_queries(x, query_a, query, eps, projected, workers)
    q = projected.reshape(tokens, num_heads, nope_dim + size - rank)
    queries = empty((tokens, num_heads, size), x.dtype)
    parallel_for(
        _rope_tokens, tokens, 1 if q.size <= SMALL else workers,
        (q, keys, kv_norm, eps, table, queries, slots, cache.reshape(-1), nope_dim),
    )  # fmt: skip
    head_queries = empty((num_heads, tokens, nope_dim), x.dtype)
    swap_axes(q, head_queries, nope_dim, workers)
    latents = empty((num_heads, tokens, padded_key), x.dtype)
    heads_times_matrices(head_queries, key_up, latents, workers)
    swap_axes(latents, queries, rank, workers)
    attended = empty((tokens, num_heads, rank), x.dtype)
    attend_latents(
        queries, cache, tables, tasks, bounds, merges, parts, partial_out, partial_stats, sizes,
        scale, no_sinks, attended, workers,
    )  # fmt: skip
    head_sums = empty((num_heads, tokens, rank), x.dtype)
    swap_axes(attended, head_sums, rank, workers)
    values = empty((num_heads, tokens, padded_value), x.dtype)
    heads_times_matrices(head_sums, value_up, values, workers)
    out = empty((tokens, num_heads * value_size), x.dtype)
    swap_axes(values, out.reshape(tokens, num_heads, value_size), value_size, workers)
    return out


MIXERS[MLAAttention] = attend_mla
