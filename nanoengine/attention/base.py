"""AttentionBackend: the base of paged attention kernels, and the data that a layer passes to them.

A layer calls two methods per step. `rotate_and_store` applies the QK norm and RoPE, and writes the
step's keys and values into the paged cache at `batch.slot_mapping`. `attend` then computes each
query over its sequence's whole context *through the cache*. A layer stores all tokens of a step
before it reads any, so a sequence may read blocks that another one writes in the same step.

This file has QK norm and RoPE in plain torch; backends may fuse them with the store. Rounding
follows the checkpoints' own code. If a norm's weight has the model's dtype, the norm is rounded to
that dtype before the multiplication by the weight; if the weight is wider, afterwards.

8-bit caches are in `kv_quantization.py`.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX. The norm per
head is from Qwen3 (arXiv 2505.09388), the norm over all heads from OLMo 2 (arXiv 2501.00656).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F

from nanoengine.attention.batch import Batch
from nanoengine.errors import ConfigError

KVLayoutName = Literal["PKD", "KPD"]
"""Order of the dimensions inside a block: P tokens, K KV heads, D head dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What one layer's attention computes.

    Attributes:
        num_heads, num_kv_heads, head_dim: of this rank; num_heads is a multiple of num_kv_heads.
        scale: factor on q.k, usually head_dim ** -0.5.
        sliding_window: None, or w: a token sees itself and the w - 1 tokens before it.
        softcap: None, or c: scores become c * tanh(score / c).
        k_scale, v_scale: factors on the elements of an fp8 cache; unused for a cache of the model's
            dtype.
        group: index of the layer's KV group in `batch.slot_mapping` and `batch.block_tables`.
        value_dim: None: values have head_dim elements and a cache of their own; else a value is the
            first value_dim elements of its key, and only the key is cached.
        sinks: [H] float32 or wider, or None: a learned score per head, which adds to the sum of the
            softmax without a value, so that a head may attend to nothing. Source: the model code of
            gpt-oss; Xiao et al. (arXiv 2309.17453) for the name.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    group: int = 0
    value_dim: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)


