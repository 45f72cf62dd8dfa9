"""CPUBackend: paged attention on the CPU, built on kernels compiled by numba.

It computes in float32 or float64. A bfloat16 cache of a float32 model is read as float32, and an
int8 cache as the dtype of the computation. For a bfloat16 model, queries and softmax weights are
rounded to bfloat16 too, and sums are float32.

`attention.make_backend` makes it. It views torch tensors as flat numpy arrays without a copy, plans
the tasks of a step once for all layers, and calls `kernels/cpu_attention.py`. Prompts, chunks,
decodes and drafts use the same code: they differ only in the number of query rows per task.
`naive.py` is the reference implementation.

A kernel without a cached binary is compiled at its first use; see `kernels/jit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
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
from nanoengine.kernels import cpu_attention as kernels
from nanoengine.kernels import cpu_layers
from nanoengine.kernels.attention_tasks import ROW_TILE, plan_tasks
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers, start_workers

NO_WINDOW = 1 << 62  # tokens; wider than any context
DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.uint32}
"""The operands of matmuls in the kernels; uint32: pairs of bfloat16."""


TaskArrays = tuple[np.ndarray, ...]
"""The arrays of `plan_tasks` for one kind of layer (tasks, bounds, merges, parts), and buffers for
partial results: [rows, D] and [rows, 2]."""


@dataclass(slots=True, kw_only=True)
class CPUStep:
    """The data that all layers of a step share: the batch as numpy arrays, and its tasks.

    Tasks depend on head counts, window and group. The first layer of each such kind plans them.

    Attributes:
        spans: for recurrent layers; set by `layers/cpu_linear_attention.py`.
        layer_inputs: Gemma 4's per-layer inputs, [T, layers, I] float32.
    """

    query_start: np.ndarray  # [S + 1] int32
    seq_lens: np.ndarray  # [S] int32
    slots: np.ndarray  # [G, T] int64
    tables: np.ndarray  # [G, S, M] int32
    num_workers: int
    tasks: dict[tuple[int, ...], TaskArrays] = field(default_factory=dict)
    angles: dict[int, np.ndarray] = field(default_factory=dict)
    spans: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    layer_inputs: np.ndarray | None = None


class CPUBackend(AttentionBackend):
    """Attention that reads block tables in place, parallel over sequences, heads and context.

    A sequence's result has the same bits in any batch: its tasks depend only on its own lengths,
    and each row is summed in a fixed order.
    """

    name: ClassVar[str] = "cpu"
    kv_layout: ClassVar[KVLayoutName] = "KPD"
    # Perf: decode of 8 x 256 tokens, 16/8 heads of 128, one Zen 3 core: 1.87 / 1.77 / 1.64 / 1.63
    # ms with blocks of 16 / 32 / 64 / 128; longer contiguous reads help the prefetcher.
    default_block_size: ClassVar[int] = 64
    graph_safe: ClassVar[bool] = False
    device_type: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(DTYPES)
    head_dims: ClassVar[range] = range(8, 2**16 + 1, 8)
    min_block_size: ClassVar[int] = 8

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._arrays, self.operand = NumpyViews(), np.empty(0, DTYPES[self.dtype])
        self.math_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._no_sinks = torch.empty(0, dtype=self.math_dtype)
        start_workers()

    def check_cache(self, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Raises ConfigError unless `kv_dtype` is int8, or bfloat16 for a float32 model."""
        if kv_dtype != torch.int8 and (kv_dtype, dtype) != (torch.bfloat16, torch.float32):
            super().check_cache(kv_dtype, dtype)

    def prepare(self, batch: Batch) -> CPUStep:
        """Views the step's tensors as numpy arrays; cheap enough for every step."""
        return CPUStep(
            query_start=np.ascontiguousarray(batch.query_start_loc.numpy()),
            seq_lens=np.ascontiguousarray(batch.seq_lens.numpy()),
            slots=np.ascontiguousarray(batch.slot_mapping.numpy()),
            # Why contiguous: another memory layout would need another compilation.
            tables=np.ascontiguousarray(batch.block_tables.numpy()),
            num_workers=num_workers(),
        )

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        if cache.spec.value_dim is not None:
            from nanoengine.kernels.cpu_mla import store_latents

            keys = k.to(self.math_dtype).flatten(1).contiguous().numpy()
            slots = batch.attention.slots[cache.spec.group]
            store_latents(keys, slots, self.cache_arrays(cache)[0], num_workers())
            return
        keys, values = (x.to(self.math_dtype).contiguous().numpy() for x in (k, v))
        slots, sizes = batch.attention.slots[cache.spec.group], self._sizes(cache.spec)
        kernels.store(keys, values, slots, *self.cache_arrays(cache), sizes, num_workers())

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        norm: HeadNormWeights | None,
        cache: LayerCache,
        batch: Batch,
    ) -> torch.Tensor:
        """As in the base class, in one pass over the projection."""
        step: CPUStep = batch.attention
        spec = cache.spec
        source = heads.to(self.math_dtype).contiguous().numpy()
        q = np.empty((source.shape[0], spec.num_heads, spec.head_dim), source.dtype)
        # Why: numba specializes on argument types, so "no norm" needs an array too.
        weight = source[0, : -spec.num_kv_heads]
        if norm is not None:
            weight = norm.weight.to(self.math_dtype).numpy()
        cpu_layers.rotate_and_store(
            source,
            self._angles(step, rotation),
            weight,
            source.dtype.type(norm.eps or 0 if norm else 0),
            norm_kind(norm),
            step.slots[spec.group],
            *self.cache_arrays(cache),
            q,
            self._sizes(spec),
            step.num_workers,
        )
        return torch.from_numpy(q).to(heads.dtype)

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        """The caches must be contiguous."""
        step: CPUStep = batch.attention
        spec = cache.spec
        queries = q.to(self.math_dtype).contiguous().numpy()
        keys, values = self.cache_arrays(cache)
        *plan, partial_out, partial_stats = self._tasks(step, spec, queries.dtype)
        real = queries.dtype.type
        result = np.empty((*q.shape[:2], spec.value_dim or spec.head_dim), queries.dtype)
        if spec.value_dim is not None:
            from nanoengine.kernels.cpu_mla import attend_latents

            attend_latents(
                queries, keys, step.tables[spec.group], *plan, partial_out, partial_stats,
                (spec.num_heads, spec.head_dim, spec.value_dim, self.block_size),
                real(spec.scale), self.sinks(spec), result, step.num_workers,
            )  # fmt: skip
            return torch.from_numpy(result).to(q.dtype)
        if cache.k_cache.dtype == torch.int8:
            queries = queries.copy()  # the kernel overwrites them
        kernels.attend(
            queries, keys, values, step.tables[spec.group], *plan, self._sizes(spec),
            real(spec.scale), real(spec.softcap or 0), window_of(spec), self.operand,
            self.sinks(spec), result, partial_out, partial_stats, step.num_workers,
        )  # fmt: skip
        return torch.from_numpy(result).to(q.dtype)

    def step_arrays(
        self,
        rotation: Rotation,
        batch: Batch,
        spec: AttentionSpec,
        dtype: np.dtype,
        rows: np.ndarray | None,
    ) -> tuple[np.ndarray, ...]:
        """The step's arguments of a fused kernel, for a layer of this kind: cos and sin [T, D],
        slots [T], block tables, and the arrays of `TaskArrays`.

        If `rows` [L] is given, only these of the step's tokens need a result.
        """
        step: CPUStep = batch.attention
        shared = self._angles(step, rotation), step.slots[spec.group], step.tables[spec.group]
        return *shared, *self._tasks(step, spec, dtype, rows)

    def cache_arrays(self, cache: LayerCache) -> tuple[np.ndarray, np.ndarray]:
        """The layer's keys and values as numpy arrays."""
        return self._arrays(cache.k_cache), self._arrays(cache.v_cache)

    def sinks(self, spec: AttentionSpec) -> np.ndarray:
        """The heads' sinks; an empty array if there are none."""
        return self._arrays(self._no_sinks if spec.sinks is None else spec.sinks)

    def _angles(self, step: CPUStep, rotation: Rotation) -> np.ndarray:
        """cos and sin concatenated, [T, D]; viewed once per step."""
        halves = rotation[0]
        if id(halves) not in step.angles:
            num_tokens, _, half = halves.shape
            whole = halves.as_strided((num_tokens, 2 * half), (2 * half, 1))
            step.angles[id(halves)] = whole.to(self.math_dtype).numpy()
        return step.angles[id(halves)]

    def _sizes(self, spec: AttentionSpec) -> tuple[int, int, int, int]:
        return (spec.num_heads, spec.num_kv_heads, spec.head_dim, self.block_size)

    def _tasks(
        self, step: CPUStep, spec: AttentionSpec, dtype: np.dtype, rows: np.ndarray | None = None
    ) -> TaskArrays:
        """The step's tasks for layers of this kind, planned on the first call."""
        window = window_of(spec)
        key = (spec.num_heads, spec.num_kv_heads, spec.head_dim, window, spec.group, rows is None)
        if key not in step.tasks:
            group_size = spec.num_heads // spec.num_kv_heads
            *arrays, num_partials = plan_tasks(
                step.query_start, step.seq_lens, query_ranges(step.query_start, rows),
                step.tables[spec.group], group_size, spec.num_kv_heads, self.block_size, window,
                step.num_workers,
            )  # fmt: skip
            num_rows = num_partials * max(ROW_TILE, group_size)
            partial_out = np.empty((num_rows, spec.value_dim or spec.head_dim), dtype)
            step.tasks[key] = *arrays, partial_out, np.empty((num_rows, 2), dtype)
        return step.tasks[key]


