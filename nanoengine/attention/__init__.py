"""Attention backends over one paged KV cache, and how one is selected.

| name | device | implementation |
|---|---|---|
| naive | any device | plain torch, the reference implementation of the others |
| cpu | CPU | paged kernels compiled by numba |
| triton | CUDA | paged FlashAttention kernels of this package, the default; `triton_mla.py` for
MLA | | flash_attn | CUDA | the flash-attn package, if installed |
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import torch

from nanoengine.errors import ConfigError

if TYPE_CHECKING:
    from nanoengine.attention.base import AttentionBackend

logger = logging.getLogger(__name__)

BACKENDS = {
    "naive": ("nanoengine.attention.naive", "NaiveBackend"),
    "cpu": ("nanoengine.attention.cpu", "CPUBackend"),
    "triton": ("nanoengine.attention.triton", "TritonBackend"),
    "flash_attn": ("nanoengine.attention.flash", "FlashAttnBackend"),
}


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str:
    """Returns the backend for `name` on `device`; "auto" selects cpu on the CPU and triton on CUDA.

    For float16 on a CPU "auto" selects naive; also, with a warning, on GPUs of compute capability
    below 8.0.
    """
    if name == "auto" and device.type == "cpu":
        return "naive" if dtype == torch.float16 else "cpu"
    if name == "auto":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return "triton"
        reason = f"this GPU's compute capability is {major}.{minor}, attention kernels need 8.0"
        logger.warning("%s: using attention_backend='naive' instead, which is slow", reason)
        return "naive"
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}"
        )
    return name


def backend_class(name: str) -> type[AttentionBackend]:
    """Returns the class of a resolved name; its module and dependencies are imported only here."""
    module, attribute = BACKENDS[name]
    return getattr(importlib.import_module(module), attribute)


def make_backend(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    is_mla: bool = False,
) -> AttentionBackend:
    """Builds a resolved backend for one engine.

    Args:
        kv_dtype: dtype of the KV cache; None: `dtype`.
        deterministic: a token's result has the same bits in any batch and chunk.
        is_mla: the model uses MLA, in which values are parts of their keys.

    Raises:
        ConfigError: the backend doesn't support this device, dtype, head_dim, block size or cache;
            the message says what it supports.
        MissingDependencyError: its package is not installed.
    """
    if deterministic and name != "triton":
        raise ConfigError(
            f"deterministic=True needs attention_backend='triton' on a CUDA GPU, got {name}: remove"
            " it; the last bits of a result rarely change a greedy token"
        )
    options = {"deterministic": True} if deterministic else {}
    cls = backend_class(name)
    if is_mla and name == "flash_attn":
        raise ConfigError(
            "attention backend flash_attn does not support MLA, which this model uses: set"
            " attention_backend='auto'"
        )
    if is_mla and name == "triton":
        from nanoengine.attention.triton_mla import TritonMLABackend as cls
    backend = cls(device=device, dtype=dtype, head_dim=head_dim, block_size=block_size, **options)
    if kv_dtype not in (None, dtype):
        backend.check_cache(kv_dtype, dtype)
    return backend
