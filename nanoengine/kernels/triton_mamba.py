"""Mamba-2 on a GPU, in Triton.

    mamba_gates_kernel  step size and decay of each head at each token
    mamba_step_kernel   single tokens: decay, update and output of a state; read and written once
    mamba_scan_kernel   many tokens of several sequences: all chunks of each sequence
    mamba_norm_kernel   the output of the heads, gated and normed, in either order

Called by `layers/triton_mamba.py` alone. The reference implementations are `MambaHeads` and
`MambaMixer.gated` (`models/mamba.py`), `step` and `scan` (`layers/mamba2.py`). Chunks, slots and
the parts that a program owns are as in `kernels/triton_linear_attention.py`, whose convolutions
run before.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.

Legend: T tokens, D tokens of a decode, L rows needed after the layer, N sequences, H heads, G
groups, E size of b and c, V size of a head, P tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_linear_attention import CHUNK_FIELDS, _activated


@triton.jit
def mamba_gates_kernel(
    dt, decay, raw, a_log, dt_bias,
    RAW_ROW: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
):  # fmt: skip
    """dt, decay [T, H] from the layer's projection, whose rows are RAW_ROW elements apart. Grid:
    [T]. dt is clamped to [DT_MIN, DT_MAX]."""
    token, heads = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = heads < HEADS
    x = tl.load(raw + token * RAW_ROW + heads, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + heads, mask=mask, other=0.0)
    soft = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    soft = tl.minimum(tl.maximum(soft, DT_MIN), DT_MAX)
    rate = -tl.exp(tl.load(a_log + heads, mask=mask, other=0.0))
    tl.store(dt + token * HEADS + heads, soft, mask=mask)
    tl.store(decay + token * HEADS + heads, rate * soft, mask=mask)


@triton.jit
def mamba_step_kernel(
    out, mixed, dt, decay, d, states, reads, writes,
    STATE_ROW: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [D, H, V] = each head's output from its state, plus d times its input.
    Grid: [D, H, V / WIDTH rounded up].

    mixed [D, H V + 2 G E]: x, b and c from the convolution, before their activation. dt and decay
    [D, H]; d [H]. states: rows of STATE_ROW elements; the first [H, E, V] are the matrices. KEYS: E
    rounded up to a power of two.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.arange(0, KEYS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_key, in_value = rows < KEY, columns < VALUE
    inputs = mixed + token * (HEADS * VALUE + 2 * GROUPS * KEY)
    at = inputs + HEADS * VALUE + head // (HEADS // GROUPS) * KEY + rows
    b, c = _activated(at, in_key), _activated(at + GROUPS * KEY, in_key)
    x, gate = _activated(inputs + head * VALUE + columns, in_value), token * HEADS + head
    inside = in_key[:, None] & in_value[None, :]
    cells = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
    state_in = states + tl.load(reads + token) * STATE_ROW + cells
    state = tl.load(state_in, mask=inside, other=0.0) * tl.exp(tl.load(decay + gate))
    state += b[:, None] * (x * tl.load(dt + gate))[None, :]
    slot = tl.load(writes + token)
    if slot > 0:
        tl.store(states + slot * STATE_ROW + cells, state, mask=inside)
    read = tl.sum(state * c[:, None], 0) + x * tl.load(d + head)
    tl.store(out + gate * VALUE + columns, read, mask=in_value)


@triton.jit
def mamba_scan_kernel(
    out, states, mixed, dt, decay, d, chunks, firsts,
    STATE_ROW: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, P: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out [T, H, V], and the states that the sequences write. Grid: [N, H, V / WIDTH rounded up].

    Arguments as in `mamba_step_kernel`; chunk `firsts[n]` is the first of sequence n. A sequence's
    matrix is in the slot that its last chunk writes. It stays in the GPU's cache, and passes
    through registers in slices of K rows. PRECISION: of products, as in `tl.dot`; a 16-bit model
    rounds its inputs more than "tf32" does.
    """
    begin, stop = tl.load(firsts + tl.program_id(0)), tl.load(firsts + tl.program_id(0) + 1)
    head, local = tl.program_id(1), tl.arange(0, P)
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_value = (columns < VALUE)[None, :]
    skip = tl.load(d + head)
    final_state = states + tl.load(chunks + (stop - 1) * CHUNK_FIELDS + 4) * STATE_ROW
    source = states + tl.load(chunks + begin * CHUNK_FIELDS + 3) * STATE_ROW
    for index in range(begin, stop):
        chunk = chunks + index * CHUNK_FIELDS
        tokens, slot = tl.load(chunk) + local, tl.load(chunk + 4)
        valid, gates = tokens < tl.load(chunk + 1), tokens * HEADS + head
        snapshot = states + slot * STATE_ROW
        # Why zeros are harmless: a token without dt and decay does not change the state.
        since = tl.cumsum(tl.load(decay + gates, mask=valid, other=0.0), 0)
        last = tl.min(since, 0)  # decays are at most 0
        keeps, xs = valid[:, None], mixed + tokens[:, None] * (HEADS * VALUE + 2 * GROUPS * KEY)
        bs = xs + HEADS * VALUE + head // (HEADS // GROUPS) * KEY
        outputs, pairs = tl.full([P, WIDTH], 0, tl.float32), tl.full([P, P], 0, tl.float32)
        for first in range(0, KEY, K):
            rows = first + tl.arange(0, K)
            mask, inside = keeps & (rows < KEY)[None, :], (rows < KEY)[:, None] & in_value
            cells = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
            c = _activated(bs + GROUPS * KEY + rows[None, :], mask)
            state = tl.load(source + cells, mask=inside, other=0.0)
            outputs = tl.dot(c, state, outputs, input_precision=PRECISION)
            b = _activated(bs + rows[None, :], mask)
            pairs = tl.dot(c, tl.trans(b), pairs, input_precision=PRECISION)
        row, column = local[:, None], local[None, :]
        between = tl.where(row >= column, since[:, None] - since[None, :], float("-inf"))
        pairs *= tl.exp(between)
        x = _activated(xs + head * VALUE + columns[None, :], keeps & in_value)
        outputs = outputs * tl.exp(since)[:, None] + x * skip
        x *= tl.load(dt + gates, mask=valid, other=0.0)[:, None]
        outputs = tl.dot(pairs, x, outputs, input_precision=PRECISION)
        tl.store(out + gates[:, None] * VALUE + columns[None, :], outputs, mask=keeps & in_value)
        x, forget = x * tl.exp(last - since)[:, None], tl.exp(last)
        for first in range(0, KEY, K):
            rows = first + tl.arange(0, K)
            mask, inside = keeps & (rows < KEY)[None, :], (rows < KEY)[:, None] & in_value
            cells = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
            state = tl.load(source + cells, mask=inside, other=0.0) * forget
            b = tl.trans(_activated(bs + rows[None, :], mask))
            state = tl.dot(b, x, state, input_precision=PRECISION)
            tl.store(final_state + cells, state, mask=inside)
            if (slot > 0) & (index + 1 < stop):
                tl.store(snapshot + cells, state, mask=inside)
        tl.debug_barrier()  # Why: in the next chunk other threads load what these have stored.
        source = final_state


@triton.jit
def mamba_norm_kernel(
    out, x, gate, weight,
    GATE_ROW: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """out [L, G SIZE] = x [L, G SIZE] times the silu of its gate, normed by group. Grid: [L, G].

    NORM: "": none; "before_gate": before the gate; else after it. Rows of the gate are GATE_ROW
    elements apart.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask, part = columns < SIZE, tl.program_id(1) * SIZE + columns
    cells = row * (GROUPS * SIZE) + part
    value = tl.load(x + cells, mask=mask, other=0.0)
    gate_value = _activated(gate + row * GATE_ROW + part, mask)
    if NORM != "before_gate":
        value *= gate_value
    if NORM != "":
        value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
        value *= tl.load(weight + part, mask=mask, other=0.0).to(tl.float32)
    if NORM == "before_gate":
        value *= gate_value
    tl.store(out + cells, value.to(out.dtype.element_ty), mask=mask)
