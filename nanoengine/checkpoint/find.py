"""Where a model is, and what it runs on: the meaning of "auto", of hub ids and of shares of memory.

Called by `build.py`, and by commands that look before they load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from nanoengine.errors import ConfigError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.vllm_names import warn_idle


def resolve_model(config: EngineConfig) -> Path:
    """The directory of the checkpoint: a local one, or a hub id brought into the hub's cache.

    Raises:
        ConfigError: neither a directory, nor a repository that can be reached or is cached.
    """
    directory = Path(config.model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ConfigError(f"model must be a directory, got the file {config.model!r}")
    if config.model.count("/") != 1 or config.model.startswith((".", "/", "~")):
        raise ConfigError(f"model directory {config.model!r} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            config.model,
            revision=config.revision,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {config.model!r} is no local directory, and the hub did not give it: {error}"
        ) from error
    return Path(found)


def resolve_device(name: str) -> torch.device:
    """The device that `name` means here; "auto" takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} asked for, but torch finds no CUDA GPU: use 'cpu'")
    return device


def share_of_memory(config: EngineConfig, device: torch.device) -> EngineConfig:
    """What `gpu_memory_utilization` means on this device: `memory_fraction` on a GPU, else
    nothing."""
    share = config.gpu_memory_utilization
    if share is None:
        return config
    if device.type != "cuda":
        warn_idle(
            f"gpu_memory_utilization={share} (there is no GPU; kv_cache_gib or memory_fraction"
            " sizes the KV cache)"
        )
        return replace(config, gpu_memory_utilization=None)
    return replace(config, gpu_memory_utilization=None, memory_fraction=share)


def resolve_dtype(
    name: str, stored: str, device: torch.device, *, backend: str = "auto", quantized: bool = False
) -> torch.dtype:
    """The dtype to compute in. "auto" is the stored one, but on a CPU float32 in place of 16 bits.

    A CPU keeps bfloat16 where one of its instructions multiplies such numbers, the backend is "cpu"
    and linear layers are not quantized. Elsewhere bfloat16 would be no faster than float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu" or stored == "float64":
        return getattr(torch, stored)
    if stored == "bfloat16" and backend in ("auto", "cpu") and not quantized:
        from nanoengine.kernels.isa import CURRENT

        if CURRENT.bf16_dots != "generic":
            return torch.bfloat16
    return torch.float32
