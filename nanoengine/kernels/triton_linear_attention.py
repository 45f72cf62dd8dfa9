"""Linear attention on a GPU, in Triton: the convolution and the gated delta rule.

    gates_kernel         decay and learning rate (beta) of each head at each token
    gate_norm_kernel     the output of a head, normed and gated
    conv_step_kernel     one token of each of several sequences: convolution; shifts the inputs
    delta_step_kernel    the same tokens: decay, update and output of a state; read, written once
    conv_scan_kernel     many tokens of several sequences: convolution
    conv_keep_kernel     the inputs that these sequences keep
    delta_chunks_kernel  the same tokens: how each chunk changes any state matrix
    delta_scan_kernel    the matrix of each of these sequences, updated by all of its chunks

Called by `layers/triton_linear_attention.py` alone. The reference implementations are `Decay` and
`GatedRMSNorm` (`models/linear_attention.py`), `CausalConv.step` and `scan`
(`layers/causal_conv.py`), `step` and `scan` (`layers/delta_rule.py`). A program owns the part of a
state that it writes, and reads no other part, so a sequence may continue in the state from which
it starts. Nothing is written to slot 0.

The sequences of a scan are cut into chunks, each described by CHUNK_FIELDS integers: see
`attention/batch.py::SegmentChunks`. The loop over a sequence's chunks is inside a kernel, so
launches don't depend on their number.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.

Source: flash-linear-attention also has one kernel for chunks and one for the states through them,
and solves its triangular systems row by row.

Legend: T tokens, D tokens of a decode, N sequences, C channels, H / G value / key heads, E / V size
of a key / value, P tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_FIELDS = tl.constexpr(5)


@triton.jit
def conv_step_kernel(
    out, x, states, weight, bias, reads, writes,
    X_ROW: tl.constexpr, STATE_ROW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [D, C] = the convolution of each token, added from the oldest tap on. Grid: [D, C / WIDTH
    rounded up].

    states: rows of STATE_ROW elements; the first [TAPS - 1, C] are the kept inputs. Token t starts
    from row reads[t], and its own inputs go to row writes[t]. weight [TAPS, C]; bias [C].
    """
    token = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = channels < CHANNELS
    state_in = states + tl.load(reads + token) * STATE_ROW + channels
    slot = tl.load(writes + token)
    state_out = states + slot * STATE_ROW + channels
    writable = channels < tl.where(slot > 0, CHANNELS, 0)
    total = tl.full([WIDTH], 0, states.dtype.element_ty)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            value = tl.load(state_in + tap * CHANNELS, mask=mask, other=0.0)
        else:
            value = tl.load(x + token * X_ROW + channels, mask=mask, other=0.0)
        value = value.to(states.dtype.element_ty)
        if tap > 0:
            tl.store(state_out + (tap - 1) * CHANNELS, value, mask=writable)
        factor = tl.load(weight + tap * CHANNELS + channels, mask=mask, other=0.0)
        total += value * factor.to(states.dtype.element_ty)
    if BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(states.dtype.element_ty)
    tl.store(out + token * CHANNELS + channels, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def gates_kernel(
    beta, decay, ba, a_log, dt_bias, ROW: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """beta, decay [T, H] from ba [T, 2 H], whose second half is for decays. Grid: [T]."""
    token, heads = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = heads < HEADS
    b = tl.load(ba + token * ROW + heads, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(ba + token * ROW + HEADS + heads, mask=mask, other=0.0).to(tl.float32)
    a += tl.load(dt_bias + heads, mask=mask, other=0.0)
    rate = -tl.exp(tl.load(a_log + heads, mask=mask, other=0.0))
    soft = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    tl.store(beta + token * HEADS + heads, tl.sigmoid(b), mask=mask)
    tl.store(decay + token * HEADS + heads, rate * soft, mask=mask)


@triton.jit
def gate_norm_kernel(
    out, x, gate, weight,
    GATE_ROW: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """out [L, H, V] = the norm of each head of x [L, H, V], times the silu of its gate, whose rows
    are GATE_ROW elements apart. Grid: [L, H]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    mask, cells = columns < SIZE, (row * HEADS + head) * SIZE + columns
    value = tl.load(x + cells, mask=mask, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    value = value.to(out.dtype.element_ty) * tl.load(weight + columns, mask=mask, other=0.0)
    gate_value = tl.load(gate + row * GATE_ROW + head * SIZE + columns, mask=mask, other=0.0)
    value = value.to(tl.float32) * _silu(gate_value.to(tl.float32))
    tl.store(out + cells, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def delta_step_kernel(
    out, mixed, decay, beta, states, reads, writes,
    STATE_ROW: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [D, H, V] = each head's output from its state. Grid: [D, H, V / WIDTH rounded up].

    mixed [D, 2 G E + H V]: queries, keys and values from the convolution, before their activation.
    decay, beta [D, H]; decays are logarithms. states: rows of STATE_ROW elements; the first [H, E,
    V] are the matrices. KEYS: E rounded up to a power of two.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, columns = tl.arange(0, KEYS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_key, in_value = rows < KEY, columns < VALUE
    kind = states.dtype.element_ty
    inputs = mixed + token * (2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE)
    at = head // (VALUE_HEADS // KEY_HEADS) * KEY + rows
    q = _silu(tl.load(inputs + at, mask=in_key, other=0.0).to(kind))
    k = _silu(tl.load(inputs + KEY_HEADS * KEY + at, mask=in_key, other=0.0).to(kind))
    values = inputs + 2 * KEY_HEADS * KEY + head * VALUE + columns
    v = _silu(tl.load(values, mask=in_value, other=0.0).to(kind))
    q = q / tl.sqrt(tl.sum(q * q, 0) + 1e-6) / tl.sqrt(KEY * 1.0)
    k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
    decay_factor = tl.exp(tl.load(decay + token * VALUE_HEADS + head))
    learning_rate = tl.load(beta + token * VALUE_HEADS + head)
    inside = in_key[:, None] & in_value[None, :]
    cells = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
    state_in = states + tl.load(reads + token) * STATE_ROW + cells
    state = tl.load(state_in, mask=inside, other=0.0) * decay_factor
    change = (v - tl.sum(state * k[:, None], 0)) * learning_rate
    state += k[:, None] * change[None, :]
    slot = tl.load(writes + token)
    if slot > 0:
        tl.store(states + slot * STATE_ROW + cells, state, mask=inside)
    read = tl.sum(state * q[:, None], 0)
    tl.store(out + (token * VALUE_HEADS + head) * VALUE + columns, read, mask=in_value)


@triton.jit
def conv_scan_kernel(
    out, x, states, weight, bias, chunks,
    X_ROW: tl.constexpr, STATE_ROW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [T, C] = the convolution of each token of the chunks, added in the order of
    `conv_step_kernel`, whose arguments it has. Grid: [chunks, C / WIDTH rounded up]."""
    chunk = chunks + tl.program_id(0) * CHUNK_FIELDS
    start, end, first = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    tokens = start + tl.arange(0, P)
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = channels < CHANNELS
    inside = (tokens < end)[:, None] & mask[None, :]
    state_in = states + tl.load(chunk + 3) * STATE_ROW + channels[None, :]
    total = tl.full([P, WIDTH], 0, states.dtype.element_ty)
    for tap in tl.static_range(TAPS):
        at = (tokens + (tap + 1 - TAPS))[:, None]
        in_x = inside & (at >= first)
        value = tl.load(x + at * X_ROW + channels[None, :], mask=in_x, other=0.0)
        value = value.to(states.dtype.element_ty)
        if tap < TAPS - 1:
            kept_inputs = state_in + (at - first + TAPS - 1) * CHANNELS
            value += tl.load(kept_inputs, mask=inside & (at < first), other=0.0)
        factor = tl.load(weight + tap * CHANNELS + channels, mask=mask, other=0.0)
        total += value * factor.to(states.dtype.element_ty)[None, :]
    if BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0).to(states.dtype.element_ty)
    cells = out + tokens[:, None] * CHANNELS + channels[None, :]
    tl.store(cells, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def conv_keep_kernel(
    x, states, chunks, firsts,
    X_ROW: tl.constexpr, STATE_ROW: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    BIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the last inputs of each chunk in the state that the chunk writes.
    Grid: [N, C / WIDTH rounded up]. Chunk `firsts[n]` is the first of sequence n.

    Why from the last chunk on: the state from which a sequence starts may be the first that it
    writes, and chunks shorter than the taps read it.
    """
    begin, stop = tl.load(firsts + tl.program_id(0)), tl.load(firsts + tl.program_id(0) + 1)
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    for step in range(begin, stop):
        chunk = chunks + (begin + stop - 1 - step) * CHUNK_FIELDS
        end, first, slot = tl.load(chunk + 1), tl.load(chunk + 2), tl.load(chunk + 4)
        state_in = states + tl.load(chunk + 3) * STATE_ROW + channels
        count = tl.where(slot > 0, CHANNELS, 0)
        writes = channels < count
        for tap in tl.static_range(TAPS - 1):
            at = end + (tap + 1 - TAPS)
            in_x = channels < tl.where(at >= first, count, 0)
            value = tl.load(x + at * X_ROW + channels, mask=in_x, other=0.0)
            kept_inputs, older = state_in + (at - first + TAPS - 1) * CHANNELS, writes & (in_x == 0)
            value = value.to(states.dtype.element_ty) + tl.load(kept_inputs, mask=older, other=0.0)
            tl.store(states + slot * STATE_ROW + tap * CHANNELS + channels, value, mask=writes)


@triton.jit
def _activated(x, mask):
    return _silu(tl.load(x, mask=mask, other=0.0).to(tl.float32))


@triton.jit
def delta_chunks_kernel(
    read, recalls, write, values, attended, forget, mixed, decay, beta, chunks,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """How each chunk changes a head's matrix, as in `delta_rule.Chunks`, but by tokens: read,
    recalls and write [T, H, E], values [T, H, V], attended [T, H, P]; forget [chunks, H]. Grid:
    [chunks, H].

    mixed, decay and beta as in `delta_step_kernel`. Keys and values pass through registers in
    slices of K, twice: the first time, keys are multiplied before they are normalized to length 1.
    """
    chunk, head = chunks + tl.program_id(0) * CHUNK_FIELDS, tl.program_id(1)
    start, end, local = tl.load(chunk), tl.load(chunk + 1), tl.arange(0, P)
    tokens = start + local
    valid, gates = tokens < end, tokens * VALUE_HEADS + head
    queries = mixed + tokens[:, None] * (2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE)
    queries += head // (VALUE_HEADS // KEY_HEADS) * KEY
    keys, vs = queries + KEY_HEADS * KEY, queries + 2 * KEY_HEADS * KEY
    vs += head * VALUE - head // (VALUE_HEADS // KEY_HEADS) * KEY
    q_length, k_length = tl.full([P], 1e-6, tl.float32), tl.full([P], 1e-6, tl.float32)
    system, pairs = tl.full([P, P], 0, tl.float32), tl.full([P, P], 0, tl.float32)
    for first in range(0, KEY, K):
        at = (first + tl.arange(0, K))[None, :]
        inside = valid[:, None] & (at < KEY)
        q, k = _activated(queries + at, inside), _activated(keys + at, inside)
        q_length += tl.sum(q * q, 1)
        k_length += tl.sum(k * k, 1)
        system = tl.dot(k, tl.trans(k), system, input_precision="tf32x3")
        pairs = tl.dot(q, tl.trans(k), pairs, input_precision="tf32x3")
    q_scale, k_scale = 1 / tl.sqrt(q_length * KEY), 1 / tl.sqrt(k_length)
    # Why zeros are harmless: a token without key, decay and beta neither reads nor changes
    # anything.
    since = tl.cumsum(tl.load(decay + gates, mask=valid, other=0.0), 0)
    learning_rate = tl.load(beta + gates, mask=valid, other=0.0)
    last = tl.min(since, 0)  # decays are at most 0
    tl.store(forget + tl.program_id(0) * VALUE_HEADS + head, tl.exp(last))
    row, column = local[:, None], local[None, :]
    between = tl.exp(tl.where(row >= column, since[:, None] - since[None, :], float("-inf")))
    between *= k_scale[None, :]
    cells = gates[:, None] * P + column
    tl.store(attended + cells, pairs * between * q_scale[:, None], mask=valid[:, None])
    # The inverse of the system, row by row: each row is reduced by the rows above it.
    system = tl.where(row > column, -system * between * (learning_rate * k_scale)[:, None], 0.0)
    for solved in range(1, P):
        line = tl.sum(tl.where(row == solved, system, 0.0), 0)
        line += tl.sum(line[:, None] * system, 0)
        system = tl.where(row == solved, line[None, :], system)
    inverse = tl.where(row == column, 1.0, system)
    to_recalls, to_write = k_scale * learning_rate * tl.exp(since), k_scale * tl.exp(last - since)
    to_read = q_scale * tl.exp(since)
    for first in range(0, KEY, K):
        at = (first + tl.arange(0, K))[None, :]
        inside, key_cells = valid[:, None] & (at < KEY), gates[:, None] * KEY + at
        tl.store(read + key_cells, _activated(queries + at, inside) * to_read[:, None], mask=inside)
        k = _activated(keys + at, inside)
        tl.store(write + key_cells, k * to_write[:, None], mask=inside)
        k = tl.dot(inverse, k * to_recalls[:, None], input_precision="tf32x3")
        tl.store(recalls + key_cells, k, mask=inside)
    for first in range(0, VALUE, K):
        at = (first + tl.arange(0, K))[None, :]
        inside = valid[:, None] & (at < VALUE)
        v = _activated(vs + at, inside) * learning_rate[:, None]
        v = tl.dot(inverse, v, input_precision="tf32x3")
        tl.store(values + gates[:, None] * VALUE + at, v, mask=inside)


@triton.jit
def delta_scan_kernel(
    out, states, read, recalls, write, values, attended, forget, chunks, firsts,
    STATE_ROW: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out [T, H, V], and the states that the sequences write. Grid: [N, H, V / WIDTH rounded up].

    `delta_chunks_kernel` computes how each chunk changes a state; `firsts` as in
    `conv_keep_kernel`. A sequence's matrix is in the slot that its last chunk writes. It stays in
    the GPU's cache, and passes through registers in slices of K keys.
    """
    begin, stop = tl.load(firsts + tl.program_id(0)), tl.load(firsts + tl.program_id(0) + 1)
    head, local = tl.program_id(1), tl.arange(0, P)
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    in_value = (columns < VALUE)[None, :]
    final_state = states + tl.load(chunks + (stop - 1) * CHUNK_FIELDS + 4) * STATE_ROW
    source = states + tl.load(chunks + begin * CHUNK_FIELDS + 3) * STATE_ROW
    for index in range(begin, stop):
        chunk = chunks + index * CHUNK_FIELDS
        start, end, slot = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 4)
        tokens = start + local
        valid, heads = (tokens < end)[:, None], tokens * HEADS + head
        cells, keeps = heads[:, None] * VALUE + columns[None, :], valid & in_value
        new = tl.load(values + cells, mask=keeps, other=0.0)
        outputs = tl.full([P, WIDTH], 0, tl.float32)
        for first in range(0, KEY, K):
            rows = first + tl.arange(0, K)
            in_key = rows < KEY
            keys, mask = heads[:, None] * KEY + rows[None, :], valid & in_key[None, :]
            matrix = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
            state = tl.load(source + matrix, mask=in_key[:, None] & in_value, other=0.0)
            recalled = tl.load(recalls + keys, mask=mask, other=0.0)
            new -= tl.dot(recalled, state, input_precision="tf32x3")
            read_rows = tl.load(read + keys, mask=mask, other=0.0)
            outputs = tl.dot(read_rows, state, outputs, input_precision="tf32x3")
        pairs = tl.load(attended + heads[:, None] * P + local[None, :], mask=valid, other=0.0)
        outputs = tl.dot(pairs, new, outputs, input_precision="tf32x3")
        tl.store(out + cells, outputs, mask=keeps)
        decay_factor, snapshot = tl.load(forget + index * HEADS + head), states + slot * STATE_ROW
        for first in range(0, KEY, K):
            rows = first + tl.arange(0, K)
            in_key = rows < KEY
            mask = (tokens < end)[None, :] & in_key[:, None]
            written = tl.load(write + heads[None, :] * KEY + rows[:, None], mask=mask, other=0.0)
            matrix = (head * KEY + rows)[:, None] * VALUE + columns[None, :]
            inside = in_key[:, None] & in_value
            state = tl.load(source + matrix, mask=inside, other=0.0) * decay_factor
            state = tl.dot(written, new, state, input_precision="tf32x3")
            tl.store(final_state + matrix, state, mask=inside)
            if (slot > 0) & (index + 1 < stop):
                tl.store(snapshot + matrix, state, mask=inside)
        tl.debug_barrier()  # Why: in the next chunk other threads load what these have stored.
        source = final_state
