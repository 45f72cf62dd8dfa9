"""Replaces the package flash_attn: its two functions with a paged cache, with other kernels.

Found first on the path by `run_nano_vllm.py`. FLASH_ATTN_SHIM selects the kernels:

    fa3      FlashAttention-3 from a vLLM wheel      (vllm.vllm_flash_attn, Hopper)
    triton   nanoengine's kernels                    (nanoengine.attention.triton)

It supports only what an inference engine calls: causal attention without dropout, windows or bias.
"""

from __future__ import annotations

import os

import torch

KERNELS = os.environ.get("FLASH_ATTN_SHIM", "")
if KERNELS == "fa3":
    from flash_attn.over_fa3 import decode, prefill
elif KERNELS == "triton":
    from flash_attn.over_triton import decode, prefill
else:
    raise ImportError(f"FLASH_ATTN_SHIM must be fa3 or triton, got {KERNELS!r}")


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ragged causal attention of q [T, H, D] over k, v [T', K, D], or over a cache [B, P, K, D]."""
    if not causal:
        raise NotImplementedError("the shim only supports causal attention")
    return prefill(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, block_table
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    """One query token per sequence, q [S, 1, H, D], over a cache [B, P, K, D]: [S, 1, H, D]."""
    if not causal or q.shape[1] != 1:
        raise NotImplementedError("the shim only decodes one token per sequence, causally")
    out = decode(q[:, 0], k_cache, v_cache, cache_seqlens, block_table, softmax_scale)
    return out[:, None]
