"""Mixture of experts on the CPU as one call: routing, sorting rows by expert, two products, the sum
per token, and a shared expert.

    hidden [T, N] ─ router ─ choose k experts each ─┐
    rows sorted by expert [T k, N] ◄────────────────┘
      ─ gate_up of each row's expert ─ gate ─ down ─ times its weight ─ added to its token

Only experts that a token chose are read. Work is divided by panels of weights across experts: each
worker takes a contiguous range of panels of equal cost. Register tiles and layouts are those in
`cpu_linear.py`, whose worker function is called once per expert. A row therefore has the same bits
as with its expert alone. A token's results are added in the order of experts: **a token's result
has the same bits alone and in any batch**.

Weights of a layer's experts have equal distances in memory (`layers/placement.py`). A weight is two
tuples. The first is as in `matmul.py`, but each array extends from the first expert to the last.
The second has the distance between experts in each array.

The reference implementation is `layers/moe.py`; `tests/layers/test_cpu_experts.py` compares the
two.

Legend: T tokens, N hidden size, E experts, k experts per token, R rows: tokens times k, I inner
size of an expert.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.cpu_layers import gate
from nanoengine.kernels.cpu_linear import linear, native_weight
from nanoengine.kernels.exp import exp
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.matmul import matmul, matmul_panels, to_operand
from nanoengine.kernels.pool import parallel_for

READ_COST = 6  # rows: reading a panel takes as long as multiplying it with so many rows
# Sorted rows per batch. Why few: the intermediate results stay in the cache, and the C library
# reuses its memory, so that the system does not map new pages each time.
MAX_ROWS = 512
SMALL = 16384  # elements; about 4 us of work, twice the cost of a parallel region
ROUTED = 512  # scores; about as much work

# Why no "contract": a weighted result is rounded before it is added, as torch does. No "nnan" and
# "ninf": a row with NaN or infinity must come out as NaN, there and only there.
FASTMATH = ("nsz",)


@specialize()
def expert_weight(weight, e):
    """The weight of expert e, in the form that its kernel reads."""
    forms = {
        2: lambda weight, e: (native_weight(weight[0][0][e * weight[1][0] :]),
                              weight[0][1][e * weight[1][1] :]),
        3: lambda weight, e: (weight[0][0][e * weight[1][0] :], weight[0][1][e * weight[1][1] :],
                              weight[0][2][e * weight[1][2] :]),
        6: lambda weight, e: (weight[0][0][e * weight[1][0] :], weight[0][1],
                              weight[0][2][e * weight[1][2] :], weight[0][3][e * weight[1][3] :],
                              weight[0][4], weight[0][5][e * weight[1][5] :]),
    }  # fmt: skip
    return forms[len(weight[0])]


@compiled(fastmath=FASTMATH, inline=True)
def _panels_before(edge, start, cost, panels):
    """How many of an expert's panels, each with this cost, begin before an edge of the shares."""
    return min(max((edge - start + cost - 1) // cost, 0), panels)


@compiled(fastmath=FASTMATH)
def _matmul_part(inputs, weight, starts, out, begin, end):
    """`_matmul` for the panels that begin between two points of the total cost."""
    panels, at = out.shape[1] // PANEL, 0
    for expert in range(len(starts) - 1):
        first, last = starts[expert], starts[expert + 1]
        if first == last:
            continue
        cost = last - first + READ_COST
        lo = _panels_before(begin, at, cost, panels)
        hi = _panels_before(end, at, cost, panels)
        if lo < hi:
            expert_panels = expert_weight(weight, expert)
            matmul_panels(inputs, first, last, expert_panels, 0, out[first:last], lo, hi)
        at += panels * cost


@compiled(fastmath=FASTMATH)
def _matmul(inputs, weight, starts, out, num_workers):
    """out[R, outputs] = each row times its expert's weight; `starts` has the experts' first
    rows."""
    panels, total = out.shape[1] // PANEL, 0
    for expert in range(len(starts) - 1):
        rows = starts[expert + 1] - starts[expert]
        if rows:
            total += panels * (rows + READ_COST)
    parallel_for(_matmul_part, total, num_workers, (inputs, weight, starts, out))


@compiled(fastmath=FASTMATH, inline=True)
def _softmax(row):
    largest, total = row[0], row.dtype.type(0)
    for i in range(1, len(row)):
        largest = row[i] if row[i] > largest else largest
    for i in range(len(row)):
        row[i] = exp(row[i] - largest)
        total += row[i]
    for i in range(len(row)):
        row[i] /= total


@compiled(fastmath=FASTMATH, inline=True)
def _sigmoid(row):
    one = row.dtype.type(1)
    for i in range(len(row)):
        e = exp(-abs(row[i]))
        row[i] = (one if row[i] >= 0 else e) / (one + e)


@compiled(fastmath=FASTMATH, inline=True)
def _mask_groups(preferred, groups, top_groups, compared):
    """Sets scores to -inf outside the `top_groups` best groups. Groups are compared by the sum of
    their `compared` (1 or 2) best scores."""
    size, lowest = len(preferred) // groups, -np.inf
    sums = empty((groups,), preferred.dtype)
    for g in range(groups):
        first, second = lowest, lowest
        for x in preferred[g * size : (g + 1) * size]:
            if x > first:
                first, second = x, first
            elif x > second:
                second = x
        sums[g] = first + second if compared == 2 else first
    chosen = zeros((groups,), np.bool_)
    for _ in range(top_groups):
        best = -1
        for g in range(groups):
            if not chosen[g] and (best < 0 or sums[g] > sums[best]):
                best = g
        chosen[best] = True
    for g in range(groups):
        if not chosen[g]:
            preferred[g * size : (g + 1) * size] = lowest


@compiled(fastmath=FASTMATH)
def _route(logits, correction, routing, ids, weights, lo, hi):
    sigmoid, groups, top_groups, compared, normalized, min_sum, epsilon, factor = routing
    num_experts, top_k = logits.shape[1], ids.shape[1]
    preferred = empty((num_experts,), logits.dtype)
    for t in range(lo, hi):
        scores, total = logits[t], logits.dtype.type(0)
        if sigmoid:
            _sigmoid(scores)
        else:
            _softmax(scores)
        for e in range(num_experts):
            preferred[e] = scores[e] + correction[e] if len(correction) else scores[e]
        if groups > 1:
            _mask_groups(preferred, groups, top_groups, compared)
        for i in range(top_k):
            best = 0
            for e in range(1, num_experts):
                best = e if preferred[e] > preferred[best] else best
            ids[t, i], weights[t, i] = best, scores[best]
            total += scores[best]
            preferred[best] = -np.inf
        total = (min_sum if total < min_sum else total) + epsilon
        for i in range(top_k):
            weights[t, i] = (weights[t, i] / total if normalized else weights[t, i]) * factor


@compiled(fastmath=FASTMATH)
def route(logits, correction, routing, ids, weights, num_workers):
    """ids, weights [T, k]: the experts with the largest scores, and these scores; see `Router`.

    logits: [T, E], which become scores. Of equal scores the first is chosen. The other arguments
    are as in `mixture`.
    """
    operands = logits, correction, routing, ids, weights
    parallel_for(_route, len(logits), 1 if logits.size <= ROUTED else num_workers, operands)


@compiled(fastmath=FASTMATH)
def _sorted_by_expert(ids, num_experts):
    """order [R]: indices into the flat ids [T, k], sorted by expert, in ascending order per expert;
    starts [E + 1]: where each expert begins."""
    flat = ids.reshape(-1)
    starts, order = zeros((num_experts + 1,), np.int64), empty((len(flat),), np.int64)
    for e in flat:
        starts[e + 1] += 1
    for e in range(num_experts):
        starts[e + 1] += starts[e]
    next_row = starts.copy()
    for i in range(len(flat)):
        order[next_row[flat[i]]] = i
        next_row[flat[i]] += 1
    return order, starts


@compiled(fastmath=FASTMATH)
def _gather(x, order, top_k, out, lo, hi):
    for r in range(lo, hi):
        source, row = x[order[r] // top_k], out[r]
        for i in range(len(row)):
            row[i] = source[i]


@compiled(fastmath=FASTMATH)
def gather(x, order, top_k, num_workers):
    """[R, K]: the rows of x [T, K] that belong to the tokens of the indices `order`."""
    out = empty((len(order), x.shape[1]), x.dtype)
    workers = 1 if out.size <= SMALL else num_workers
    parallel_for(_gather, len(out), workers, (x, order, top_k, out))
    return out


@specialize()
def gather_all(inputs, order, top_k, workers):
    """`gather` of each array of a `to_operand`. Why after the conversion: a token has k equal
    rows."""
    if len(inputs) == 0:
        return lambda inputs, order, top_k, workers: ()
    return lambda inputs, order, top_k, workers: (
        gather(inputs[0], order, top_k, workers), *gather_all(inputs[1:], order, top_k, workers)
    )  # fmt: skip


@compiled(fastmath=FASTMATH)
def _add(results, order, top_k, weights, out, lo, hi):
    """out[token] += weight * result in the columns lo ... hi - 1, in the order of the rows."""
    flat = weights.reshape(-1)
    for r in range(len(results)):
        row, result, weight = out[order[r] // top_k], results[r], flat[order[r]]
        for i in range(lo, hi):
            row[i] += result[i] * weight


@compiled(fastmath=FASTMATH)
def _batch_end(starts, first):
    """End of the batch of rows that begins at `first`: the end of an expert's rows, or MAX_ROWS
    later within an expert that has more rows."""
    last, expert = first + MAX_ROWS, len(starts) - 1
    while starts[expert] > last:
        expert -= 1
    return starts[expert] if starts[expert] > first else last


@compiled(fastmath=FASTMATH)
def add_experts(x, ids, weights, gate_up, down, num_experts, inner, activation, out, num_workers):
    """out [T, N] += the results of each token's experts, times their weights.

    x: [T, N]; ids, weights: [T, k]; gate_up, down: weights of [2 I, N] and [N, I] of all experts.
    """
    top_k = ids.shape[1]
    order, starts = _sorted_by_expert(ids, num_experts)
    inputs, last = to_operand(x, gate_up[0], num_workers), 0
    while last < len(order):
        first, last = last, _batch_end(starts, last)
        batch = order[first:last]
        edges = np.minimum(np.maximum(starts - first, 0), len(batch))
        results = empty((len(batch), x.shape[1]), x.dtype)
        gate_up_out = empty((len(batch), 2 * inner), x.dtype)
        gated = empty((len(batch), inner), x.dtype)
        rows = gather_all(inputs, batch, top_k, num_workers)
        _matmul(rows, gate_up, edges, gate_up_out, num_workers)
        gate(gate_up_out, activation, gated, num_workers)
        _matmul(to_operand(gated, down[0], num_workers), down, edges, results, num_workers)
        workers = 1 if results.size <= SMALL else num_workers
        parallel_for(_add, out.shape[1], workers, (results, batch, top_k, weights, out))


@compiled(fastmath=FASTMATH)
def _add_weighted(results, scores, out, lo, hi):
    for t in range(lo, hi):
        row, result, score = out[t], results[t], scores[t, 0]
        for i in range(len(row)):
            row[i] += result[i] * score


@specialize(FASTMATH)
def score_rows(x, gate, scores, workers):
    """scores [T, 1] = the sigmoid of the gate's linear layer, or 1 without a gate."""

    def ones(x, gate, scores, workers):
        for t in range(len(scores)):
            scores[t, 0] = 1

    def sigmoids(x, gate, scores, workers):
        matmul(x, gate, scores, workers)
        _sigmoid(scores.reshape(-1))

    return sigmoids if len(gate) else ones


@specialize(FASTMATH)
def add_shared(x, shared, out, workers):
    """out [T, N] += the output of a gated MLP, times its gate's score if there is one; see
    `mixture`."""
    if len(shared) == 0:
        return lambda x, shared, out, workers: None

    def add_output(x, shared, out, workers):
        gate_up, down, inner, activation, gate_of_rows = shared
        gate_up_out, gated = empty((len(x), 2 * inner), x.dtype), empty((len(x), inner), x.dtype)
        results, scores = empty(x.shape, x.dtype), empty((len(x), 1), x.dtype)
        matmul(x, gate_up, gate_up_out, workers)
        gate(gate_up_out, activation, gated, workers)
        matmul(gated, down, results, workers)
        score_rows(x, gate_of_rows, scores, workers)
        parallel_for(
            _add_weighted, len(x), 1 if x.size <= SMALL else workers, (results, scores, out)
        )

    return add_output


@compiled(fastmath=FASTMATH)
def mixture(x, router, correction, routing, gate_up, down, sizes, shared, out, num_workers):
    """out [T, N] = the output of a mixture of experts for x [T, N].

    Args:
        router: panels and bias of its linear layer.
        correction: [E], or empty.
        routing: whether scores are sigmoids; the number of groups, how many of them each token
            keeps, and by how many experts they are compared; whether weights are divided by their
            sum, the minimum of this sum, and an epsilon added to it; a factor on the weights.
        sizes: E, k, I, and the index of the activation in `cpu_layers.GATES`.
        shared: (), or for an expert that every token uses: the weights of [2 J, N] and [N, J], J,
            the index of the activation, and the weight of [1, N] whose output gates it, or ().
    """
    num_experts, top_k, inner, activation = sizes
    logits = empty((len(x), num_experts), x.dtype)
    linear(x, router[0], router[1], logits, num_workers)
    ids, weights = empty((len(x), top_k), np.int64), empty((len(x), top_k), x.dtype)
    route(logits, correction, routing, ids, weights, num_workers)
    out[:] = 0
    add_experts(x, ids, weights, gate_up, down, num_experts, inner, activation, out, num_workers)
    add_shared(x, shared, out, num_workers)