class LayerCache(NamedTuple):
    """One layer's slices of the KV cache, and what its attention computes over them.

    Attributes:
        k_cache, v_cache: the layer's blocks, [B, P, K, D], or [B, K, P, D] if the backend's
            `kv_layout` is "KPD". The dtype is the model's, or another that `check_cache` allows. In
            an int8 cache, D is D + 4: a float32 scale follows the elements. If `spec.value_dim` is
            set, v_cache is a view of k_cache.
        spec: heads, scale, window and KV group.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    spec: AttentionSpec


Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of one step's positions, each [T, 1, D / 2], the halves of one tensor [T, 1, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormWeights:
    """RMSNorm of query and key heads: weight [H + K, D] in the model's dtype or wider.

    Attributes:
        eps: None: heads are only multiplied by the weight, and not normalized.
        all_heads: None: one norm per head; (H, K): one norm over all H query heads, and one over
            all K key heads.
    """

    weight: torch.Tensor
    eps: float | None
    all_heads: tuple[int, int] | None = None


class AttentionBackend(ABC):
    """A paged attention kernel with its cache layout.

    Class attributes:
        name: its value of the option `attention_backend`.
        kv_layout: "PKD" for caches [num_blocks, block_size, num_kv_heads, head_dim], "KPD" for
            heads first.
        default_block_size: [tokens], chosen by measurement.
        graph_safe: a CUDA graph can capture its launches.
        supports_sinks: it computes `AttentionSpec.sinks`.
        device_type: the only device type that it supports; None: any.
        min_arch: the oldest GPU that it supports, as `arch_of` returns it.
        dtypes: the dtypes that it supports; (): any.
        head_dims: the head dims that it supports.
        min_block_size: the smallest block size; block sizes are powers of two. 0: any.

    `attention.make_backend` makes one instance, which serves all layers of an engine. It keeps no
    state between steps, so two batches may be in flight. All other code moves whole blocks, and
    does not depend on the layout inside a block.
    """

    name: ClassVar[str]
    kv_layout: ClassVar[KVLayoutName]
    default_block_size: ClassVar[int]
    graph_safe: ClassVar[bool]
    supports_sinks: ClassVar[bool] = True
    device_type: ClassVar[str | None] = None
    min_arch: ClassVar[int] = 0
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()
    head_dims: ClassVar[range] = range(1, 2**16 + 1)
    min_block_size: ClassVar[int] = 0

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
    ) -> None:
        """Raises ConfigError if the class attributes don't allow these arguments."""
        self.dtype, self.block_size, self.arch = dtype, block_size, arch_of(device)
        kinds = ", ".join(map(str, self.dtypes)).replace("torch.", "")
        is_power = block_size >= self.min_block_size and not block_size & (block_size - 1)
        check = self.require
        check(self.device_type in (None, device.type), f"supports {self.device_type}, got {device}")
        capability = f"compute capability {self.min_arch / 10} or newer, got {self.arch / 10}"
        check(self.arch >= self.min_arch, f"needs a GPU of {capability}")
        check(not kinds or dtype in self.dtypes, f"supports {kinds}, got {dtype}")
        dims = self.head_dims
        supported = f"from {dims[0]} to {dims[-1]} in steps of {dims.step}, got {head_dim}"
        check(head_dim in dims, f"supports head dims {supported}")
        size = f"a block_size that is a power of two from {self.min_block_size}, got {block_size}"
        check(is_power or not self.min_block_size, f"needs {size}")

    def require(self, condition: bool, requirement: str) -> None:
        """Raises ConfigError unless the condition is true; `requirement` says what the backend
        supports, and what it got."""
        if not condition:
            raise ConfigError(
                f"attention backend {self.name} {requirement}: change that, or set"
                " attention_backend='auto' or 'naive'"
            )

    def check_cache(self, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Raises ConfigError unless a model of `dtype` may have a cache of `kv_dtype`."""
        case, backend = f"{kv_dtype} for a {dtype} model".replace("torch.", ""), "'cpu' or 'naive'"
        if kv_dtype == torch.float8_e4m3fn:
            case, backend = "fp8", "'triton' on a GPU, 'naive' elsewhere"
        raise ConfigError(
            f"attention backend {self.name} does not support a KV cache of {case}: set"
            f" kv_cache_dtype='auto', or attention_backend={backend}"
        )

    @abstractmethod
    def prepare(self, batch: Batch) -> object:
        """Computes the data that all layers of a step share; it becomes `batch.attention`."""

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        """Writes k, v [T, K, D] to the step's slots of a cache [B, P, K, D]."""
        k_cache, v_cache, spec = cache
        slots = batch.slot_mapping[spec.group]
        index = slots // self.block_size, slots % self.block_size
        if (dtype := k_cache.dtype).itemsize == 1:
            from nanoengine.attention.kv_quantization import to_bytes

            k, v = to_bytes(k, dtype, spec.k_scale), to_bytes(v, dtype, spec.v_scale)
        k_cache[index] = k.to(dtype)
        v_cache[index] = v.to(dtype)

    @abstractmethod
    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        """Computes queries [T, H, D] over their sequences' contexts -> [T, H, D or value_dim]."""

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        norm: HeadNormWeights | None,
        cache: LayerCache,
        batch: Batch,
    ) -> torch.Tensor:
        """Applies QK norm and RoPE to queries and keys, and stores keys and values.

        Args:
            heads: [T, H + 2 K, D], the fused projection: query heads, key heads, value heads.

        Returns:
            The queries [T, H, D], ready for `attend`.
        """
        num_heads, num_kv_heads = cache.spec.num_heads, cache.spec.num_kv_heads
        qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        q, k = rotate(qk, rotation, norm).split((num_heads, num_kv_heads), dim=1)
        self.store(k, v, cache, batch)
        return q

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: Batch
    ) -> torch.Tensor:
        """Stores k, v [T, K, D] without norm and RoPE, then attends q [T, H, D] -> [T, H, D]."""
        self.store(k, v, cache, batch)
        return self.attend(q, cache, batch)


def arch_of(device: torch.device) -> int:
    """Returns a GPU's compute capability as 10 * major + minor. Without a GPU, in Triton's
    interpreter, it returns 90, which supports everything."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def normed_heads(x: torch.Tensor, norm: HeadNormWeights) -> torch.Tensor:
    """Applies the norm to the heads of x [T, H + K, D]."""
    wide = x.to(norm.weight.dtype)
    if norm.eps is None:
        normed = wide
    elif norm.all_heads is None:
        normed = F.rms_norm(wide, (x.shape[-1],), None, norm.eps)
    else:
        rows = [part.flatten(1) for part in wide.split(norm.all_heads, dim=1)]
        normed = torch.cat([F.rms_norm(row, row.shape[1:], None, norm.eps) for row in rows], dim=1)
    return (normed.view(x.shape) * norm.weight).to(x.dtype)


def rotate(x: torch.Tensor, rotation: Rotation, norm: HeadNormWeights | None) -> torch.Tensor:
    """Applies the norm and RoPE to the heads of x [T, H + K, D], over the pairs (x[i], x[i + D /
    2]); returns a new tensor."""
    if norm is not None:
        x = normed_heads(x, norm)
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out
