"""TritonBackend: paged attention on CUDA with nanoengine's own kernels; the default backend there.

Made by `attention.make_backend`, called by every attention layer. This file chooses tile sizes,
grids and scratch memory; the kernels are in `triton_store.py` and `triton_kernels.py`.

    norm, rotate and store (all tokens) -> decode (first num_decodes sequences)
                                        -> varlen (all others)

Grid sizes come from Python ints of the batch, so nothing waits for the GPU. A CUDA graph can
capture the launches of a batch of decodes. A graph captured with a greater `max_seq_len` serves
shorter sequences too: surplus programs exit at once.

A token's result does not depend on the other sequences of the batch: key tiles and splits depend
only on its own sequence, and a second kernel adds the splits in order. A single token of a sequence
uses the decode kernel, a chunk the varlen kernel. The two agree up to rounding, but not bit for
bit. So with `deterministic` all tokens use the varlen kernel, and all tiles are masked. A tile
without visible keys leaves a row's sums unchanged, so it does not matter which tokens share a tile.
There are no splits then, which is slow for few sequences with long contexts.

The kernels have been run in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`, float32 and
float16) and compiled ahead of time for sm_80, sm_89 and sm_90. They have not run on a GPU yet; tile
sizes were chosen by registers, spills and shared memory of the compiled code, not by time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from nanoengine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    HeadNormWeights,
    KVLayoutName,
    LayerCache,
    Rotation,
)
from nanoengine.attention.batch import Batch
from nanoengine.attention.kv_quantization import FP8
from nanoengine.errors import ConfigError, MissingDependencyError

try:
    import triton
except ImportError as error:
    raise MissingDependencyError(
        "the triton attention backend needs the package triton, which CUDA builds of torch bring"
        " along: install such a build, or `pip install triton`"
    ) from error

from nanoengine.attention import triton_kernels as kernels
from nanoengine.attention import triton_store as store_kernels
from nanoengine.attention.triton_kernels import AttentionConstants, CacheConstants, TileConfig
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2

COMPILED = isinstance(kernels.varlen_kernel, triton.runtime.JITFunction)
"""False in Triton's interpreter, which TRITON_INTERPRET=1 selects when this module is imported."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Tile sizes of the two attention kernels.

    Attributes:
        split_tokens: keys per split of a decode, a multiple of `decode.keys`.
        max_splits: maximum number of splits per sequence; longer sequences have longer splits.
    """

    prefill: TileConfig
    decode: TileConfig
    split_tokens: int = 256
    max_splits: int = 32


@functools.cache
def kernel_config(
    arch: int, head_dim: int, group_size: int, dtype: torch.dtype, deterministic: bool = False,
    num_kv_heads: int = 8,
) -> KernelConfig:  # fmt: skip
    """Returns tile sizes for a GPU of compute capability `arch` (80, 89, 90, ...) and a model's
    shape.

    Why a table and no autotuning: the same model on the same GPU must always add in the same order,
    and a first request must not wait for trials. The bounds are registers (no spills) and shared
    memory: 163 KiB on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB on the smaller GPUs of each
    generation.
    """
    dim = next_power_of_2(head_dim)
    packed = max(16, next_power_of_2(group_size))  # Why 16: tl.dot needs 16 rows.
    large_smem = arch in (80, 90, 100, 103)
    warpgroups = arch in (90, 100, 103)  # Their matmuls read shared memory, which saves registers.
    if dtype == torch.float32:
        # Why small: exact float32 products run on CUDA cores, from registers.
        prefill = (32, 16, 8 if dim > 64 else 4, 2)
        decode = (16, 4, 2)
        if dim > 256:
            prefill, decode = (16, 16, 8, 1), (16, 8, 1)
    elif dim > 256:
        prefill, decode = (32, 32 if large_smem else 16, 8, 2), (16, 8, 3)
    else:
        if warpgroups:
            prefill = (128, 64 if dim <= 128 else 32, 8, 3)
        elif dim <= 128:
            prefill = (128, 64 if dim <= 64 else 32, 8, 3)
        else:
            prefill = (64, 32, 8, 2)
        decode = (32, 4, 4 if large_smem else 3) if dim <= 128 else (32, 8, 3)
        if deterministic:  # Why small: a decode uses this tile too, for one token.
            prefill = (32, *decode)
    rows, *prefill_rest = prefill
    # Why 256: one long sequence has a program per KV head and split, two per SM of an H100.
    max_splits = min(max(256 // num_kv_heads, 32), 128)
    tiles = TileConfig(max(rows, packed), *prefill_rest), TileConfig(packed, *decode)
    return KernelConfig(*tiles, max_splits=max_splits)


Strides = tuple[int, ...]


class Splits(NamedTuple):
    """The splits of a step's decodes: the grid of `decode_kernel`, its `max_splits` and its two
    scratch tensors."""

    grid: tuple[int, int]
    max_splits: int
    part_out: torch.Tensor
    part_lse: torch.Tensor


class StepData(NamedTuple):
    """The data of a step that layers of one kind share.

    Attributes:
        slots, table, table_stride: of the KV group.
        splits: of the decode kernel; None: it is not launched.
        tiles: number of query tiles of the varlen kernel.
        num_decodes: the number of sequences that the decode kernel computes; the varlen kernel
            computes the others.
    """

    slots: torch.Tensor
    table: torch.Tensor
    table_stride: int
    splits: Splits | None
    tiles: int
    num_decodes: int


def cache_constants(k_cache: torch.Tensor, v_cache: torch.Tensor) -> CacheConstants:
    """The block size and strides of one layer's cache."""
    return CacheConstants(k_cache.shape[1], *k_cache.stride()[:3], *v_cache.stride()[:3])


