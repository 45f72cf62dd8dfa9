"""Quantization: what a checkpoint stores, and what the engine makes of it.

`resolve_quantization` joins what `quantization_parsers.parse_quantization` has read from a
config.json with the user's option. Plain values, no torch. Called by `build_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nanoengine.errors import ConfigError, UnsupportedModelError

GGUF_WEIGHT_ONLY = "gguf_weight_only"
"""The option that runs a GGUF file with activations as they are."""

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""Values of `quant_method` that `parse_quantization` reads."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last part of a fused layer's name -> those of the matrices that checkpoints hold."""
STATES = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""The same of layers that keep a state, in GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint's linear layers are stored.

    Attributes:
        format: how its tensors lie (`layers/quantized_formats.py`); mxfp4 holds experts only; gguf:
            each matrix in a type of its own.
        bits: 4 or 8; of gguf the one that is nearer to what its types have.
        group_size: inputs that share a scale; None: a whole row does.
        group_rows: outputs that share a scale; None: all do. The last group of a matrix may be
            smaller where these are more than one.
        symmetric: there are no zero points. GPTQ and AWQ store them in any case.
        zero_offset: what to add to stored zero points.
        scattered: GPTQ: the inputs of a group lie anywhere, so a matrix must say of each its group.
        activations: what the checkpoint was made for; "int8" are quantized token by token, "e4m3"
            are floats of 8 bits.
        skipped: regular expressions of the names of linear layers that are stored as floats.
        types: gguf: the name of a matrix -> its type.
        targets: those of the names that are stored so, where they are not skipped.
        schemes: the ways of storing that the checkpoint has, each with its targets, where there are
            several; the fields above are those of the first.
    """

    format: Literal[
        "gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized",
        "fp8", "mxfp4", "gguf",
    ]  # fmt: skip
    bits: int
    group_size: int | None
    group_rows: int | None = 1
    symmetric: bool = False
    zero_offset: int = 0
    scattered: bool = False
    activations: Literal["int8", "e4m3", "float"] = "float"
    skipped: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ("",)
    schemes: tuple[StoredQuantization, ...] = ()

    @property
    def kind(self) -> str:
        """What its weights are, say "int4" or "fp8"."""
        kinds = {f"{'fp' if s.format in FLOATS else 'int'}{s.bits}" for s in self.ways}
        return ", ".join(sorted(set(self.types.values()) or kinds))

    @property
    def ways(self) -> tuple[StoredQuantization, ...]:
        """The ways of storing, one or more."""
        return self.schemes or (self,)

    @property
    def method(self) -> str:
        """The `quant_method` that stores so: one of `METHODS`, or gguf."""
        return self.format if self.format in (*METHODS, "gguf") else "compressed-tensors"

    def of(self, name: str) -> StoredQuantization | None:
        """How the linear layer of this full name is stored; None: as floats.

        Raises:
            UnsupportedModelError: matrices that are fused here are stored in different ways, or one
                has several.
        """
        if self.format == "mxfp4":
            return self if ".experts." in name else None
        names = self.matrices(name)
        if self.format == "gguf":
            # Why all: of those that are multiplied as one, a float can't be made blocks.
            held = name in self.types or all(part in self.types for part in names)
            return self if held else None
        found = [self._of_matrix(part) for part in names]
        if any(scheme is not found[0] for scheme in found):
            raise UnsupportedModelError(
                f"quantization_config quantizes only some of {', '.join(names)}, which are"
                " multiplied as one, or not all in one way; supported: all or none of them"
            )
        return found[0]

    def matrices(self, name: str) -> list[str]:
        """The names of the checkpoint's matrices that the linear layer of this name multiplies."""
        beside, _, last = name.rpartition(".")
        parts = FUSED.get(last) or (STATES.get(last) if self.format == "gguf" else None)
        return [f"{beside}.{part}" for part in parts] if parts else [name]

    def _of_matrix(self, name: str) -> StoredQuantization | None:
        if any(re.match(skipped, name) for skipped in self.skipped):
            return None
        found = [s for s in self.ways if any(re.match(target, name) for target in s.targets)]
        if len(found) > 1:
            raise UnsupportedModelError(
                f"quantization_config has {len(found)} config_groups for {name}; supported: one for"
                " each layer"
            )
        return found[0] if found else None


