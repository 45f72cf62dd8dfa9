"""Paged batches for the attention tests on the CPU, and the dense tensors they were cut from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.attention.base import AttentionSpec, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.stored import SCALE_BYTES, to_int8

CPU = torch.device("cpu")


def as_lines(plain: torch.Tensor, *, of_keys: bool) -> torch.Tensor:
    """Keys or values [..., P, D] of a head of a block, as the CPU's kernels hold them."""
    if plain.dtype == torch.int8:  # all scales behind all lines of numbers
        codes, scales = plain.split((plain.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
        lines = as_lines(codes.short(), of_keys=of_keys).to(torch.int8)
        return torch.cat((lines.flatten(-2), scales.flatten(-2)), dim=-1).reshape(plain.shape)
    if of_keys:  # tiles of tokens, in each the tokens innermost
        lines = plain.unflatten(-2, (-1, min(plain.shape[-2], 64))).transpose(-1, -2)
    else:
        lines = plain.unsqueeze(-3)
    if plain.dtype == torch.bfloat16:  # two lines side by side, the first in the high half
        lines = lines.unflatten(-2, (-1, 2)).flip(-2).transpose(-1, -2)
    return lines.clone().reshape(plain.shape)


def make_sinks(heads: int, spread: float | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A sink for each head, float32 or wider, from -spread to spread; None: none."""
    if spread is None:
        return None
    return torch.linspace(-spread, spread, heads, dtype=torch.promote_types(dtype, torch.float32))


@dataclass(kw_only=True)
class Paged:
    """A batch of `lengths` = (query_len, seq_len), one-token sequences first.

    Slots that no sequence has written hold NaN, so a kernel that reads one and uses it is caught.
    The layer is layer 1 of 3 in one cache tensor, and group 1 of 2: group 0 maps to garbage. A
    sequence's numbers depend on its `seeds` entry alone. `shared[i] = (j, n)`: the first n blocks
    of sequence i are those of sequence j. `sinks` is how far those of the heads are spread.
    """

    lengths: list[tuple[int, int]]
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float64
    kv_dtype: torch.dtype | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: float | None = None
    seeds: list[int] | None = None
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k_heads, size = self.num_kv_heads, self.block_size
        heads = k_heads * self.group_size
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=k_heads, head_dim=self.head_dim,
            scale=self.head_dim**-0.5, sliding_window=self.sliding_window, softcap=self.softcap,
            group=1, sinks=make_sinks(heads, self.sinks, self.dtype),
        )  # fmt: skip
        num_blocks = [-(-seq_len // size) for _, seq_len in self.lengths]
        order = torch.Generator().manual_seed(5)
        free = (1 + torch.randperm(sum(num_blocks), generator=order)).tolist()
        tables = torch.zeros(2, len(self.lengths), max(num_blocks) + 1, dtype=torch.int32)
        self.dense = []  # per sequence [seq_len, heads + 2 * k_heads, head_dim]
        self.slots = []  # per sequence [seq_len]
        for i, (_, seq_len) in enumerate(self.lengths):
            seed = self.seeds[i] if self.seeds else i
            numbers = torch.randn(
                seq_len, heads + 2 * k_heads, self.head_dim,
                generator=torch.Generator().manual_seed(seed), dtype=torch.float64,
            ).to(self.dtype)  # fmt: skip
            table = torch.tensor([free.pop() for _ in range(num_blocks[i])])
            parent, count = self.shared.get(i, (0, 0))
            table[:count] = tables[1, parent, :count]
            if count:
                numbers[: count * size, heads:] = self.dense[parent][: count * size, heads:]
            tables[1, i, : len(table)] = table
            positions = torch.arange(seq_len)
            self.slots.append(table[positions // size] * size + positions % size)
            self.dense.append(numbers)
        new = [n[len(n) - q :] for n, (q, _) in zip(self.dense, self.lengths, strict=True)]
        slots = torch.cat(
            [s[len(s) - q :] for s, (q, _) in zip(self.slots, self.lengths, strict=True)]
        )
        starts = torch.tensor([0, *(q for q, _ in self.lengths)]).cumsum(0)
        self.fused = torch.cat(new).flatten(1)  # one projection, as a model has it
        self.num_blocks = sum(num_blocks) + 1
        self.batch = Batch(
            token_ids=torch.zeros_like(slots),
            positions=torch.cat([torch.arange(n - q, n) for q, n in self.lengths]),
            slot_mapping=torch.stack([torch.zeros_like(slots), slots]),
            query_start_loc=starts.to(torch.int32),
            seq_lens=torch.tensor([n for _, n in self.lengths], dtype=torch.int32),
            block_tables=tables,
            logits_indices=starts[1:] - 1,
            num_decodes=sum(q == 1 for q, _ in self.lengths),
            max_query_len=max(q for q, _ in self.lengths),
            max_seq_len=max(n for _, n in self.lengths),
        )

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, K, D]: views of one fused tensor, so not contiguous."""
        sizes = [self.spec.num_heads, self.num_kv_heads, self.num_kv_heads]
        parts = self.fused.split([n * self.head_dim for n in sizes], dim=-1)
        return tuple(x.unflatten(1, (-1, self.head_dim)) for x in parts)

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., D] as the cache holds them."""
        kind = self.kv_dtype or self.dtype
        return to_int8(rows) if kind == torch.int8 else rows.to(kind)

    def cache(self, layout: str, *, after: bool = False) -> torch.Tensor:
        """[2, B, ...] of one layer of a cache of three: contexts filled in, NaN elsewhere; `after`:
        with what this step writes."""
        heads, k_heads = self.spec.num_heads, self.num_kv_heads
        shape = (2, 3, self.num_blocks, self.block_size, k_heads, self.head_dim)
        cache = self.stored(torch.full(shape, float("nan")))
        layer = cache[:, 1].view(2, -1, k_heads, cache.shape[-1])
        unwritten = layer[0, 0].clone()
        for numbers, slots, (query_len, seq_len) in zip(
            self.dense, self.slots, self.lengths, strict=True
        ):
            written = seq_len if after else seq_len - query_len
            keys, values = self.stored(numbers[:written, heads:]).split(k_heads, dim=1)
            layer[0, slots[:written]], layer[1, slots[:written]] = keys, values
        # Why: what a parent computes in this very step is not there before it.
        if not after:
            layer[:, self.batch.slot_mapping[1]] = unwritten
        if layout == "KPD":
            cache = cache.transpose(3, 4).contiguous()
            cache[0] = as_lines(cache[0], of_keys=True)
            cache[1] = as_lines(cache[1], of_keys=False)
        return cache[:, 1]

    def layer(self, layout: str) -> LayerCache:
        """The layer whose cache is `cache(layout)`."""
        return LayerCache(*self.cache(layout), self.spec)

    def run(self, name: str) -> torch.Tensor:
        """One forward of the named backend, [T, H, D]."""
        backend = make_backend(
            name, device=CPU, dtype=self.dtype, head_dim=self.head_dim, block_size=self.block_size,
            kv_dtype=self.kv_dtype,
        )  # fmt: skip
        batch = replace(self.batch, attention=backend.prepare(self.batch))
        return backend.forward(*self.qkv(), self.layer(backend_class(name).kv_layout), batch)