@functools.cache
def rotate_constants(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, eps: float | None,
    heads: Strides, cos: Strides, sin: Strides, cache: CacheConstants,
) -> tuple[int, Constants]:  # fmt: skip
    """Programs per token of `rotate_store_kernel`, and its constants; `eps` None: no norm."""
    assert heads[2] == cos[2] == sin[2] == 1, "heads must be contiguous"
    rows = rotate_rows(num_rows, head_dim)
    constants = Constants(
        TOKEN=heads[0], HEAD=heads[1], COS_TOKEN=cos[0], SIN_TOKEN=sin[0], CACHE=cache,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HALF=next_power_of_2(head_dim // 2), ROWS=rows, NORM=eps is not None, EPS=eps or 0.0,
        num_warps=4,
    )  # fmt: skip
    return cdiv(num_rows, rows), constants


def attention_constants(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: LayerCache,
    tile: TileConfig,
    *splits: int,
    all_masked: bool = False,
) -> Constants:
    """The constants of an attention kernel with these tiles."""
    k_cache, v_cache, spec = cache
    group_size = spec.num_heads // spec.num_kv_heads
    return cached_attention_constants(
        group_size, spec.head_dim, spec.scale, spec.softcap, spec.sliding_window,
        spec.sinks is not None, q.stride(), out.stride(), cache_constants(k_cache, v_cache), tile,
        splits, all_masked,
    )  # fmt: skip


@functools.cache
def cached_attention_constants(
    group: int, head_dim: int, scale: float, softcap: float | None, window: int | None, sinks: bool,
    q: Strides, out: Strides, cache: CacheConstants, tile: TileConfig, splits: tuple[int, ...],
    all_masked: bool,
) -> Constants:  # fmt: skip
    """`attention_constants` as a cached function of hashable values."""
    attention = AttentionConstants(
        *q[:2], *out[:2], scale, softcap or 0.0, window or 0, group, sinks, head_dim,
        padded(head_dim), tile.rows, tile.keys, *splits, all_masked=all_masked,
    )  # fmt: skip
    return Constants(CACHE=cache, A=attention, num_warps=tile.warps, num_stages=tile.stages)


def padded(size: int) -> int:
    """Row width in a tile: a power of two, at least 16, which tl.dot needs."""
    return max(16, next_power_of_2(size))


def rotate_rows(num_heads: int, head_dim: int) -> int:
    """Heads per program of `rotate_store_kernel`.

    Why 1,024 elements of half heads: 8 for each of 128 threads, one load of 16 bytes.
    """
    half = next_power_of_2(head_dim // 2)
    return min(next_power_of_2(num_heads), max(1024 // half, 1))


class TritonBackend(AttentionBackend):
    """Paged FlashAttention in Triton: one varlen kernel, one split-KV decode kernel.

    Head dims are padded to the next power of two, so 80 and 96 cost as much as 128. float32 is
    exact, without tensor cores, and slow. `deterministic`: one kernel for all tokens, so that
    chunks, cache hits and the rest of the batch change no bit.

    Raises:
        ConfigError: a dtype other than float16, bfloat16 and float32; a head dim above 512; a block
            size that is not a power of two from 16 on; a device that is not a CUDA GPU of compute
            capability 8.0 or newer; bfloat16 in the interpreter, which computes it wrongly.
    """

    name: ClassVar[str] = "triton"
    kv_layout: ClassVar[KVLayoutName] = "PKD"
    default_block_size: ClassVar[int] = 64
    graph_safe: ClassVar[bool] = True
    device_type: ClassVar[str | None] = "cuda" if COMPILED else None
    min_arch: ClassVar[int] = 80
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)
    head_dims: ClassVar[range] = range(2, 513)
    min_block_size: ClassVar[int] = 16
    programs_per_sm: ClassVar[int] = 32
    has_splits_by_batch: ClassVar[bool] = False

    def __init__(
        self, *, device: torch.device, deterministic: bool = False, **options: Any
    ) -> None:
        super().__init__(device=device, **options)
        self.require(
            device.type == "cuda" or self.dtype != torch.bfloat16,
            "computes bfloat16 wrongly in Triton's interpreter",
        )
        self.deterministic = deterministic
        self.num_sms = 1
        if device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def check_cache(self, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Raises ConfigError unless it is fp8 on a GPU that converts fp8 (Ada, Hopper or newer).

        Why: the hardware converts fp8 from compute capability 8.9 on. Conversion by integer
        arithmetic would cost a decode more time than the memory traffic that it saves.
        """
        if kv_dtype != FP8:
            super().check_cache(kv_dtype, dtype)
        if self.arch < 89:
            raise ConfigError(
                "an fp8 KV cache needs a GPU of compute capability 8.9 or newer, got"
                f" {self.arch // 10}.{self.arch % 10}: set kv_cache_dtype='auto'"
            )

    def prepare(self, batch: Batch) -> dict[tuple[Any, ...], StepData]:
        """An empty dict of `StepData` by kind of layer, filled by the first layer of each kind."""
        return {}

    def _data(self, batch: Batch, spec: AttentionSpec) -> StepData:
        by_kind: Any = batch.attention
        heads, kv_heads, window = spec.num_heads, spec.num_kv_heads, spec.sliding_window
        kind = heads, kv_heads, spec.head_dim, window, spec.group
        step = by_kind.get(kind)
        if step is None:
            table, num_decodes = batch.block_tables[spec.group], batch.num_decodes
            if self.deterministic:  # Why: a decode then runs the same code as a chunk's token.
                num_decodes = 0
            tile_tokens = self._config(spec).prefill.rows // (heads // kv_heads)
            step = by_kind[kind] = StepData(
                batch.slot_mapping[spec.group], table, table.stride(0),
                self._splits(batch, spec) if num_decodes else None,
                (batch.num_tokens - num_decodes) // tile_tokens + batch.num_seqs - num_decodes,
                num_decodes,
            )  # fmt: skip
        return step

    def _splits(self, batch: Batch, spec: AttentionSpec) -> Splits:
        config, device = self._config(spec), batch.seq_lens.device
        num_seqs, window = batch.num_decodes, spec.sliding_window
        seen = min(batch.max_seq_len, window or batch.max_seq_len)
        max_splits = min(cdiv(seen, config.split_tokens), config.max_splits)
        max_splits += window is not None
        # Why not one program per split: a captured graph is sized for the longest possible
        # sequence, and programs that exit at once take time too. This many per SM are several full
        # waves.
        tasks = num_seqs * spec.num_kv_heads
        programs = min(max_splits, max(4, cdiv(self.programs_per_sm * self.num_sms, tasks)))
        if self.has_splits_by_batch:
            max_splits = programs
        shape = (num_seqs, spec.num_heads, max_splits)
        part_out = torch.empty((*shape, spec.head_dim), dtype=torch.float32, device=device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=device)
        return Splits((tasks, programs), max_splits, part_out, part_lse)

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        norm: HeadNormWeights | None,
        cache: LayerCache,
        batch: Batch,
    ) -> torch.Tensor:
        if norm is not None and norm.all_heads is not None:
            return super().rotate_and_store(heads, rotation, norm, cache, batch)
        k_cache, v_cache, spec = cache
        num_tokens, num_rows, head_dim = heads.shape
        cos, sin = rotation
        # Why heads: without a norm the weight is not read.
        weight, eps = (heads, None) if norm is None else (norm.weight, norm.eps)
        step, q = self._data(batch, spec), heads.new_empty(num_tokens, spec.num_heads, head_dim)
        programs, constants = rotate_constants(
            num_rows, spec.num_heads, spec.num_kv_heads, head_dim, eps,
            heads.stride(), cos.stride(), sin.stride(), cache_constants(k_cache, v_cache),
        )  # fmt: skip
        launch(
            store_kernels.rotate_store_kernel, (num_tokens, programs), constants,
            q, heads, cos, sin, weight, k_cache, v_cache, step.slots,
            1.0 / spec.k_scale, 1.0 / spec.v_scale,
        )  # fmt: skip
        return q

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        k_cache, v_cache, spec = cache
        step, out = self._data(batch, spec), torch.empty_like(q)
        sinks = q if spec.sinks is None else spec.sinks  # without sinks it is never read
        table, splits = step.table, step.splits
        config = self._config(spec)
        if splits is not None:
            split_args = config.split_tokens, config.max_splits, spec.num_kv_heads
            constants = attention_constants(q, out, cache, config.decode, *split_args)
            launch(
                kernels.decode_kernel, splits.grid, constants,
                out, splits.part_out, splits.part_lse, q, k_cache, v_cache, sinks,
                table, batch.seq_lens, step.table_stride, splits.max_splits,
                spec.k_scale, spec.v_scale,
            )  # fmt: skip
            if splits.max_splits > 1:
                launch(
                    kernels.merge_kernel, (step.num_decodes, spec.num_heads),
                    Constants(A=constants["A"], num_warps=4),
                    out, splits.part_out, splits.part_lse, sinks, batch.seq_lens,
                    config.max_splits, splits.max_splits,
                )  # fmt: skip
        num_prefills = batch.num_seqs - step.num_decodes
        if num_prefills:
            launch(
                kernels.varlen_kernel, (step.tiles, spec.num_kv_heads),
                attention_constants(
                    q, out, cache, config.prefill, all_masked=self.deterministic
                ),
                out, q, k_cache, v_cache, sinks, table, batch.query_start_loc, batch.seq_lens,
                step.table_stride, step.num_decodes, num_prefills, spec.k_scale, spec.v_scale,
            )  # fmt: skip
        return out

    def _config(self, spec: AttentionSpec) -> KernelConfig:
        group_size = spec.num_heads // spec.num_kv_heads
        options = group_size, self.dtype, self.deterministic, spec.num_kv_heads
        return kernel_config(self.arch, spec.head_dim, *options)
