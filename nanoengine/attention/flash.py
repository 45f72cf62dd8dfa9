"""FlashAttnBackend: an adapter from nanoengine's batches to the flash-attn package.

`attention.make_backend` makes it for `attention_backend="flash_attn"`. Its only kernel is the KV
store, which it shares with the Triton backend. Two packages serve it, both by the same authors:

| package | GPUs | blocks |
|---|---|---|
| `flash_attn_interface` (FlashAttention-3) | Hopper, taken there if installed | any size |
| `flash_attn` 2.x | compute capability 8.0 and newer | multiples of 256 |

Both split the keys of a decode by what the whole batch looks like, so a row's last bits may depend
on its neighbours; the triton backend's don't.

The argument mapping is tested against the documented signatures in plain torch; the packages
themselves need a GPU and have not been run with it yet.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import ClassVar

import torch

from nanoengine.attention.base import AttentionBackend, KVLayoutName, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.triton import store_kv
from nanoengine.errors import ConfigError, MissingDependencyError

FA2_BLOCK_MULTIPLE = 256
"""The block sizes that FlashAttention-2 accepts for a paged cache are its multiples [tokens]."""


class FlashAttnBackend(AttentionBackend):
    """FlashAttention-2 or -3 over the paged cache.

    Raises:
        MissingDependencyError: neither package is installed.
        ConfigError: a dtype other than float16 and bfloat16; a head dim above 256 or not a multiple
            of 8; with FlashAttention-2 a block size that is no multiple of 256; a device that is no
            CUDA GPU of compute capability 8.0 or newer.
    """

    name: ClassVar[str] = "flash_attn"
    kv_layout: ClassVar[KVLayoutName] = "PKD"
    default_block_size: ClassVar[int] = FA2_BLOCK_MULTIPLE
    graph_safe: ClassVar[bool] = True
    takes_sinks: ClassVar[bool] = False

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            raise ConfigError(
                "attention backend flash_attn needs a CUDA GPU of compute capability 8.0 or newer,"
                f" got device {device}: set attention_backend='auto'"
            )
        hopper = torch.cuda.get_device_capability(device)[0] == 9
        self.version, self.package = _import_package(hopper)
        if dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f"attention backend flash_attn computes float16 and bfloat16 only, got {dtype}:"
                " set dtype='bfloat16', or attention_backend='triton'"
            )
        if head_dim > 256 or head_dim % 8:
            raise ConfigError(
                "attention backend flash_attn does head dims up to 256 that are multiples of 8,"
                f" got {head_dim}: set attention_backend='triton'"
            )
        if self.version == 2 and block_size % FA2_BLOCK_MULTIPLE:
            raise ConfigError(
                "attention backend flash_attn (FlashAttention-2) needs a block_size that is a"
                f" multiple of {FA2_BLOCK_MULTIPLE}, got {block_size}: set block_size=256, or"
                " attention_backend='triton' for finer blocks"
            )

    def prepare(self, batch: Batch) -> torch.Tensor:
        """Where each sequence's keys would start if they stood in a row, [S + 1] int32.

        Why: FlashAttention-2 wants lengths in this form, though with a block table the keys do not
        lie in a row.
        """
        starts = torch.zeros_like(batch.query_start_loc)
        torch.cumsum(batch.seq_lens, 0, dtype=torch.int32, out=starts[1:])
        return starts

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        store_kv(k, v, cache, batch)

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        k_cache, v_cache, spec = cache
        table = batch.block_tables[spec.group]
        window = spec.sliding_window
        # Both versions count the window's tokens before and after a query, without itself.
        common = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": spec.softcap or 0.0,
        }
        decodes = batch.num_decodes == batch.num_seqs
        if self.version == 3:
            ragged = {
                "cu_seqlens_q": batch.query_start_loc,
                "max_seqlen_q": batch.max_query_len,
            }
            return self.package.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=batch.seq_lens, page_table=table,
                **ragged, **common,
            )  # fmt: skip
        if decodes:
            out = self.package.flash_attn_with_kvcache(
                q.unsqueeze(1), k_cache, v_cache,
                cache_seqlens=batch.seq_lens, block_table=table, **common,
            )  # fmt: skip
            return out.squeeze(1)
        return self.package.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q=batch.query_start_loc, cu_seqlens_k=batch.attention,
            max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_seq_len,
            block_table=table, **common,
        )  # fmt: skip


def _import_package(hopper: bool) -> tuple[int, ModuleType]:
    """The FlashAttention version to use, 2 or 3, and its module."""
    candidates = [(3, "flash_attn_interface")] if hopper else []
    for version, name in [*candidates, (2, "flash_attn")]:
        try:
            return version, importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # It is there but broken: its own error says more.
                raise
    raise MissingDependencyError(
        "attention backend flash_attn needs the package flash-attn: pip install"
        " 'nanoengine[flash]' (a long build, which needs nvcc), or set attention_backend='triton'"
    )
