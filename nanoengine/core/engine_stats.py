"""EngineInfo: what was determined at start. EngineStats: the counters since then.

Both are values for users, benchmarks and tests. `build.py` creates EngineInfo, and
`LLMEngine.stats` creates EngineStats.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from nanoengine.core.scheduler import Scheduler
from nanoengine.core.stats import SchedulerStats

if TYPE_CHECKING:
    from nanoengine.core.tiers.stats import TierStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was determined when the engine started; sizes in bytes, times in seconds.

    `max_model_len` is the effective one. `memory_plan` is a text for users. `generation_defaults`
    are the sampling values of the model's generation_config.json. `quantization` is the format of
    the linear layers, and `weight_bits` the bits per weight; None: floats of `dtype`. `products`
    lists, on a GPU, how many matrices are multiplied by which kernel, one line per kind.
    """

    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    dtype: str
    device: str
    attention_backend: str
    num_parameters: int
    weight_bytes: int
    num_kv_blocks: int
    block_size: int
    block_bytes: int
    load_s: float
    start_s: float
    memory_plan: str
    kv_cache_dtype: str = "auto"
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    weight_bits: int | None = None
    products: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class EngineStats(SchedulerStats):
    """Counters since the start, including the scheduler's, and current block counts.

    `cache_recent_hit_rate` covers the last 1,000 admissions. `cache_readmit_*` count sequences
    that were readmitted after preemption. `cache_misses` counts reasons (see `CacheStats`).
    `waste_slots` are allocated to running sequences and hold no token (yet).
    """

    num_waiting: int
    num_running: int
    cache_queried_tokens: int
    cache_hit_tokens: int
    empty_blocks: int
    cached_blocks: int
    active_blocks: int
    cache_recent_hit_rate: float
    cache_readmit_queried_tokens: int
    cache_readmit_hit_tokens: int
    cache_misses: dict[str, int]
    evicted_blocks: int
    waste_slots: int
    tiers: tuple[TierStats, ...] = ()

    @classmethod
    def of(cls, scheduler: Scheduler) -> EngineStats:
        """The counters of a scheduler, its blocks and its prefix cache."""
        manager, cache = scheduler.block_manager, scheduler.block_manager.prefix_cache
        counts: dict[str, Any] = {
            field.name: getattr(cache.stats, field.name.removeprefix("cache_"))
            for field in fields(cls)
            if field.name.startswith("cache_")
        }
        counts |= {f"{state}_blocks": count for state, count in manager.pool.counts().items()}
        counts["cache_misses"] = dict(cache.stats.misses)
        return cls(
            **asdict(scheduler.stats),
            **counts,
            evicted_blocks=manager.pool.num_evicted,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            waste_slots=num_waste_slots(scheduler),
            tiers=() if cache.tiers is None else cache.tiers.tier_stats(),
        )

    @property
    def cache_hit_rate(self) -> float:
        """Share of looked-up prompt tokens found in the prefix cache."""
        queried = self.cache_queried_tokens
        return self.cache_hit_tokens / queried if queried else 0.0


def num_waste_slots(scheduler: Scheduler) -> int:
    """Slots that are allocated to running sequences but hold no token (yet)."""
    manager = scheduler.block_manager
    kv = slice(len(manager.layout.groups) - (manager.layout.snapshot_every is not None))
    return sum(
        max(len(table) * manager.block_size - seq.num_computed_tokens, 0)
        for seq in scheduler.running
        for table in seq.block_tables[kv]
    )
