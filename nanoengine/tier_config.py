"""HostTier, DiskTier: the values of `kv_tiers=[...]`, where KV blocks live on below the device.

Read by `features.kv_tiers`, which builds what they describe; holds no resources itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Literal, get_args

from nanoengine.errors import ConfigError

Policy = Literal["auto", "load", "recompute"]
Store = Literal["eager", "lazy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Blocks in host memory: pinned beside a GPU, plain RAM on the CPU device.

    Raises:
        ConfigError: a value is out of range.
    """

    gib: float
    """Size in GiB."""
    store: Store = "eager"
    """eager: a block is stored when it is full, so that a preempted request finds it again. lazy:
    only when it is among the next to be evicted, which moves fewer bytes and catches less."""
    policy: Policy = "auto"
    """Load a hit, recompute it, or (auto) what the measured rates say is quicker."""
    setup_s: float = 0.0002
    """Fixed cost of a load in seconds, beside its bytes."""

    def __post_init__(self) -> None:
        _check(self, store=get_args(Store), policy=get_args(Policy))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTier:
    """Blocks in a directory: they outlive the process. Needs a HostTier, which they pass through.

    Raises:
        ConfigError: a value is out of range.
    """

    path: str | PathLike[str] = field(kw_only=False)
    """The directory; made if missing. Several models may share one."""
    gib: float
    """Size in GiB, for each model, and at most 2**20 blocks; the least recently used make room."""
    policy: Policy = "auto"
    """Load a hit, recompute it, or (auto) what the measured rates say is quicker."""
    setup_s: float = 0.002
    """Fixed cost of a load in seconds, beside its bytes."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | PathLike) or not fspath(self.path):
            raise ConfigError(f"DiskTier path must be a directory, got {self.path!r}")
        _check(self, policy=get_args(Policy))


Tier = HostTier | DiskTier


def checked_tiers(value: object) -> tuple[Tier, ...]:
    """`kv_tiers` as a tuple: nothing, a HostTier, or a HostTier and a DiskTier below it.

    >>> checked_tiers([HostTier(gib=1), DiskTier("cache", gib=8)])[1].gib
    8

    Raises:
        ConfigError: anything else.
    """
    allowed = "[], [HostTier(...)] or [HostTier(...), DiskTier(...)]"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"kv_tiers must be {allowed}, got {value!r}")
    kinds = tuple(type(tier) for tier in value)
    if kinds == (DiskTier,):
        raise ConfigError(
            "kv_tiers: blocks reach a DiskTier through host memory: put a HostTier before it"
        )
    if kinds not in ((), (HostTier,), (HostTier, DiskTier)):
        raise ConfigError(f"kv_tiers must be {allowed}, got {value!r}")
    return tuple(value)


def _check(tier: Tier, **choices: tuple[str, ...]) -> None:
    name = type(tier).__name__
    for key, is_positive in (("gib", True), ("setup_s", False)):
        value = getattr(tier, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} {key} must be a number, got {value!r}")
        if not math.isfinite(value) or value < 0 or (is_positive and value == 0):
            least = "greater than 0" if is_positive else "at least 0"
            raise ConfigError(f"{name} {key} must be finite and {least}, got {value!r}")
    for key, allowed in choices.items():
        if getattr(tier, key) not in allowed:
            raise ConfigError(
                f"{name} {key} must be one of {', '.join(allowed)}, got {getattr(tier, key)!r}"
            )
