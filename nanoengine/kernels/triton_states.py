"""Layers that keep states on a GPU, in Triton: the convolution and the gated delta rule.

    conv_step_kernel    a token of each of several sequences: its taps, and the inputs move by one
    delta_step_kernel   the same tokens: a matrix forgets, learns, is asked; read and written once
    delta_scan_kernel   many tokens of one sequence: a matrix goes through all of their chunks

Called by `layers/triton_states.py` alone. The readable forms are `CausalConv.step`
(`layers/causal_conv.py`), `step` and `through_chunks` (`layers/delta_rule.py`). A program owns what
it writes of a state, and reads nothing else of it, so a sequence may go on in the state that it
starts from.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.

Legend: D tokens, C channels, H / G value / key heads, E / V size of a key / value, P tokens of a
chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_step_kernel(
    out, x, states, weight, bias, reads, writes,
    X_ROW: tl.constexpr, STATE_ROW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [D, C] = the taps of each token, added from the oldest on. Grid: [D, C / WIDTH rounded
    up].

    states: rows of STATE_ROW numbers, of which the first [TAPS - 1, C] are the inputs kept; token t
    starts from row reads[t], and its own go to row writes[t]. weight [TAPS, C]; bias [C].
    """
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = channels < CHANNELS
    before = states + tl.load(reads + token) * STATE_ROW + channels
    behind = states + tl.load(writes + token) * STATE_ROW + channels
    total = tl.full([WIDTH], 0, states.dtype.element_ty)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            value = tl.load(before + tap * CHANNELS, mask=mask, other=0.0)
        else:
            value = tl.load(x + token * X_ROW + channels, mask=mask, other=0.0)
        value = value.to(states.dtype.element_ty)
        if tap > 0:
            tl.store(behind + (tap - 1) * CHANNELS, value, mask=mask)
        factor = tl.load(weight + tap * CHANNELS + channels, mask=mask, other=0.0)
        total += value * factor.to(states.dtype.element_ty)
    if BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(states.dtype.element_ty)
    tl.store(out + token * CHANNELS + channels, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def delta_step_kernel(
    out, mixed, decay, beta, states, reads, writes,
    STATE_ROW: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [D, H, V] = what each head reads of its matrix. Grid: [D, H, V / WIDTH rounded up].

    mixed [D, 2 G E + H V]: queries, keys and values as the convolution left them, without their
    activation. decay, beta [D, H]; decays are logarithms. states: rows of STATE_ROW numbers, of
    which the first [H, E, V] are the matrices. KEYS: E rounded up to a power of two.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.arange(0, KEYS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_key, in_value = rows < KEY, columns < VALUE
    kind = states.dtype.element_ty
    own = mixed + token * (2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE)
    at = head // (VALUE_HEADS // KEY_HEADS) * KEY + rows
    q = _silu(tl.load(own + at, mask=in_key, other=0.0).to(kind))
    k = _silu(tl.load(own + KEY_HEADS * KEY + at, mask=in_key, other=0.0).to(kind))
    values = own + 2 * KEY_HEADS * KEY + head * VALUE + columns
    v = _silu(tl.load(values, mask=in_value, other=0.0).to(kind))
    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) / tl.sqrt(KEY * 1.0)
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    kept = tl.exp(tl.load(decay + token * VALUE_HEADS + head))
    learns = tl.load(beta + token * VALUE_HEADS + head)
    inside = in_key[:, None] & in_value[None, :]
    place = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
    before = states + tl.load(reads + token) * STATE_ROW + place
    state = tl.load(before, mask=inside, other=0.0) * kept
    change = (v - tl.sum(state * k[:, None], 0)) * learns
    state += k[:, None] * change[None, :]
    tl.store(states + tl.load(writes + token) * STATE_ROW + place, state, mask=inside)
    read = tl.sum(state * q[:, None], 0)
    tl.store(out + (token * VALUE_HEADS + head) * VALUE + columns, read, mask=in_value)


@triton.jit(do_not_specialize=["chunks"])
def delta_scan_kernel(
    out, state, read, recalls, write, values, attended, forget, chunks,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [C, H, P, V]; state [H, E, V] becomes the one behind the last chunk. Grid: [H, V / WIDTH
    rounded up].

    What each chunk does to a state was found before (`scan`): read, recalls and write [C, H, P, E],
    values [C, H, P, V], attended [C, H, P, P], forget [C, H]. The state stays in the GPU's cache,
    and passes through registers in slices of K keys.
    """
    head = tl.program_id(0)
    columns, tokens = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, P)
    in_value = (columns < VALUE)[None, :]
    for chunk in range(chunks):
        first = (chunk * HEADS + head).to(tl.int64) * P
        cells = (first + tokens)[:, None] * VALUE + columns[None, :]
        new = tl.load(values + cells, mask=in_value, other=0.0)
        found = tl.full([P, WIDTH], 0, tl.float32)
        for start in range(0, KEY, K):
            rows = start + tl.arange(0, K)
            in_key = (rows < KEY)[None, :]
            keys = (first + tokens)[:, None] * KEY + rows[None, :]
            matrix = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
            held = tl.load(state + matrix, mask=(rows < KEY)[:, None] & in_value, other=0.0)
            recalled = tl.load(recalls + keys, mask=in_key, other=0.0)
            new -= tl.dot(recalled, held, input_precision="tf32x3")
            asked = tl.load(read + keys, mask=in_key, other=0.0)
            found = tl.dot(asked, held, found, input_precision="tf32x3")
        pairs = tl.load(attended + (first + tokens)[:, None] * P + tokens[None, :])
        found = tl.dot(pairs, new, found, input_precision="tf32x3")
        tl.store(out + cells, found, mask=in_value)
        kept = tl.load(forget + chunk * HEADS + head)
        for start in range(0, KEY, K):
            rows = start + tl.arange(0, K)
            in_key = rows < KEY
            keys = (first + tokens)[None, :] * KEY + rows[:, None]
            matrix = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
            inside = in_key[:, None] & in_value
            held = tl.load(state + matrix, mask=inside, other=0.0) * kept
            written = tl.load(write + keys, mask=in_key[:, None], other=0.0)
            held = tl.dot(written, new, held, input_precision="tf32x3")
            tl.store(state + matrix, held, mask=inside)
        tl.debug_barrier()  # Why: the next chunk's loads are other threads' than these stores.