FLOATS = ("fp8", "float-quantized", "nvfp4-pack-quantized", "mxfp4")
"""Formats whose weights are small floats."""

IN_MXFP4 = StoredQuantization(format="mxfp4", bits=4, group_size=32, symmetric=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the engine holds and multiplies linear layers.

    Attributes:
        bits: of a weight.
        activations: "int8": quantized token by token; "float": as they are.
        stored: how the checkpoint holds them; None: as floats, to be quantized while they load.
    """

    bits: int
    activations: Literal["int8", "float"]
    stored: StoredQuantization | None = None

    @property
    def holds_embedding(self) -> bool:
        """Whether the embedding too is held as the checkpoint stores it."""
        return self.stored is not None and "model.embed_tokens" in self.stored.types

    def __str__(self) -> str:
        if self.stored is None:
            return f"int{self.bits} weights (quantized at load), {self.activations} activations"
        formats = " and ".join(dict.fromkeys(way.format for way in self.stored.ways))
        kind = self.stored.kind
        return f"{kind} weights (stored as {formats}), {self.activations} activations"


def resolve_quantization(
    option: str | None, stored: StoredQuantization | None, *, device: str
) -> Quantization | None:
    """What `EngineConfig.quantization` means for this checkpoint; None: the model is held as plain
    floats, and what is stored quantized becomes floats while it loads.

    On a CPU, a checkpoint that is stored quantized is run as it was made, but with activations of
    e4m3 as floats; an option of the same number of bits may still choose how activations are taken,
    and one that names its format changes nothing. A GPU takes activations as floats for any option.

    Raises:
        ConfigError: the option contradicts the checkpoint or can't be obeyed on this device.
        UnsupportedModelError: the checkpoint is quantized and can't be run.
    """
    asked = "gguf" if option == GGUF_WEIGHT_ONLY else option
    if asked in (*METHODS, "gguf"):
        found = stored.method if stored else "floats"
        if asked != found:
            raise ConfigError(
                f"quantization={option!r} contradicts the checkpoint, which is stored as {found}:"
                " leave the option out, or give a checkpoint of that format"
            )
        if stored and option == GGUF_WEIGHT_ONLY:
            stored = replace(stored, activations="float")
        option = None
    if option is not None and stored and stored.format == "gguf":
        raise ConfigError(
            f"quantization={option!r} would quantize a GGUF file that is quantized already, in"
            f" {', '.join(sorted(set(stored.types.values())))}: leave the option out, ask for"
            f" {GGUF_WEIGHT_ONLY!r}, or give a file of floats"
        )
    if option is not None:
        bits, floats = int(option[3]), option.endswith("weight_only")
        activations: Literal["int8", "float"] = "float" if floats else "int8"
    elif stored is None or device != "cpu":
        return None
    else:
        bits, activations = stored.bits, "int8" if stored.activations == "int8" else "float"
    # Why: whole numbers of 8 bits are no floats of 8 bits, and a GPU takes activations in one way.
    fixed = stored is not None and (device != "cpu" or bool(stored.schemes) or stored.kind == "fp8")
    if stored and (fixed or bits != stored.bits) and option is not None:
        other = f", or ask for 'int{stored.bits}' or 'int{stored.bits}_weight_only'"
        raise ConfigError(
            f"quantization={option!r} contradicts the checkpoint, which is stored in {stored.kind}"
            f" ({stored.format}): leave the option out{'' if fixed else other}"
        )
    if device != "cpu":
        activations = "float"
    return Quantization(bits=bits, activations=activations, stored=stored)
