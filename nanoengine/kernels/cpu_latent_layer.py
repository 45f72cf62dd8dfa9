"""Decoder layers with latent attention as one call on the CPU, beside `cpu_decoder.py`.

    x, residual ─ norm ─┬─ q (or q_a ─ norm ─ q_b) ─ turn, times key matrices ─┐
                        └─ kv_a ─ norm, turn, store ───────────────────────── attend ─┐
    x, residual ─ down ─ gate ─ gate_up ─ norm ─ o ───────── times value matrices ────┘

Each head's matrices are small: all of them are one run of panels that workers share. Where the MLP
is another than the gated one, the call ends before it. Called by `layers/cpu_latent.py`; the
readable form is `LatentAttention` of `models/latent.py`.

Legend: T tokens, L rows behind attention, N hidden size, H query heads, D numbers of a key.
"""

from __future__ import annotations

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_tiles import stored
from nanoengine.kernels.cpu_decoder import gated_mlp
from nanoengine.kernels.cpu_latent import attend_latents
from nanoengine.kernels.cpu_layers import ADDS, ALONE, FASTMATH, SMALL, norm_row, rms_norm
from nanoengine.kernels.cpu_linear import FASTMATH as ONE_CHAIN
from nanoengine.kernels.cpu_linear import linear_panels
from nanoengine.kernels.held import of_place
from nanoengine.kernels.jit import by_types, compiled
from nanoengine.kernels.multiply import multiply
from nanoengine.kernels.pool import parallel_for
from nanoengine.kernels.tiles import PANEL


