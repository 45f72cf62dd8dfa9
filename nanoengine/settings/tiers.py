"""HostTier, DiskTier: the values of `kv_tiers=[...]`, where KV blocks live on below the device.

Read by `features.kv_tiers`, which builds what they describe; holds no resources itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Literal

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import checked

Policy = Literal["auto", "load", "recompute"]
Store = Literal["eager", "lazy"]


@checked(ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Blocks in host memory: pinned beside a GPU, plain RAM on the CPU device.

    Attributes:
        gib: size in GiB.
        store: "eager" stores a block when it is full, so that a preempted request finds it again;
            "lazy" only when it is among the next to be evicted, which moves fewer bytes and catches
            less.
        policy: load a hit, recompute it, or (auto) what the measured rates say is quicker.
        setup_s: fixed cost of a load in seconds, beside its bytes.

    Raises:
        ConfigError: a value is of another type or out of range.
    """

    gib: float
    store: Store = "eager"
    policy: Policy = "auto"
    setup_s: float = 0.0002

    def __post_init__(self) -> None:
        _check_ranges(self)


@checked(ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTier:
    """Blocks in a directory: they outlive the process. Needs a HostTier, which they pass through.

    Attributes:
        path: the directory; made if missing. Several models may share one.
        gib: size in GiB, for each model, and at most 2**20 blocks; the least recently used make
            room.
        policy: load a hit, recompute it, or (auto) what the measured rates say is quicker.
        setup_s: fixed cost of a load in seconds, beside its bytes.

    Raises:
        ConfigError: a value is of another type or out of range.
    """

    path: str | PathLike[str] = field(kw_only=False)
    gib: float
    policy: Policy = "auto"
    setup_s: float = 0.002

    def __post_init__(self) -> None:
        if not fspath(self.path):
            raise ConfigError(f"DiskTier path must be a directory, got {self.path!r}")
        _check_ranges(self)


Tier = HostTier | DiskTier


def check_tiers(tiers: tuple[Tier, ...]) -> None:
    """Checks `kv_tiers`: nothing, a HostTier, or a HostTier and a DiskTier below it.

    Raises:
        ConfigError: anything else.
    """
    kinds = tuple(type(tier) for tier in tiers)
    if kinds == (DiskTier,):
        raise ConfigError("kv_tiers: blocks reach a disk by host memory: put a HostTier first")
    if kinds not in ((), (HostTier,), (HostTier, DiskTier)):
        raise ConfigError(
            "kv_tiers must be [], [HostTier(...)] or [HostTier(...), DiskTier(...)], got"
            f" {list(tiers)}"
        )


def _check_ranges(tier: Tier) -> None:
    name = type(tier).__name__
    if tier.gib <= 0:
        raise ConfigError(f"{name} gib must be greater than 0, got {tier.gib}")
    if tier.setup_s < 0:
        raise ConfigError(f"{name} setup_s must be at least 0, got {tier.setup_s}")
