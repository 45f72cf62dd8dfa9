"""Downloads that arrive late, and a graph-safe backend, for runs on the CPU as if on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanoengine.attention.base import LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.naive import NaiveBackend


class LateDownload:
    """Copies only in `wait`, which shows whether later steps overwrite the data."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._tensors]


class GraphSafeNaive(NaiveBackend):
    """The naive backend, with attention of decode batches that reads no value on the host."""

    graph_safe = True

    def prepare(self, batch: Batch) -> object:
        if batch.num_decodes == batch.num_seqs:
            return None
        return super().prepare(batch)

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        if batch.attention is not None:
            return super().attend(q, cache, batch)
        k_cache, v_cache, spec = cache
        tables = batch.block_tables[spec.group].long()  # [S, M]
        k, v = k_cache[tables].flatten(1, 2), v_cache[tables].flatten(1, 2)  # [S, C, K, D]
        distance = batch.seq_lens[:, None] - 1 - torch.arange(k.shape[1], device=q.device)
        visible = (distance >= 0) & (distance < (spec.sliding_window or k.shape[1]))
        grouped = q.unflatten(1, (spec.num_kv_heads, -1))  # [S, K, R, D]
        scores = torch.einsum("skrd,sckd->skrc", grouped, k) * spec.scale
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
        v = v.masked_fill(~visible[:, :, None, None], 0.0)
        return torch.einsum("skrc,sckd->skrd", scores.softmax(-1), v).flatten(1, 2)


def make_graph_safe(name, *, device, dtype, head_dim, block_size, kv_dtype, deterministic, is_mla):
    """Replaces `make_backend` for engines without further options."""
    assert kv_dtype == dtype and not (deterministic or is_mla), (kv_dtype, deterministic, is_mla)
    return GraphSafeNaive(device=device, dtype=dtype, head_dim=head_dim, block_size=block_size)
