"""KVCache: one tensor for all keys and values, and how blocks are copied.

    kv [2, layers of a group, num_blocks, P, K, D]      P tokens per block, K KV heads, D head dim
        │        │                                  (heads first, [K, P, D], if the backend asks)
        keys,    layer i of every group uses slice i; groups share the pool, but no block
        values                                  (int8: D + 4, a float32 scale after D codes)
    kv [1, ...]    if values are parts of their keys (MLA): see `AttentionSpec.value_dim`
    states [layers, 1 + num_states, elements of a state]     slot 0 stays zero

The ModelRunner allocates it once, at its start; nothing grows while the engine runs.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nanoengine.attention.base import KVLayoutName
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import LinearAttentionConfig
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import BlockCopy
from nanoengine.layers.attention import Attention
from nanoengine.runner.memory import GIB, kv_groups
from nanoengine.runner.transfers import ship

if TYPE_CHECKING:
    from nanoengine.models.linear_attention import RecurrentLayer


MMAP_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANON} if hasattr(mmap, "MAP_PRIVATE") else {}
"""Flags for private memory. Windows has no such flags, and anonymous memory is private there."""


def block_bytes(
    *, block_size: int, num_kv_heads: int, head_dim: int, num_layers: int, dtype: torch.dtype,
    parts: int = 2,
) -> int:  # fmt: skip
    """Bytes of one block: keys and values of `block_size` tokens over `num_layers` layers. With
    `parts=1` only keys are stored, and the values are parts of them.

    >>> f16 = torch.float16
    >>> block_bytes(block_size=16, num_kv_heads=32, head_dim=128, num_layers=1, dtype=f16)
    262144
    >>> block_bytes(block_size=16, num_kv_heads=8, head_dim=128, num_layers=80, dtype=f16)
    5242880
    """
    row_bytes = stored_dim(head_dim, dtype) * dtype.itemsize
    return parts * block_size * num_kv_heads * num_layers * row_bytes


def stored_dim(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Stored elements per head and token: int8 adds a float32 scale, which takes 4 elements."""
    return head_dim + 4 if kv_dtype == torch.int8 else head_dim


def state_dtype_for(dtype: torch.dtype) -> torch.dtype:
    """The dtype of recurrent states: at least float32, because they accumulate every token."""
    return torch.promote_types(dtype, torch.float32)


def state_bytes(layers: Iterable[LinearAttentionConfig], dtype: torch.dtype) -> int:
    """Bytes of one recurrent state over these layers, for a model of `dtype`."""
    return sum(plan.size for plan in layers) * state_dtype_for(dtype).itemsize


def make_groups(
    config: ModelConfig, *, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[KVGroup, ...]:
    """The KV groups of a model of `dtype`: one if all layers cache the same per token."""
    plan = config.plan
    special_caches = config.states, plan.gemma4, plan.mla, *config.sliding_windows
    if not any(special_caches):
        return (KVGroup(layers=tuple(range(config.num_hidden_layers))),)
    from nanoengine.runner.groups import hybrid_groups

    sizes = {"block_size": block_size, "kv_dtype": kv_dtype, "block_bytes": block_bytes}
    return hybrid_groups(config, state_dtype=state_dtype_for(dtype), **sizes)


def layers_per_slice(config: ModelConfig, groups: Sequence[KVGroup]) -> list[int]:
    """Number of layers that share a slice, per group; [] if no layers share one."""
    gemma4 = config.plan.gemma4
    return [gemma4.layers_per_slice(group.sliding_window) for group in groups] if gemma4 else []


def stored_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the cache that the option `kv_cache_dtype` means for a model of `dtype`."""
    stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "bfloat16": torch.bfloat16}
    return stored.get(kv_cache_dtype, dtype)


class KVCache:
    """The KV tensor and its per-layer slices.

    Args:
        layout: layers of a group share block tables; the largest group sets the number of slices.
        order: the attention backend's order of dimensions inside a block.
        state_dtype: dtype of the state group; `bind` allocates its tensor.
        parts: 2: keys and values; 1: see `block_bytes`.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_kv_heads: int,
        head_dim: int,
        order: KVLayoutName,
        dtype: torch.dtype,
        device: torch.device,
        state_dtype: torch.dtype = torch.float32,
        parts: int = 2,
    ) -> None:
        size, self.groups = layout.block_size, kv_groups(layout.groups)
        inner = (size, num_kv_heads) if order == "PKD" else (num_kv_heads, size)
        slices = max(len(group.layers) for group in self.groups)
        shape = parts, slices, layout.num_blocks, *inner, stored_dim(head_dim, dtype)
        self.kv = zeros(shape, dtype, device)
        self.num_blocks, self.num_states = layout.num_blocks, layout.num_states
        self.state_dtype = state_dtype
        self.states: torch.Tensor | None = None

    def bind(
        self, layers: Sequence[Attention], state_layers: Sequence[RecurrentLayer] = ()
    ) -> None:
        """Gives each attention layer its k_cache and v_cache slice and its group, and each layer
        with a recurrent state its slice of the states."""
        layer_ids = sorted(layer_id for group in self.groups for layer_id in group.layers)
        by_id = dict(zip(layer_ids, layers, strict=True))
        for group_id, group in enumerate(self.groups):
            for slice_id, layer_id in enumerate(group.layers):
                layer, values = by_id[layer_id], self.kv[-1, slice_id]
                layer.bind(self.kv[0, slice_id], values[..., : layer.spec.value_dim], group_id)
        if self.num_states:
            shape = (len(state_layers), 1 + self.num_states, state_layers[0].plan.size)
            self.states = zeros(shape, self.state_dtype, self.kv.device)
            for states, state_layer in zip(self.states, state_layers, strict=True):
                state_layer.bind(states)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks and states over all layers; all sources are read before any target is
        written."""
        pairs = np.array(copies, np.int64)
        if self.states is not None:
            is_state = pairs[:, 0] >= self.num_blocks
            if is_state.any():
                from nanoengine.runner.recurrent_states import state_slots

                _copy(self.states, 1, state_slots(pairs[is_state], self.num_blocks))
            pairs = pairs[~is_state]
        if len(pairs):
            # Why bytes: index_copy_ does not support fp8.
            is_fp8 = self.kv.dtype == torch.float8_e4m3fn
            _copy(self.kv.view(torch.uint8) if is_fp8 else self.kv, 2, pairs)


def _copy(tensor: torch.Tensor, dim: int, pairs: NDArray[np.int64]) -> None:
    """Copies entries along a dimension, pairs [.., 2] of source and target; reads all sources
    first."""
    src, dst = ship(tensor.device, pairs)[0].unbind(1)
    # Why index_copy_: `kv[:, :, dst] = ...` on a view made by indexing would write a temporary.
    tensor.index_copy_(dim, dst, tensor.index_select(dim, src))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed tensor; on a CPU the system allocates its memory only where it is first written.

    Why zeros at all: padding rows read the null block, where uninitialised memory might be NaN.

    Raises:
        MemoryError: the machine has too little memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, **MMAP_FLAGS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes / GIB:,.1f} GiB of KV blocks") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Why: pages are first touched block by block and row by row. Perf: the first touch runs at
        # 1.4 GB/s with 4 KiB pages, and at 0.3 GB/s with 2 MiB pages, which a virtual machine has
        # to get from its host.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