@compiled(fastmath=ONE_CHAIN)
def _panels_of_heads(x, weight, bias, out, lo, hi):
    panels = out.shape[2] // PANEL
    step = x.shape[2] * out.shape[2]  # numbers of one head's matrix
    for head in range(lo // panels, -(-hi // panels)):
        first = head * panels
        linear_panels(
            x[head], weight[head * step :], bias, out[head], max(lo - first, 0),
            min(hi - first, panels),
        )  # fmt: skip


@compiled(fastmath=ONE_CHAIN)
def heads_times_matrices(x, weight, out, workers):
    """out[H, T, outputs] = x[H, T, inputs] times each head's matrix; weight: panels of all heads,
    whole ones for each, and zeros for a bias."""
    panels, bias = weight
    operands = x, panels, bias, out
    parallel_for(_panels_of_heads, x.shape[0] * (out.shape[2] // PANEL), workers, operands)


@compiled(fastmath=FASTMATH)
def _swap(source, rows, out, width, lo, hi):
    for i in range(lo, hi):
        taken = rows[i] if len(rows) else i
        for j in range(len(out)):
            line, to = source[taken, j], out[j, i]
            for d in range(width):
                to[d] = line[d]


@compiled(fastmath=FASTMATH)
def swap(source, rows, out, width, workers):
    """out[j, i, :width] = source[rows[i], j, :width]; no rows: of i itself."""
    workers = 1 if out.size <= SMALL else workers
    parallel_for(_swap, out.shape[1], workers, (source, rows, out, width))


@compiled(fastmath=FASTMATH, part=True)
def _turn(x, cos, sin, out):
    half = len(cos)
    for i in range(half):
        out[i] = x[i] * cos[i] - x[half + i] * sin[i]
        out[half + i] = x[half + i] * cos[i] + x[i] * sin[i]


@compiled(fastmath=FASTMATH)
def _turn_tokens(q, keys, norm, eps, table, queries, slots, cache, still, lo, hi):
    """Turns what is turned of queries and keys, norms the rest of the keys, and stores these."""
    half, size, rank = table.shape[1] // 2, keys.shape[1], len(norm)
    key = empty((size,), keys.dtype)
    for t in range(lo, hi):
        cos, sin = table[t, :half], table[t, half:]
        for h in range(queries.shape[1]):
            _turn(q[t, h, still:], cos, sin, queries[t, h, rank:])
        norm_row(keys[t, :rank], norm, eps, key[:rank])
        _turn(keys[t, rank:], cos, sin, key[rank:])
        line = cache[slots[t] * size : (slots[t] + 1) * size]
        for d in range(size):
            line[d] = stored(key[d], cache)


@by_types(FASTMATH)
def _project_queries(x, first, query, eps, out, workers):
    """out = x times q, or times q_a, normed, times q_b."""
    if len(first) == 0:
        return lambda x, first, query, eps, out, workers: multiply(x, query, out, workers)

    def by_way(x, first, query, eps, out, workers):
        query_a, norm = first
        low = empty((len(x), len(norm)), x.dtype)
        multiply(x, query_a, low, workers)
        rms_norm(low, low, ALONE, norm, eps, low, workers)
        multiply(low, query, out, workers)

    return by_way


@compiled(fastmath=FASTMATH)
def _latent_layer(
    x, residual, all_rows, rows, x_on, residual_on, step, cache, first, second, workers
):  # fmt: skip
    """One of `latent_layers`.

    Args:
        cache: contiguous, [B, 1, P, D].
        first: the weights norm [N], q_a and its norm, or nothing, q, kv_a, its norm, the heads'
            matrices for keys and for values, no sinks; numbers of a head's query that are not
            turned and of its value, outputs of the heads' matrices with what fills panels; sizes of
            `attend_latents`; the epsilons of the layer's and the inner norms, the scale of scores,
            and the factor on what attention and MLP add.
        second: the weights o, norm before the MLP, and `gated_mlp`'s.
    """
    weights, (still, value_size, padded_key, padded_value), sizes, numbers = first
    norm, query_a, query, kv_a, kv_norm, key_up, value_up, no_sinks = weights
    eps, inner_eps, scale, factor = numbers
    table, slots, tables, tasks, bounds, merges, parts, partial_out, partial_stats = step
    (num_heads, size, rank, _), tokens = sizes, len(x)

    rms_norm(x, residual, ADDS, norm, eps, x, workers)
    keys = empty((tokens, size), x.dtype)
    multiply(x, kv_a, keys, workers)
    projected = empty((tokens, num_heads * (still + size - rank)), x.dtype)
    _project_queries(x, query_a, query, inner_eps, projected, workers)
    q = projected.reshape(tokens, num_heads, still + size - rank)
    queries = empty((tokens, num_heads, size), x.dtype)
    parallel_for(
        _turn_tokens, tokens, 1 if q.size <= SMALL else workers,
        (q, keys, kv_norm, inner_eps, table, queries, slots, cache.reshape(-1), still),
    )  # fmt: skip
    everyone = rows[:0]
    of_heads = empty((num_heads, tokens, still), x.dtype)
    swap(q, everyone, of_heads, still, workers)
    latents = empty((num_heads, tokens, padded_key), x.dtype)
    heads_times_matrices(of_heads, key_up, latents, workers)
    swap(latents, everyone, queries, rank, workers)
    attended = empty((tokens, num_heads, rank), x.dtype)
    attend_latents(
        queries, cache, tables, tasks, bounds, merges, parts, partial_out, partial_stats, sizes,
        scale, no_sinks, attended, workers,
    )  # fmt: skip

    if not all_rows:
        tokens = len(rows)
        for i in range(tokens):
            for d in range(x.shape[1]):
                residual_on[i, d] = residual[rows[i], d]
    summed = empty((num_heads, tokens, rank), x.dtype)
    swap(attended, rows if not all_rows else everyone, summed, rank, workers)
    values = empty((num_heads, tokens, padded_value), x.dtype)
    heads_times_matrices(summed, value_up, values, workers)
    kept = empty((tokens, num_heads, value_size), x.dtype)
    swap(values, everyone, kept, value_size, workers)
    o, mlp_norm, mlp = second
    multiply(kept.reshape(tokens, num_heads * value_size), o, x_on, workers)
    if factor != 1:
        for t in range(tokens):
            for i in range(x.shape[1]):
                x_on[t, i] *= factor
    rms_norm(x_on, residual_on, ADDS, mlp_norm, eps, x_on, workers)
    gated_mlp(x_on, mlp, eps, False, factor, workers)


@compiled(fastmath=FASTMATH)
def latent_layers(
    x, residual, all_rows, rows, x_on, residual_on, step, layers, first, last, workers
):
    """`cpu_decoder.decoder_layers` for layers with latent attention; `layers`: a `Held` of each
    layer's k_cache, v_cache, first and second, see `_latent_layer`."""
    for i in range(first, last):
        k_cache, _, attention, mlp = of_place(layers, i)
        _latent_layer(
            x, residual, all_rows, rows, x_on, residual_on, step, k_cache, attention, mlp, workers
        )
