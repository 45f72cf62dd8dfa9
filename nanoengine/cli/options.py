"""What the commands share: EngineConfig as a command line, and the model named `demo`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tyro.conf import Suppress

from nanoengine.config import EngineConfig
from nanoengine.errors import ConfigError
from nanoengine.tier_config import DiskTier, HostTier, Tier

DEMO = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(EngineConfig):
    """The settings of the engine as options; `kv_tiers`, a list of objects, is made of three."""

    kv_tiers: Suppress[tuple[Tier, ...]] = ()
    """Made of the options below."""
    kv_host_gib: float | None = None
    """Keep full KV blocks in this much host memory [GiB] too, for when the device has no room."""
    kv_disk: Path | None = None
    """Keep them in this directory as well, where they outlive the process; needs both sizes."""
    kv_disk_gib: float | None = None
    """Most that the directory holds for this model [GiB]."""

    def __post_init__(self) -> None:
        if (self.kv_disk is None) != (self.kv_disk_gib is None):
            raise ConfigError("--kv-disk PATH and --kv-disk-gib GIB go together: give both")
        if self.kv_disk is not None and self.kv_host_gib is None:
            raise ConfigError("blocks reach --kv-disk through host memory: give --kv-host-gib too")
        tiers: list[Tier] = []
        if self.kv_host_gib is not None:
            tiers.append(HostTier(gib=self.kv_host_gib))
        if self.kv_disk is not None and self.kv_disk_gib is not None:
            tiers.append(DiskTier(self.kv_disk, gib=self.kv_disk_gib))
        if tiers:
            object.__setattr__(self, "kv_tiers", tuple(tiers))
        # Why not super(): a dataclass with slots is another class than the one written here.
        EngineConfig.__post_init__(self)


def engine_options(args: EngineConfig) -> dict[str, Any]:
    """The fields of EngineConfig in a command's options, as keywords of `LLM`.

    The model `demo` is the small one that comes with the package.
    """
    options = {field.name: getattr(args, field.name) for field in fields(EngineConfig)}
    if args.model == DEMO:
        from nanoengine.assets import demo_model_path

        options["model"] = str(demo_model_path())
    return options
