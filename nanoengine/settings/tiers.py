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


@checked(ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Blocks in host memory: pinned memory with a GPU, ordinary memory with the CPU device.

    Attributes:
        gib: size in GiB.
        policy: load a hit, recompute it, or (auto) whatever is faster at the measured rates.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    gib: float
    policy: Policy = "auto"

    def __post_init__(self) -> None:
        _require_size(self)


@checked(ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTier:
    """Blocks in a directory, which outlive the process. Needs a HostTier, which they pass through.

    Attributes:
        path: the directory; created if missing. Several models may share one.
        gib: size in GiB per model, at most 2**20 blocks; the least recently used blocks are
            removed first.
        policy: load a hit, recompute it, or (auto) whatever is faster at the measured rates.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    path: str | PathLike[str] = field(kw_only=False)
    gib: float
    policy: Policy = "auto"

    def __post_init__(self) -> None:
        if not fspath(self.path):
            raise ConfigError(f"DiskTier path must be a directory, got {self.path!r}")
        _require_size(self)


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
        allowed = "[], [HostTier(...)] or [HostTier(...), DiskTier(...)]"
        raise ConfigError(f"kv_tiers must be {allowed}, got {list(tiers)}")


def _require_size(tier: Tier) -> None:
    if tier.gib <= 0:
        raise ConfigError(f"{type(tier).__name__} gib must be greater than 0, got {tier.gib}")
