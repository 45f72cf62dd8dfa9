"""One token of Mamba-2's rule, from projections to what each head reads, in one call.

The state of a sequence is one row of numbers: a matrix [E, V] for each head, then the last W - 1
inputs of the convolution, [W - 1, C]. A decode is as fast as this memory: each matrix is read once
and written once.

Each head of each token is a task of its own, which convolves its x; b and c of a group are
convolved before, in a task a group, so a token has the same bits in any batch. The readable forms
are `step` (`layers/mamba2.py`) and `CausalConv.step`.

Legend: T tokens, G groups, R heads a group, H = G * R, E / V size of a state's rows / of a head, C
channels, W kernel.
"""

from __future__ import annotations

from nanoengine.kernels.cpu_layers import FASTMATH
from nanoengine.kernels.exp import exp
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for


@compiled(fastmath=FASTMATH, part=True)
def _convolve(before, behind, base, row, weight, bias, first, out):
    """Convolves and gates the channels from `first` on, as many as `out` has, and shifts the inputs
    kept of them; `before` and `behind` may be the same state."""
    taps, channels = weight.shape
    count, one = len(out), out.dtype.type(1)
    for i in range(count):
        out[i] = bias[first + i] if len(bias) else out.dtype.type(0)
    for tap in range(taps - 1):
        at = base + tap * channels + first
        kept = before[at : at + count]
        factors = weight[tap, first : first + count]
        for i in range(count):
            out[i] += kept[i] * factors[i]
        if tap > 0:
            behind[at - channels : at - channels + count] = kept
    at = base + (taps - 2) * channels + first
    behind[at : at + count] = row[first : first + count]
    factors = weight[taps - 1, first : first + count]
    for i in range(count):
        x = out[i] + row[first + i] * factors[i]
        e = exp(-abs(x))
        out[i] = (x if x >= 0 else x * e) / (one + e)


@compiled(fastmath=FASTMATH)
def _mix_tasks(xbc, weight, bias, states, reads, writes, mixed, shape, lo, hi):
    """b and c of the groups, and x of the heads, of all tokens."""
    groups, heads, keys, values = shape
    inner, parts = groups * heads * values, groups * (heads + 2)
    base = groups * heads * keys * values
    for task in range(lo, hi):
        t, part = task // parts, task % parts
        first, count = part * values, values
        if part >= groups * heads:
            first, count = inner + (part - groups * heads) * keys, keys
        before, behind = states[reads[t]], states[writes[t]]
        out = mixed[t, first : first + count]
        _convolve(before, behind, base, xbc[t], weight, bias, first, out)


@compiled(fastmath=FASTMATH)
def _advance_tasks(mixed, dt, decay, d, states, reads, writes, out, shape, lo, hi):
    groups, heads, keys, values = shape
    inner = groups * heads * values
    for task in range(lo, hi):
        t, h = task // (groups * heads), task % (groups * heads)
        before, behind = states[reads[t]], states[writes[t]]
        x, read = mixed[t, h * values : (h + 1) * values], out[t, h]
        b_at = inner + h // heads * keys
        c_at = b_at + groups * keys
        kept, step = exp(decay[t, h]), dt[t, h]
        for i in range(values):
            read[i] = x[i] * d[h]
        for e in range(keys):
            at = (h * keys + e) * values
            row, new = before[at : at + values], behind[at : at + values]
            factor, query = mixed[t, b_at + e] * step, mixed[t, c_at + e]
            for i in range(values):
                number = row[i] * kept + x[i] * factor
                new[i] = number
                read[i] += number * query


@compiled(fastmath=FASTMATH)
def mamba_step(xbc, dt, decay, d, weight, bias, states, reads, writes, mixed, out, shape, workers):
    """Advances the states of T sequences by a token each.

    Args:
        xbc: [T, C], as projected; `weight` of the convolution [W, C], `bias` [C], or none.
        dt, decay: [T, H]; decays are logarithms. d: [H].
        states: [states, numbers of one]; a token starts from row `reads[t]` and its state goes to
            row `writes[t]`, which no other token reads or writes.
        mixed: [T, C], what is convolved.
        out: [T, H, V], what each head reads.
        shape: G, R, E and V.
    """
    groups, heads = shape[0], shape[1]
    parallel_for(
        _mix_tasks, len(xbc) * groups * (heads + 2), workers,
        (xbc, weight, bias, states, reads, writes, mixed, shape),
    )  # fmt: skip
    parallel_for(
        _advance_tasks, len(xbc) * groups * heads, workers,
        (mixed, dt, decay, d, states, reads, writes, out, shape),
    )  # fmt: skip
