"""What commands share: EngineConfig and SamplingParams as options, and the model named `demo`."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from nanoengine.cli.docs import field_docs
from nanoengine.errors import ConfigError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.tiers import DiskTier, HostTier, Tier

DEMO = "demo"
OBJECTS = ("structured_outputs", "logits_processors", "extra_args", "kv_tiers")
"""Settings that are no options: objects are for rows and programs."""
# Why not the class's own words: there None has a meaning, and here it means that none is given.
MAX_TOKENS = (
    "most tokens to generate. Without it: what the row says, else the model's own default, else"
    " 256; in OpenAI's form 16 in a completion, all of the context in a chat, as in `chat`."
)

ModelName = Annotated[Positional[str], arg(metavar="MODEL")]
TraceFile = Annotated[Positional[Path], arg(metavar="TRACE")]
"""What a command is about, without an option's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(EngineConfig):
    """The settings of the engine as options; `kv_tiers`, a list of objects, is made of three.

    Attributes:
        model: Directory of a Hugging Face checkpoint, a hub id, or demo: the small bundled model.
        kv_host_gib: Keep full KV blocks in this much host memory [GiB] too, for when the device has
            no room.
        kv_disk: Keep them in this directory as well, where they outlive the process; needs both
            sizes.
        kv_disk_gib: Most that the directory holds for this model [GiB].
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
        # Why not super(): a dataclass with slots is another class than the one written here.
        EngineConfig.__post_init__(self)


def shared(cls: type, args: object) -> dict[str, Any]:
    """What a command's options say of the fields of a class."""
    return {one.name: getattr(args, one.name) for one in fields(cls) if hasattr(args, one.name)}


def engine_options(args: EngineConfig) -> dict[str, Any]:
    """The fields of EngineConfig in a command's options, as keywords of `LLM`.

    The model `demo` is the small one that comes with the package.
    """
    return shared(EngineConfig, args) | {"model": model_path(args.model)}


def model_path(name: str) -> str:
    """Where the model `demo` is; any other name as it is."""
    from nanoengine.assets import demo_model_path

    return str(demo_model_path()) if name == DEMO else name


def sampling_fields(args: object) -> dict[str, Any]:
    """The fields of SamplingParams that a command line sets.

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
    """Name, type and default of each field of SamplingParams; one that is not given has None.

    Why no seed: --seed is the engine's, of which each row draws another one.
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