def window_of(spec: AttentionSpec) -> int:
    """A layer's sliding window [tokens], `NO_WINDOW` if it has none."""
    return NO_WINDOW if spec.sliding_window is None else spec.sliding_window


def query_ranges(query_start: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """Per sequence the range of its queries that includes its tokens in `rows`, [S, 2], end
    exclusive. None: all queries.

    >>> query_ranges(np.array([0, 1, 5, 9]), np.array([0, 3, 2, 3]))
    array([[0, 1],
           [1, 3],
           [4, 0]])
    """
    starts, ranges = query_start[:-1], np.zeros((len(query_start) - 1, 2), np.int64)
    counts = query_start[1:] - starts
    if rows is None:
        ranges[:, 1] = counts
        return ranges
    ranges[:, 0] = counts
    seqs = np.searchsorted(query_start, rows, side="right") - 1
    np.minimum.at(ranges[:, 0], seqs, rows - starts[seqs])
    np.maximum.at(ranges[:, 1], seqs, rows - starts[seqs] + 1)
    return ranges


def norm_kind(norm: HeadNormWeights | None) -> int:
    """The constant for a QK norm in `cpu_layers.rotate_and_store`."""
    if norm is None:
        return cpu_layers.NO_NORM
    if norm.eps is None:
        return cpu_layers.FACTORS_ONLY
    return cpu_layers.EACH_HEAD if norm.all_heads is None else cpu_layers.ALL_HEADS
