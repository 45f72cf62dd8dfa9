"""Shared options: EngineConfig and SamplingParams as options, and the model named `demo`."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from nanoengine.cli.field_docs import field_docs
from nanoengine.errors import ConfigError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.tiers import DiskTier, HostTier, Tier

DEMO = "demo"
OBJECTS = ("structured_outputs", "logits_processors", "extra_args", "kv_tiers")
"""Settings without an option: objects are for rows and programs."""
# Why not the class's own text: None means unlimited there, and "not given" here.
MAX_TOKENS = (
    "most tokens to generate. Without it: what the row says, else the model's own default, else"
    " 256; in OpenAI's form 16 in a completion, all of the context in a chat, as in `chat`."
)

ModelName = Annotated[Positional[str], arg(metavar="MODEL")]
TraceFile = Annotated[Positional[Path], arg(metavar="TRACE")]
"""Positional arguments: the subject of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(EngineConfig):
    """The settings of the engine as options; three options replace the list `kv_tiers`.

    Attributes:
        model: Directory of a Hugging Face checkpoint, a hub id, or demo: the small bundled model.
        kv_host_gib: Also keep full KV blocks in this much host memory [GiB], for when the device
            memory is full.
        kv_disk: Also keep them in this directory, where they outlive the process; needs both
            sizes.
        kv_disk_gib: Maximum size of the directory for this model [GiB].
    """

    model: ModelName
    kv_host_gib: float | None = None
    kv_disk: Path | None = None
    kv_disk_gib: float | None = None

    def __post_init__(self) -> None:
        disk = self.kv_disk, self.kv_disk_gib, self.kv_host_gib
        if None in disk and disk[:2] != (None, None):
            raise ConfigError("--kv-disk needs --kv-disk-gib and --kv-host-gib: give all three")
        tiers: list[Tier] = [] if self.kv_host_gib is None else [HostTier(gib=self.kv_host_gib)]
        if self.kv_disk is not None and self.kv_disk_gib is not None:
            tiers.append(DiskTier(self.kv_disk, gib=self.kv_disk_gib))
        object.__setattr__(self, "kv_tiers", tuple(tiers))
        # Why not super(): a dataclass with slots replaces the class that super() refers to.
        EngineConfig.__post_init__(self)


def shared(cls: type, args: object) -> dict[str, Any]:
    """The values of a command's options that are also fields of a class."""
    return {one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)}


def engine_options(args: EngineConfig) -> dict[str, Any]:
    """The fields of EngineConfig in a command's options, as keywords of `LLM`.

    The model `demo` is the small one that comes with the package.
    """
    return shared(EngineConfig, args) | {"model": model_path(args.model)}


def model_path(name: str) -> str:
    """The path of the model `demo`; any other name unchanged."""
    from nanoengine.assets import demo_model_path

    return str(demo_model_path()) if name == DEMO else name


def sampling_fields(args: object) -> dict[str, Any]:
    """The fields of SamplingParams that are set on the command line.

    Raises:
        RequestError: a value is out of range.
    """
    given = {
        option.name: value
        for option in fields(SamplingArgs)
        if (value := getattr(args, option.name)) != option.default
    }
    SamplingParams(**given)
    return given


def _sampling_options() -> list[tuple[str, Any, Any]]:
    """Name, type and default per field of SamplingParams; None means not given.

    Why no seed: --seed is the engine's, from which each row's own seed is derived.
    """
    told = field_docs(SamplingParams) | {"max_tokens": MAX_TOKENS}
    hints = typing.get_type_hints(SamplingParams)
    options: list[tuple[str, Any, Any]] = []
    for param in fields(SamplingParams):
        if param.name in ("seed", *OBJECTS):
            continue
        kind, default = hints[param.name], None
        kinds = typing.get_args(kind | None)
        if kind is bool:
            default = param.default
        elif tuple[str, ...] in kinds:
            kind, default = UseAppendAction[tuple[str, ...]], ()
        else:
            kind = (tuple[int, ...] if tuple[int, ...] in kinds else kind) | None
        hint = Annotated[kind, arg(help=told[param.name])]
        options.append((param.name, hint, dataclasses.field(default=default)))
    return options


SamplingArgs = dataclasses.make_dataclass(
    "SamplingArgs", _sampling_options(), frozen=True, kw_only=True
)
SamplingArgs.__doc__ = "How tokens are drawn; what is not given is the model's own default."
