"""Finds the model and its device: resolves hub ids, "auto" and `gpu_memory_utilization`.

Called by `build.py`, and by commands that inspect a model without loading it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path, PurePath

import torch

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import join_names, quoted, truncate
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.files import GGUF, is_gguf

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""The files of a hub repository that belong to a checkpoint."""


FLOAT16_OVERFLOWS = {"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM"}
"""Architectures whose activations exceed float16's range, so that results become NaN. Source: the
list in vLLM's `config/model.py`, which also has PLaMo 2."""


def resolve_model(config: EngineConfig) -> Path:
    """Returns the directory or the GGUF file of the checkpoint: a local path, or a hub id, which is
    downloaded to the hub's cache. A folder without safetensors may contain one GGUF file with any
    name.

    Raises:
        ConfigError: the path does not exist and is not a hub repository that is cached or
            reachable; the folder has no model; or several files match, which the message lists.
    """
    # Why not pathlib's methods: they raise for unknown users and for names that are too long.
    path = Path(os.path.expanduser(config.model))
    if os.path.isdir(path):
        # Why: a repository in the hub's cache has one folder per revision.
        ref = path / "refs" / (config.revision or "main")
        return _from_folder(path / "snapshots" / ref.read_text().strip() if ref.is_file() else path)
    if os.path.exists(path):
        if is_gguf(path):
            return path
        hint = ": give its directory" if (path.parent / "config.json").exists() else ""
        raise ConfigError(
            f"model must be a directory or a GGUF file, got the file {config.model!r}{hint}"
        )
    named = re.fullmatch(r"(?![./~])([^/:]+/[^/:]+)(?::([^/:]+)|/(.+\.(?i:gguf)))?", config.model)
    if named is None:
        from nanoengine.checkpoint.hints import near_names

        what = "file" if path.suffix.lower() == GGUF else "directory"
        form = "; hub ids have the form ORG/NAME" if "/" not in config.model else ""
        hint = near_names(path) or form
        raise ConfigError(f"model {what} {config.model!r} does not exist{hint}")
    repository, quantization, name = named.groups()
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = None if quantization or name else _download(config, repository, PATTERNS)
        if folder is not None and (folder / "config.json").exists():
            return folder
        return _download_gguf(config, repository, quantization, name)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        from nanoengine.checkpoint.hints import near_names

        raise ConfigError(
            f"model {config.model!r} is not a local directory or file{near_names(path)}, and"
            f" loading it from the hub failed: {truncate(error)}"
        ) from error


def _from_folder(folder: Path) -> Path:
    """The folder itself if it has a config.json, or else its GGUF file."""
    if (folder / "config.json").exists() and any(folder.glob("*.safetensors*")):
        return folder
    from nanoengine.checkpoint.gguf import find_gguf

    if (found := find_gguf(folder)) is not None:
        return found
    if (folder / "config.json").exists():
        return folder
    from nanoengine.checkpoint.hints import models_below

    raise ConfigError(
        f"model={str(folder)!r} is not a checkpoint: it has no config.json and no GGUF"
        f" file{models_below(folder)}"
    )


def _download(config: EngineConfig, repository: str, patterns: list[str]) -> Path:
    """Downloads the files of a repository that match these patterns; returns their folder in the
    hub's cache."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repository, revision=config.revision, allow_patterns=patterns))


def _download_gguf(
    config: EngineConfig, repository: str, quantization: str | None, name: str | None
) -> Path:
    """Downloads one GGUF model of a repository, with all its parts: the file `name`, or the model
    whose name ends with `quantization`, or the only model.

    Raises:
        ConfigError: no model matches, or more than one.
    """
    from huggingface_hub import HfApi

    sets: dict[str, list[str]] = {}
    for file in sorted(HfApi().list_repo_files(repository, revision=config.revision)):
        if file.lower().endswith(GGUF) and not PurePath(file).name.startswith("mmproj"):
            sets.setdefault(re.sub(r"(?i)-\d{5}-of-\d{5}(?=\.gguf$)", "", file), []).append(file)
    suffix = re.compile(rf"(.*[-._/])?{re.escape(quantization or '')}\.gguf", re.IGNORECASE)
    found = [
        parts
        for whole, parts in sets.items()
        if (name in parts if name else quantization is None or suffix.fullmatch(whole))
    ]
    if len(found) != 1:
        raise ConfigError(
            f"model {config.model!r} matches {len(found) or 'no'} GGUF files of {repository}; it"
            f" must match one, for example {repository}:Q4_K_M. GGUF files in the repository:"
            f" {join_names(list(sets)) or 'none'}"
        )
    return _download(config, repository, found[0]) / found[0][0]


def resolve_device(name: str) -> torch.device:
    """Returns the device for `name`; "auto" selects a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device must be auto, cpu, cuda or cuda:N, got {quoted(name)}"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {quoted(name)}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} is not available: torch finds no CUDA GPU; use 'cpu'")
    return device


def resolve_memory(config: EngineConfig, device: torch.device) -> EngineConfig:
    """On a GPU, sets `memory_fraction` to `gpu_memory_utilization`. Without a GPU, the latter is
    ignored with a warning."""
    share = config.gpu_memory_utilization
    if share is None:
        return config
    if device.type != "cuda":
        from nanoengine.settings.vllm_names import warn_no_effect

        warn_no_effect(
            f"gpu_memory_utilization={share} (there is no GPU; kv_cache_gib or memory_fraction"
            " sizes the KV cache)"
        )
        return replace(config, gpu_memory_utilization=None)
    return replace(config, gpu_memory_utilization=None, memory_fraction=share)


def resolve_dtype(
    name: str, stored: str, device: torch.device, *, backend: str = "auto", quantized: bool = False
) -> torch.dtype:
    """Returns the dtype to compute in. "auto" is the stored dtype, except that a CPU computes in
    float32 instead of 16-bit dtypes.

    A CPU computes in bfloat16 if the checkpoint has bfloat16, the CPU has bfloat16 dot products,
    the backend is "cpu" and linear layers are not quantized. Otherwise bfloat16 would not be faster
    than float32.
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


def check_dtype_range(architecture: str, dtype: torch.dtype) -> None:
    """Raises ConfigError if activations of the architecture overflow in this dtype."""
    if dtype == torch.float16 and architecture in FLOAT16_OVERFLOWS:
        raise ConfigError(
            f"dtype float16 is not supported for {architecture}, because activations exceed"
            " 65,504; set dtype to bfloat16 or float32"
        )
