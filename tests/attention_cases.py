"""Paged batches to test attention backends with, and what attention over them must give.

The oracle gathers each sequence's keys and values by its slots and computes plain softmax attention
in float64, sequence by sequence and head by head: slow, and too simple to be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoengine.attention.base import AttentionSpec
from nanoengine.runner.batch import Batch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Greatest absolute error of outputs of size 1; a few roundings of the dtype."""


@dataclass(kw_only=True)
class Case:
    """One layer's inputs; `keys` and `values` are each sequence's context, [seq_len, K, D]."""

    batch: Batch
    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def expected(self) -> torch.Tensor:
        """What attention must return, [T, H, D] float64 on the CPU."""
        out = []
        starts = self.batch.query_start_loc.tolist()
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            query = self.q[starts[i] : starts[i + 1]].cpu().double()
            out.append(attend(query, keys.cpu().double(), values.cpu().double(), self.spec))
        return torch.cat(out)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Causal attention of the last q.shape[0] tokens of one sequence, in float64."""
    query_len, seq_len = q.shape[0], keys.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(seq_len - query_len, seq_len)[:, None]
    key = torch.arange(seq_len)[None, :]
    visible = key <= position
    if spec.sliding_window is not None:
        visible &= key > position - spec.sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def make_case(
    *lengths: tuple[int, int],
    num_kv_heads: int = 1,
    group_size: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shared: dict[int, tuple[int, int]] | None = None,
    spread: float = 1.0,
    seed: int = 0,
) -> Case:
    """Builds a batch of sequences of (query_len, seq_len), those with one query token first.

    What lies before the query tokens is in the cache already; blocks are handed out in random
    order and every slot that nobody wrote holds NaN. `shared[i] = (j, n)`: the first n blocks of
    sequence i are those of sequence j, full and with the same contents. The layer belongs to
    group 1 of 2; group 0 has slots and tables that would give garbage. `spread` scales the queries.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, num_seqs = num_kv_heads * group_size, len(lengths)
    blocks = [-(-seq_len // block_size) for _, seq_len in lengths]
    free = (1 + torch.randperm(sum(blocks) + 2, generator=generator)).tolist()
    tables = torch.zeros(2, num_seqs, max(blocks) + 1, dtype=torch.int32)
    cache_shape = (2, sum(blocks) + 3, block_size, num_kv_heads, head_dim)
    caches = torch.full(cache_shape, float("nan"), dtype=dtype)
    queries, new_keys, new_values, slots, keys, values = [], [], [], [], [], []
    for i, (query_len, seq_len) in enumerate(lengths):
        # Why its own: a sequence is the same whatever stands beside it.
        generator = torch.Generator().manual_seed(1000 * seed + i)
        context = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
        table = [free.pop() for _ in range(blocks[i])]
        if i in (shared or {}):
            j, count = shared[i]
            table[:count] = tables[1, j, :count].tolist()
            tokens = count * block_size
            context[0, :tokens], context[1, :tokens] = keys[j][:tokens], values[j][:tokens]
        tables[1, i, : blocks[i]] = torch.tensor(table)
        position = torch.arange(seq_len)
        slot = torch.tensor(table)[position // block_size] * block_size + position % block_size
        written = seq_len - query_len
        flat = caches.view(2, -1, num_kv_heads, head_dim)
        # Why only its own: what a sequence shares is written by the first one, maybe in this step.
        own = (shared or {}).get(i, (0, 0))[1] * block_size
        flat[:, slot[own:written]] = context[:, own:written]
        queries.append(torch.randn(query_len, heads, head_dim, generator=generator) * spread)
        new_keys.append(context[0, written:])
        new_values.append(context[1, written:])
        slots.append(slot[written:])
        keys.append(context[0])
        values.append(context[1])
    query_lens = torch.tensor([q for q, _ in lengths])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    slot_mapping = torch.cat(slots)
    batch = Batch(
        token_ids=torch.zeros_like(slot_mapping).to(DEVICE),
        positions=torch.cat([torch.arange(s - q, s) for q, s in lengths]).to(DEVICE),
        slot_mapping=torch.stack([torch.zeros_like(slot_mapping), slot_mapping]).to(DEVICE),
        query_start_loc=starts.to(torch.int32).to(DEVICE),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32).to(DEVICE),
        block_tables=tables.to(DEVICE),
        logits_indices=(starts[1:] - 1).to(DEVICE),
        num_decodes=sum(q == 1 for q, _ in lengths),
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
    )
    # Why cut from one tensor: a model's q, k and v are slices of one projection, with its strides.
    qkv = torch.cat([torch.cat(x).to(dtype) for x in (queries, new_keys, new_values)], 1).to(DEVICE)
    q, k, v = qkv.split([heads, num_kv_heads, num_kv_heads], 1)
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        softcap=softcap,
        group=1,
    )
    caches = caches.to(DEVICE)
    return Case(
        batch=batch, spec=spec, q=q, k=k, v=v, k_cache=caches[0], v_cache=caches[1],
        keys=keys, values=values,
    )  # fmt: skip


def check(backend, case: Case) -> torch.Tensor:
    """Runs one forward, holds it against the oracle, and returns it."""
    case.batch.attention = backend.prepare(case.batch)
    out = backend.forward(case.q, case.k, case.v, case.k_cache, case.v_cache, case.batch, case.spec)
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    error = (out.cpu().double() - case.expected()).abs().max().item()
    assert error < TOLERANCE[case.q.dtype], f"greatest error {error}"
    return out
