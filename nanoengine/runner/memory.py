"""Memory planning: how many KV blocks fit, and how much memory the largest steps need.

    GPU   a share of all memory, minus the memory in use, which includes the weights
          minus the activations of the largest steps, measured by running them (`profile_run.py`)
          minus CUDA graphs, measured by capturing two, and the staging buffers of KV offload
    CPU   a share of the free memory, or 4 GiB if that is less

The rest, or the size set in the config, is divided into blocks (`plan_memory`). The ModelRunner
calls this when it starts. Nothing here allocates KV blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.errors import ConfigError
from nanoengine.layers.collectives import Collectives
from nanoengine.settings.config import EngineConfig

GIB = 2**30
STAGING_BYTES = 2**27
"""Size of each of the two GPU buffers in which a host tier gathers blocks: 2.7 ms at 50 GB/s."""
CPU_DEFAULT_FRAC = 0.3
CPU_DEFAULT_MAX_BYTES = 4 * GIB
GPU_DEFAULT_FRAC = 0.9
MIN_STATES = 4
"""The minimum number of states: two sequences that each read one and write another."""
SNAPSHOT_TOKENS = 512
"""Maximum number of tokens between two snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How the memory is used, in bytes. `max_model_len` is the maximum that the KV pool allows.

    `graph_bytes` is the GPU memory used by the decode step, its graphs and the driver's copies of
    them; `staging_bytes` are the buffers between the GPU and a host tier.
    """

    layout: KVLayout
    max_model_len: int
    weight_bytes: int
    activation_bytes: int = 0
    graph_bytes: int = 0
    staging_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """All blocks of the KV cache."""
        return self.layout.num_blocks * self.layout.block_bytes

    def __str__(self) -> str:
        layout = self.layout
        num_tokens = (layout.num_blocks - 1) * layout.block_size
        parts = [
            ("weights", self.weight_bytes),
            ("activations", self.activation_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("KV offload staging", self.staging_bytes),
            ("KV cache", self.kv_bytes),
            ("states", layout.num_states * layout.state_bytes),
        ]
        sizes = ", ".join(
            f"{name} {size / GIB:.2f} GiB"
            for name, size in parts
            if size or name in ("weights", "activations", "KV cache")
        )
        lines = [
            f"memory: {sizes}",
            f"KV cache: {layout.num_blocks} blocks of {layout.block_size} tokens = {num_tokens}"
            f" tokens = {num_tokens / self.max_model_len:.1f} sequences of {self.max_model_len}",
        ]
        if layout.num_states:
            lines.append(
                f"states: {layout.num_states} of {layout.state_bytes / 2**20:.2f} MiB, each as much"
                f" as {layout.state_bytes * layout.block_size / layout.block_bytes:,.0f} tokens of"
                " the KV cache; a snapshot every"
                f" {(layout.snapshot_every or 0) * layout.block_size} tokens"
            )
        return "\n".join(lines)


def plan_memory(
    config: EngineConfig,
    layout: KVLayout,
    *,
    context_len: int,
    weight_bytes: int,
    device: torch.device,
    measure: Callable[[], tuple[int, int]],
    ranks: Collectives,
) -> MemoryPlan:
    """Decides the number of blocks and of states, and the effective max_model_len.

    States take at most as much memory as blocks. There are two per row, one for the sequence and
    one for a snapshot, and one per draft; or as many as fit in half of the memory.

    Args:
        layout: sizes of a block and of a state; this function sets their numbers.
        context_len: the model's maximum context [tokens].
        measure: returns the bytes of activations and of CUDA graphs. Called only on a GPU whose
            pool size is not set.
        ranks: all ranks get the same number of blocks, the smallest of theirs.

    Raises:
        ConfigError: a setting asks for more memory than there is, or `max_model_len` for more
            blocks than fit.
    """
    block_bytes, state_bytes = layout.block_bytes, layout.state_bytes
    # Why only on a GPU: only there does a host tier copy through buffers.
    staged = (block_bytes, state_bytes) if device.type == "cuda" and config.kv_tiers else ()
    staging_bytes = sum(2 * staging_blocks(size) * size for size in staged if size)
    activation_bytes = graph_bytes = 0
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
        num_states = _num_states(config, num_blocks * block_bytes, state_bytes)
        num_bytes = num_blocks * block_bytes + num_states * state_bytes
        require_memory(f"num_kv_blocks={num_blocks}", num_bytes, device)
    else:
        if config.kv_cache_gib is not None:
            require_memory(f"kv_cache_gib={config.kv_cache_gib}", config.kv_cache_gib * GIB, device)
            budget = int(config.kv_cache_gib * GIB)
        elif device.type == "cpu":
            budget = _cpu_budget(config) // ranks.shard.world_size
        else:
            activation_bytes, graph_bytes = measure()
            budget = _gpu_budget(config, device) - activation_bytes - graph_bytes - staging_bytes
        num_states = _num_states(config, budget // 2, state_bytes)
        num_blocks = max(0, budget - num_states * state_bytes) // block_bytes
        if config.kv_cache_gib is None:
            longest = -(-(config.max_model_len or context_len) // layout.block_size)
            longest *= len(kv_groups(layout.groups))
            # Why the bound: with this many blocks every row can have the maximum length.
            num_blocks = min(num_blocks, config.max_num_seqs * longest + 1)
    layout = replace(layout, num_blocks=ranks.min_over_ranks(num_blocks), num_states=num_states)
    return MemoryPlan(
        layout=layout,
        max_model_len=_max_model_len(config.max_model_len, context_len, layout),
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        staging_bytes=staging_bytes,
    )


def kv_groups(groups: Iterable[KVGroup]) -> tuple[KVGroup, ...]:
    """The groups whose layers keep keys and values."""
    return tuple(group for group in groups if group.snapshot_every is None)


def _num_states(config: EngineConfig, num_bytes: int, state_bytes: int) -> int:
    """The number of states that fit in these bytes, but at least `MIN_STATES`."""
    if not state_bytes:
        return 0
    from nanoengine.runner.recurrent_states import states_per_row

    num_states = states_per_row(config) * config.max_num_seqs
    return min(num_states, max(num_bytes // state_bytes, MIN_STATES))


def _max_model_len(requested: int | None, context_len: int, layout: KVLayout) -> int:
    """The requested length, or else the longest sequence that fits the pool [tokens]."""
    num_blocks, block_size = layout.num_blocks, layout.block_size
    if all(group.sliding_window is None for group in layout.groups):
        tokens = (num_blocks - 1) * block_size
    else:  # a window may hold far less than the length: the scheduler checks each request
        tokens = context_len if num_blocks > len(kv_groups(layout.groups)) else 0
    if (requested or 2) > tokens:
        hint = f"the largest that fits is {tokens}: lower max_model_len, or " if tokens > 1 else ""
        raise ConfigError(
            f"max_model_len={requested or context_len} does not fit the KV cache: {num_blocks}"
            f" blocks of {block_size} tokens (one is the null block); {hint}raise num_kv_blocks,"
            " kv_cache_gib or memory_fraction"
        )
    return requested or min(context_len, tokens)


def blocks_between_snapshots(state_bytes: int, block_bytes: int, block_size: int) -> int:
    """The snapshot interval in blocks. A snapshot takes at most the memory of the keys and values
    between two snapshots, unless `SNAPSHOT_TOKENS` limits the interval.

    >>> blocks_between_snapshots(160_000, block_bytes=400_000, block_size=16)
    1
    >>> blocks_between_snapshots(80_000_000, block_bytes=400_000, block_size=16)
    32
    """
    return min(-(-state_bytes // block_bytes), -(-SNAPSHOT_TOKENS // block_size))


def _cpu_budget(config: EngineConfig) -> int:
    free = free_cpu_bytes()
    if config.memory_fraction is not None:
        return int(free * config.memory_fraction)
    return min(int(free * CPU_DEFAULT_FRAC), CPU_DEFAULT_MAX_BYTES)


def _gpu_budget(config: EngineConfig, device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total * (config.memory_fraction or GPU_DEFAULT_FRAC)) - (total - free)


def free_cpu_bytes() -> int:
    """Memory available to new allocations without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_cpu_bytes() // 2


def total_cpu_bytes() -> int:
    """All memory of this machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil  # Why here: it is installed only on Windows.

    return int(psutil.virtual_memory().total)


def free_gpu_bytes(device: torch.device) -> int:
    """A GPU's free memory after all work issued so far is done."""
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def require_memory(setting: str, num_bytes: float, device: torch.device) -> None:
    """Raises ConfigError if a setting asks for more memory than the device has in total."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = total_cpu_bytes()
    if num_bytes > total:
        raise ConfigError(
            f"{setting} needs {num_bytes / GIB:,.0f} GiB, and {device} has {total / GIB:,.1f} GiB:"
            " lower it"
        )


def staging_blocks(block_bytes: int) -> int:
    """Number of blocks that one of the two staging buffers of a host tier holds."""
    return max(1, STAGING_BYTES // block_bytes)
