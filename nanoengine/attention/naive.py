"""NaiveBackend: paged attention in plain torch, the reference implementation of the other backends.

It supports any device, dtype and block size. It is slow on purpose: each sequence's context is
gathered into one dense tensor, one sequence at a time. Made by `attention.make_backend`.

    block table of a sequence    3     7     1            block_size 4, seq_len 10
    its keys                     0..3  4..7  8 9          position i is in table[i // 4] at i % 4
    its queries                            7 8 9          its last query_len positions

8-bit caches are in `kv_quantization.py`.

Legend: T tokens, N queries of one sequence, C keys they see, H / K query / KV heads, R = H / K, D
head dim.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from nanoengine.attention.base import AttentionBackend, AttentionSpec, KVLayoutName, LayerCache
from nanoengine.attention.batch import Batch


class NaiveBackend(AttentionBackend):
    """Dense masked attention over gathered blocks.

    Why: it is short enough to be checked by eye, so other kernels can be checked against it.
    """

    name: ClassVar[str] = "naive"
    kv_layout: ClassVar[KVLayoutName] = "PKD"
    default_block_size: ClassVar[int] = 16
    graph_safe: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Why: 16-bit scores would lose more than the kernels under test; float64 stays float64.
        self.math_dtype = torch.float32 if self.dtype.itemsize < 4 else self.dtype

    def check_cache(self, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Accepts every dtype: plain torch converts on any device."""

    def prepare(self, batch: Batch) -> list[tuple[int, int, int]]:
        """For each sequence (first query token, one past the last, seq_len), as Python ints."""
        starts = batch.query_start_loc.tolist()
        return list(zip(starts[:-1], starts[1:], batch.seq_lens.tolist(), strict=True))

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        k_cache, v_cache, spec = cache
        out = q.new_empty(*q.shape[:2], spec.value_dim or q.shape[-1])
        for table, (start, end, seq_len) in zip(
            batch.block_tables[spec.group], batch.attention, strict=True
        ):
            positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
            # Why: only keys that some query sees are gathered; blocks before the sliding window may
            # have been freed, and 0 * NaN from reused memory would not be 0.
            first = max(0, seq_len - (end - start) - (spec.sliding_window or seq_len) + 1)
            keys = torch.arange(first, seq_len, device=q.device)
            blocks, offsets = table[keys // self.block_size], keys % self.block_size
            out[start:end] = self.attend_dense(
                q[start:end], k_cache[blocks, offsets], v_cache[blocks, offsets],
                positions, keys, spec,
            )  # fmt: skip
        return out

    def attend_dense(
        self,
        q: torch.Tensor,  # [N, H, D]
        k: torch.Tensor,  # [C, K, D]
        v: torch.Tensor,  # [C, K, D or value_dim]
        positions: torch.Tensor,  # [N]
        keys: torch.Tensor,  # [C]
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """softmax(q k^T * scale) v for the keys that each query may see -> [N, H, D]."""
        # Query heads k*R ... k*R + R - 1 share KV head k.
        grouped = q.to(self.math_dtype).unflatten(1, (spec.num_kv_heads, -1))  # [N, K, R, D]
        if k.dtype.itemsize == 1:
            from nanoengine.attention.kv_quantization import from_bytes

            k = from_bytes(k, spec.k_scale, self.math_dtype)
            v = from_bytes(v, spec.v_scale, self.math_dtype)
        k, v = k.to(self.math_dtype), v.to(self.math_dtype)
        scores = torch.einsum("nkrd,ckd->krnc", grouped, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = positions[:, None] - keys[None, :]  # [N, C]
        visible = distance >= 0
        if spec.sliding_window is not None:
            visible &= distance < spec.sliding_window
        scores = scores.masked_fill(~visible, -torch.inf)
        if spec.sinks is not None:
            sinks = spec.sinks.to(self.math_dtype).view(*scores.shape[:2], 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        return torch.einsum("krnc,ckd->nkrd", weights, v).flatten(1, 2).to(q.dtype)
