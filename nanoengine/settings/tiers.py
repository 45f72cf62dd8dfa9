"""HostTier, DiskTier: the values of `kv_tiers=[...]`, which keep KV blocks below the device.

`features.kv_tiers` creates the tiers from them; they hold no resources themselves.
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
    """Blocks in host memory: pinned memory with a GPU, ordinary memory with the CPU device.

    Attributes:
        gib: size in GiB.
        store: "eager" stores a block when it is full, so that a preempted request finds it again;
            "lazy" stores it shortly before its eviction, which copies fewer bytes and finds fewer
            blocks.
        policy: load a hit, recompute it, or (auto) whatever is faster at the measured rates.
        setup_s: fixed time per load in seconds, in addition to the transfer.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
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
    """Blocks in a directory, which outlive the process. Needs a HostTier, which they pass through.

    Attributes:
        path: the directory; created if missing. Several models may share one.
        gib: size in GiB per model, at most 2**20 blocks; the least recently used blocks are
            removed first.
        policy: load a hit, recompute it, or (auto) whatever is faster at the measured rates.
        setup_s: fixed time per load in seconds, in addition to the transfer.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
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
    """Checks that `kv_tiers` is empty, a HostTier, or a HostTier and a DiskTier.

    Raises:
        ConfigError: anything else.
    """
    kinds = tuple(type(tier) for tier in tiers)
    if kinds == (DiskTier,):
        raise ConfigError("kv_tiers: blocks reach a disk through host memory: add a HostTier first")
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
