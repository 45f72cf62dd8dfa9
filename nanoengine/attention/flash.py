"""FlashAttnBackend: an adapter from nanoengine's batches to the flash-attn package.

Made by `attention.make_backend` for `attention_backend="flash_attn"`. torch stores keys and values;
one of two packages computes attention:

| package | GPUs | blocks |
|---|---|---|
| `flash_attn_interface` (FlashAttention-3) | Hopper, preferred there if installed | any size |
| `flash_attn` 2.x | compute capability 8.0 and newer | multiples of 256 |

FlashAttention-4 is not used.

Both choose the splits of a decode's keys by the whole batch, so the last bits of a result may
depend on the other sequences. The triton backend's don't.

Tests call it with functions in plain torch that have the documented signatures. The packages need a
GPU, and have not been run with it yet.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, ClassVar

import torch

from nanoengine.attention.base import AttentionBackend, KVLayoutName, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.errors import MissingDependencyError

FA2_BLOCK_MULTIPLE = 256
"""FlashAttention-2 accepts multiples of this block size for a paged cache [tokens]."""


class FlashAttnBackend(AttentionBackend):
    """FlashAttention-2 or -3 over the paged cache.

    Raises:
        MissingDependencyError: neither package is installed.
        ConfigError: a dtype other than float16 and bfloat16; a head dim above 256 or not a multiple
            of 8; with FlashAttention-2 a block size that is not a multiple of 256; a device that is
            not a CUDA GPU of compute capability 8.0 or newer.
    """

    name: ClassVar[str] = "flash_attn"
    kv_layout: ClassVar[KVLayoutName] = "PKD"
    default_block_size: ClassVar[int] = FA2_BLOCK_MULTIPLE
    graph_safe: ClassVar[bool] = True
    supports_sinks: ClassVar[bool] = False
    device_type: ClassVar[str] = "cuda"
    min_arch: ClassVar[int] = 80
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    head_dims: ClassVar[range] = range(8, 257, 8)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.version, self.package = import_package(hopper=self.arch == 90)
        multiple = FA2_BLOCK_MULTIPLE if self.version == 2 else 1
        self.require(
            self.block_size % multiple == 0,
            f"(FlashAttention-{self.version}) needs a block_size that is a multiple of {multiple},"
            f" got {self.block_size}",
        )

    def prepare(self, batch: Batch) -> object:
        """Returns the data that a step's layers share. FlashAttention-2: cumulative key lengths, [S
        + 1] int32. FlashAttention-3: a dict for its plans."""
        if self.version == 3:
            return {}
        starts = torch.zeros_like(batch.query_start_loc)
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return starts

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        k_cache, v_cache, spec = cache
        table = batch.block_tables[spec.group]
        window = spec.sliding_window
        # Both versions count a window's tokens before and after a query, without the query.
        common = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": spec.softcap or 0.0,
        }
        ragged = {"cu_seqlens_q": batch.query_start_loc, "max_seqlen_q": batch.max_query_len}
        if self.version == 3:
            return self.package.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=batch.seq_lens, page_table=table,
                scheduler_metadata=self._plan(q, cache, batch), **ragged, **common,
            )  # fmt: skip
        # Why for decodes too: `flash_attn_with_kvcache` of 2.8.4 waits until the host knows the
        # longest length, which no graph capture allows. This function splits the keys of decodes if
        # several query heads share one and there is no window. Source:
        # csrc/flash_attn/flash_api.cpp.
        return self.package.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_k=batch.attention, max_seqlen_k=batch.max_seq_len,
            block_table=table, **ragged, **common,
        )  # fmt: skip

    def _plan(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor | None:
        """Returns FlashAttention-3's plan for sharing a step's work among the multiprocessors;
        without it each layer would launch a kernel to compute it. None: this build can't plan
        ahead."""
        make_plan = getattr(self.package, "get_scheduler_metadata", None)
        if make_plan is None:
            return None
        plans, spec, block_size = batch.attention, cache.spec, cache.k_cache.shape[1]
        window, softcap = spec.sliding_window, bool(spec.softcap)
        key = spec.num_heads, spec.num_kv_heads, spec.head_dim, window, softcap
        if key not in plans:
            plans[key] = make_plan(
                batch.num_seqs, batch.max_query_len, batch.block_tables.shape[-1] * block_size,
                *key[:3], batch.seq_lens, qkv_dtype=q.dtype, cu_seqlens_q=batch.query_start_loc,
                page_size=block_size, causal=True, has_softcap=softcap,
                window_size=(-1, -1) if window is None else (window - 1, 0),
            )  # fmt: skip
        return plans[key]


def import_package(hopper: bool) -> tuple[int, ModuleType]:
    """The FlashAttention version to use, 2 or 3, and its module."""
    candidates = [(3, "flash_attn_interface", "flash_attn_with_kvcache")] if hopper else []
    for version, name, function in [*candidates, (2, "flash_attn", "flash_attn_varlen_func")]:
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # It is installed, but one of its imports fails.
                raise
        else:
            if hasattr(package, function):  # false if only FlashAttention-4 is installed
                return version, package
    raise MissingDependencyError(
        "attention backend flash_attn needs FlashAttention-2 or, on Hopper, -3: pip install"
        " 'nanoengine[flash]' (compiles for long, needs nvcc), or set attention_backend='triton'"
    )
