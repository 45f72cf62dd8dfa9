"""CPUBackend: paged attention on the CPU, compiled by numba at first use and cached on disk."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import numba
import numpy as np
import torch

from nanoengine.attention import cpu_kernels as kernels
from nanoengine.attention.base import AttentionSpec, KVLayoutName
from nanoengine.errors import ConfigError
from nanoengine.runner.batch import Batch

NO_WINDOW = 1 << 62


def choose_threading_layer() -> None:
    try:
        from numba.np.ufunc import omppool  # noqa: F401
    except ImportError as error:
        warnings.warn(f"no omp: {error}", RuntimeWarning, stacklevel=2)
        return
    numba.config.THREADING_LAYER = "omp"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tasks:
    tasks: np.ndarray
    bounds: np.ndarray
    merges: np.ndarray
    num_partials: int


@dataclass(slots=True, kw_only=True)
class _Step:
    query_start: np.ndarray
    seq_lens: np.ndarray
    slots: list[np.ndarray]
    tables: list[np.ndarray]
    num_workers: int
    plans: dict = field(default_factory=dict)


def _span(x: torch.Tensor) -> tuple[np.ndarray, int]:
    """1-D view over all of x [T, heads, D] and the elements from one token to the next."""
    num_tokens, heads, head_dim = x.shape
    stride = x.stride(0)
    if x.stride(2) != 1 or x.stride(1) != head_dim:
        raise ValueError(f"heads must lie side by side, got strides {x.stride()}")
    return x.as_strided(((num_tokens - 1) * stride + heads * head_dim,), (1,)).numpy(), stride


class CPUBackend:
    name: ClassVar[str] = "cpu"
    kv_layout: ClassVar[KVLayoutName] = "KPD"
    default_block_size: ClassVar[int] = 16
    graph_safe: ClassVar[bool] = False

    def __init__(self, *, device, dtype, head_dim, block_size) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError("x")
        self.block_size = block_size
        choose_threading_layer()
        threads = torch.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        torch.set_num_threads(threads)

    def prepare(self, batch: Batch) -> _Step:
        workers = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
        numba.set_num_threads(workers)
        return _Step(
            query_start=batch.query_start_loc.numpy(),
            seq_lens=batch.seq_lens.numpy(),
            slots=list(batch.slot_mapping.numpy()),
            tables=list(batch.block_tables.numpy()),
            num_workers=workers,
        )

    def forward(self, q, k, v, k_cache, v_cache, batch: Batch, spec: AttentionSpec):
        step = batch.attention
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, self.block_size)
        window = spec.sliding_window or NO_WINDOW
        (q_flat, q_stride), (k_flat, k_stride), (v_flat, v_stride) = _span(q), _span(k), _span(v)
        k_cache, v_cache = k_cache.view(-1).numpy(), v_cache.view(-1).numpy()
        kernels.store(
            k_flat, k_stride, v_flat, v_stride, step.slots[spec.group], k_cache, v_cache, sizes
        )
        key = (sizes, window)
        if key not in step.plans:
            tasks, bounds, merges, num_partials = kernels.plan_tasks(
                step.query_start, step.seq_lens, spec.num_heads // spec.num_kv_heads,
                spec.num_kv_heads, window, step.num_workers,
            )  # fmt: skip
            rows = num_partials * max(kernels.ROW_TILE, spec.num_heads // spec.num_kv_heads)
            step.plans[key] = (
                tasks, bounds, merges,
                np.empty((rows, spec.head_dim), q_flat.dtype), np.empty((rows, 2), q_flat.dtype),
            )  # fmt: skip
        tasks, bounds, merges, partial_out, partial_stats = step.plans[key]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        result = out.view(-1).numpy()
        real = q_flat.dtype.type
        kernels.attend(
            q_flat, q_stride, k_cache, v_cache, step.tables[spec.group], tasks, bounds, sizes,
            real(spec.scale), real(spec.softcap or 0), window, result, partial_out, partial_stats,
        )  # fmt: skip
        if len(merges):
            kernels.combine(tasks, merges, sizes, result, partial_out, partial_stats)
        return out
