"""Paged batches for tests of attention backends, with NaiveBackend in float64 as reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.attention.base import AttentionBackend, AttentionSpec, HeadNormWeights, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.kv_quantization import FP8, SCALE_BYTES, from_fp8, to_fp8, to_int8

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest absolute error of outputs of size 1: a few roundings of the dtype."""


def as_lines(plain: torch.Tensor, *, of_keys: bool) -> torch.Tensor:
    """Keys or values [..., P, D] of one head and block in the layout of the CPU kernels."""
    if plain.dtype == torch.int8:  # all scales after all rows of values
        codes, scales = plain.split((plain.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
        lines = as_lines(codes.short(), of_keys=of_keys).to(torch.int8)
        return torch.cat((lines.flatten(-2), scales.flatten(-2)), dim=-1).reshape(plain.shape)
    if of_keys:  # tiles of tokens, with the tokens innermost
        lines = plain.unflatten(-2, (-1, min(plain.shape[-2], 64))).transpose(-1, -2)
    else:
        lines = plain.unsqueeze(-3)
    if plain.dtype == torch.bfloat16:  # pairs of rows interleaved, the first in the high half
        lines = lines.unflatten(-2, (-1, 2)).flip(-2).transpose(-1, -2)
    return lines.clone().reshape(plain.shape)


def make_sinks(heads: int, spread: float | None, dtype: torch.dtype) -> torch.Tensor | None:
    """One sink per head, float32 or wider, from -spread to spread; None: no sinks."""
    if spread is None:
        return None
    return torch.linspace(-spread, spread, heads, dtype=torch.promote_types(dtype, torch.float32))


@dataclass(kw_only=True)
class Paged:
    """A batch of `lengths` = (query_len, seq_len), one-token sequences first.

    Unwritten slots hold NaN, so a kernel that uses one fails. The layer is layer 1 of 3 in one
    cache tensor, and group 1 of 2: group 0 maps to garbage. A sequence's values depend on its
    `seeds` entry only. `shared[i] = (j, n)`: the first n blocks of sequence i are the blocks of
    sequence j. `sinks` is the spread of the heads' sinks. `fp8`: the cache is fp8, and all keys and
    values are exact in fp8. Why: Triton's interpreter rounds to fp8 differently from a GPU.
    """

    lengths: Sequence[tuple[int, int]]
    num_kv_heads: int = 2
    group_size: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float64
    kv_dtype: torch.dtype | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    fp8: bool = False
    sinks: float | None = None
    seeds: list[int] | None = None
    shared: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k_heads, size = self.num_kv_heads, self.block_size
        heads = k_heads * self.group_size
        k_scale, v_scale = (0.5, 0.125) if self.fp8 else (1.0, 1.0)
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=k_heads, head_dim=self.head_dim,
            scale=self.scale or self.head_dim**-0.5, sliding_window=self.sliding_window,
            softcap=self.softcap, k_scale=k_scale, v_scale=v_scale, group=1,
            sinks=make_sinks(heads, self.sinks, self.dtype),
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
            if self.fp8:
                for x, scale in zip(
                    numbers[:, heads:].split(k_heads, 1), (k_scale, v_scale), strict=True
                ):
                    x.copy_(from_fp8(to_fp8(x, scale), scale, self.dtype))
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
        self.fused = torch.cat(new).flatten(1)  # one fused projection, as in models
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

    def stored(self, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows [..., D] as they are stored in the cache."""
        kind = self.kv_dtype or self.dtype
        if self.fp8:
            return to_fp8(rows, scale)
        return to_int8(rows) if kind == torch.int8 else rows.to(kind)

    def cache(self, layout: str, *, after: bool = False) -> torch.Tensor:
        """[2, B, ...] of one layer of a three-layer cache: contexts filled in, NaN elsewhere. With
        `after` it also contains this step's tokens."""
        heads, k_heads = self.spec.num_heads, self.num_kv_heads
        shape = (2, 3, self.num_blocks, self.block_size, k_heads, self.head_dim)
        cache = self.stored(torch.full(shape, float("nan")))
        layer = cache[:, 1].view(2, -1, k_heads, cache.shape[-1])
        unwritten = layer[0, 0].clone()
        for numbers, slots, (query_len, seq_len) in zip(
            self.dense, self.slots, self.lengths, strict=True
        ):
            written = seq_len if after else seq_len - query_len
            keys, values = numbers[:written, heads:].split(k_heads, dim=1)
            layer[0, slots[:written]] = self.stored(keys, self.spec.k_scale)
            layer[1, slots[:written]] = self.stored(values, self.spec.v_scale)
        # Why: tokens that a parent computes in this step are not in the cache before it.
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


@dataclass(kw_only=True)
class Case:
    """One layer's arguments of `AttentionBackend.forward`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: Batch
    spec: AttentionSpec

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.k_cache, self.v_cache, self.spec)

    def copied_cache(self) -> LayerCache:
        """A copy of the cache."""
        return LayerCache(self.k_cache.clone(), self.v_cache.clone(), self.spec)

    def expected(self) -> torch.Tensor:
        """The expected output of attention, [T, H, D] float64; leaves the caches unchanged."""
        oracle = backend_of(self, "naive", dtype=torch.float64)
        batch = replace(self.batch, attention=oracle.prepare(self.batch))
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        caches = self.k_cache, self.v_cache
        caches = (x.clone() if x.dtype == FP8 else x.double() for x in caches)
        return oracle.forward(q, k, v, LayerCache(*caches, self.spec), batch)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """One forward of `backend`, [T, H, D]."""
        batch = replace(self.batch, attention=backend.prepare(self.batch))
        return backend.forward(self.q, self.k, self.v, self.cache, batch)

    def check(self, backend: AttentionBackend) -> torch.Tensor:
        """Compares one forward of `backend` with the reference, and returns it."""
        expected = self.expected()
        out = self.run(backend)
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        error = (out.double() - expected).abs().max().item()
        assert error < TOLERANCE[self.q.dtype], f"greatest error {error}"
        return out


def make_case(*lengths: tuple[int, int], spread: float = 1.0, **options: Any) -> Case:
    """One layer of a `Paged` batch in float32 on `DEVICE`, with one head unless the options say
    otherwise. `spread` scales the queries."""
    defaults = {"num_kv_heads": 1, "group_size": 1, "dtype": torch.float32}
    paged = Paged(lengths=lengths, **{**defaults, **options})
    paged.batch = replace(paged.batch, **on_device(paged.batch))
    paged.spec = replace(paged.spec, **on_device(paged.spec))
    paged.fused = paged.fused.to(DEVICE)
    q, k, v = paged.qkv()
    k_cache, v_cache = paged.cache("PKD").to(DEVICE)
    q.mul_(spread)
    return Case(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, batch=paged.batch, spec=paged.spec)


def on_device(holder: Any) -> dict[str, torch.Tensor]:
    """The tensors of a dataclass, on `DEVICE`."""
    values = {each.name: getattr(holder, each.name) for each in fields(holder)}
    return {name: x.to(DEVICE) for name, x in values.items() if isinstance(x, torch.Tensor)}


def backend_of(case: Case, name: str = "triton", **options: Any) -> AttentionBackend:
    """A backend for the case's dtype and sizes."""
    sizes = {"head_dim": case.spec.head_dim, "block_size": case.k_cache.shape[1]}
    return make_backend(name, **{"device": DEVICE, "dtype": case.q.dtype, **sizes, **options})


def rotation_of(case, dtype):
    """cos and sin in the layout of `RotaryEmbedding`: halves of one gathered tensor."""
    half = case.spec.head_dim // 2
    angles = case.batch.positions[:, None].float() * 0.3 ** torch.arange(half, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).unsqueeze(1)
    return table.chunk(2, dim=-1)


def heads_of(case, padding=0):
    """The fused projection [T, H + 2 K, D]; with padding, a view of a wider tensor."""
    heads = torch.cat([case.q, case.k, case.v], 1)
    wide = torch.full(
        (heads.shape[0], heads.shape[1] * heads.shape[2] + padding), float("nan"), device=DEVICE
    ).to(heads.dtype)
    wide[:, : heads.shape[1] * heads.shape[2]] = heads.flatten(1)
    return wide[:, : heads.shape[1] * heads.shape[2]].unflatten(1, heads.shape[1:])


def norm_of(case, wide):
    shape = (case.spec.num_heads + case.spec.num_kv_heads, case.spec.head_dim)
    weight = 1 + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    dtype = torch.float32 if wide else case.q.dtype
    return HeadNormWeights(weight=weight.to(DEVICE, dtype), eps=1e-6)
