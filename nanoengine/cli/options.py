"""Shared options: EngineConfig and SamplingParams as options, and the model named `demo`."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from nanoengine.cli.field_docs import field_docs
from nanoengine.errors import ConfigError, RequestError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.settings.tiers import DiskTier, HostTier, Tier

DEMO = "demo"
WITHOUT_OPTION = ("structured_outputs", "logits_processors", "extra_args", "kv_tiers", "chat")
"""Settings that only rows and programs can set, because their values are objects; and `chat`, for
which commands have --raw."""
# Why not the text of SamplingParams: None means unlimited there, but "not given" here.
MAX_TOKENS = (
    "Maximum number of tokens to generate (256). A row's value, and the model's, come first. The"
    " default of an OpenAI completion is 16; of an OpenAI chat and `chat`, the whole context."
)
FORMATS = {
    "json_schema": ("json", "JSON schema of the output: a file, or the schema itself."),
    "choices": ("choice", "Comma-separated texts: one is the output. Default temperature: 0."),
    "regex": ("regex", "Regular expression that the whole output matches."),
}
"""Options for the format of the output -> field of `StructuredOutputs`, and help."""

ModelName = Annotated[Positional[str], arg(metavar="MODEL")]
TraceFile = Annotated[Positional[Path], arg(metavar="TRACE")]
"""Positional arguments: the subject of a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(EngineConfig):
    """The settings of the engine as options; three options replace the list `kv_tiers`.

    Attributes:
        model: A .gguf file, a directory of a Hugging Face checkpoint, a hub id, or demo.
        kv_host_gib: Also keep full KV blocks in this much host memory [GiB], for when the device
            memory is full.
        kv_disk: Also keep them in this directory, where they outlive the process; needs
            --kv-host-gib and --kv-disk-gib.
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


def subset(cls: type, args: object) -> dict[str, Any]:
    """The options in `args` that are also fields of a class, as its keywords."""
    return {f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)}


def engine_options(args: EngineConfig) -> dict[str, Any]:
    """The fields of EngineConfig in a command's options, as keywords of `LLM`."""
    return subset(EngineConfig, args) | {"model": model_path(args.model)}


def model_path(name: str) -> str:
    """The path of the small bundled model for the name `demo`; other names are unchanged."""
    from nanoengine.assets import demo_model_path

    return str(demo_model_path()) if name == DEMO else name


def sampling_fields(args: object) -> dict[str, Any]:
    """The fields of SamplingParams that are set on the command line.

    Raises:
        ConfigError: the format of the output is invalid, or set twice.
        RequestError: a value is out of range.
    """
    params = {
        option.name: value
        for option in fields(SamplingArgs)
        if (value := getattr(args, option.name)) != option.default
    }
    if formats := {option: params.pop(option) for option in FORMATS if option in params}:
        params["structured_outputs"] = _structured_outputs(formats)
        if "choices" in formats and "n" not in params:  # Why: it asks for the best choice.
            params.setdefault("temperature", 0.0)
    SamplingParams(**params)
    return params


def _structured_outputs(formats: dict[str, str]) -> dict[str, Any]:
    """The field of `StructuredOutputs` that an option sets, checked before a model loads."""
    from nanoengine.features.llguidance_grammars import require_valid

    names = " and ".join(f"--{option.replace('_', '-')}" for option in formats)
    if len(formats) > 1:
        raise ConfigError(f"{names} define the format of the output: give only one")
    spec: dict[str, Any] = {FORMATS[option][0]: text for option, text in formats.items()}
    try:
        if "choice" in spec:
            spec["choice"] = [*filter(None, map(str.strip, spec["choice"].split(",")))]
        if not spec.get("json", "{").lstrip().startswith("{"):
            spec["json"] = Path(spec["json"]).read_text(encoding="utf-8")
        require_valid(checked := StructuredOutputs(**spec))
    except (RequestError, OSError, ValueError) as error:
        hint = " (give a file, or a schema that begins with {)" * isinstance(error, OSError)
        raise ConfigError(f"{names}: {error}{hint}") from error
    return {kind: getattr(checked, kind) for kind in spec}


def _sampling_options() -> list[tuple[str, Any, Any]]:
    """Name, type and default per option: fields of SamplingParams, and FORMATS; None: not given.

    Why no seed: --seed is the engine's, from which the seeds of rows are derived.
    """
    docs = field_docs(SamplingParams) | {"max_tokens": MAX_TOKENS}
    hints = typing.get_type_hints(SamplingParams)
    options: list[tuple[str, Any, Any]] = []
    for param in fields(SamplingParams):
        if param.name in ("seed", *WITHOUT_OPTION):
            continue
        kind, default = hints[param.name], None
        kinds = typing.get_args(kind | None)
        if kind is bool:
            default = param.default
        elif tuple[str, ...] in kinds:
            kind, default = UseAppendAction[tuple[str, ...]], ()
        else:
            kind = (tuple[int, ...] if tuple[int, ...] in kinds else kind) | None
        hint = Annotated[kind, arg(help=docs[param.name])]
        options.append((param.name, hint, dataclasses.field(default=default)))
    formats = ((name, Annotated[str | None, arg(help=text)]) for name, (_, text) in FORMATS.items())
    return options + [(*option, dataclasses.field(default=None)) for option in formats]


SamplingArgs = dataclasses.make_dataclass(
    "SamplingArgs", _sampling_options(), frozen=True, kw_only=True
)
SamplingArgs.__doc__ = "How tokens are sampled. By default, the model's own values apply."
