"""Quantization: the stored form of a checkpoint, and the form that the engine runs.

`resolve_quantization` combines the result of `quantization_parsers.parse_quantization` with the
user's option. Plain values, no torch. Called by `build_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nanoengine.errors import ConfigError, UnsupportedModelError

GGUF_WEIGHT_ONLY = "gguf_weight_only"
"""The option that runs a GGUF file with float activations."""

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""Values of `quant_method` that `parse_quantization` reads."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last part of a fused layer's name -> last parts of the checkpoint's matrices."""
STATES = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""The same for recurrent layers, in GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint's linear layers are stored.

    Attributes:
        format: the layout of its tensors (`layers/quantized_formats.py`); mxfp4 has only experts;
            gguf: each matrix has its own type.
        bits: 4 or 8; for gguf the one nearer to its types' average.
        group_size: inputs that share a scale; None: a whole row does.
        group_rows: outputs that share a scale; None: all do. If there are several groups of
            outputs, the last one may be smaller.
        symmetric: there are no zero points. GPTQ and AWQ store them in any case.
        zero_offset: what to add to stored zero points.
        scattered: GPTQ: the inputs of a group are scattered, so a matrix must list each input's
            group.
        activations: what the checkpoint was made for; "int8" is quantized per token, "e4m3" is
            8-bit floats.
        skipped: regular expressions of the names of linear layers that are stored as floats.
        types: gguf: the name of a matrix -> its type.
        targets: regular expressions of the names that are stored in this form, unless they are
            skipped.
        schemes: all forms in the checkpoint, each with its targets, if there are several; the other
            fields belong to the first.
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
        """The kind of its weights, such as "int4" or "fp8"."""
        kinds = {f"{'fp' if s.format in FLOATS else 'int'}{s.bits}" for s in self.ways}
        return ", ".join(sorted(set(self.types.values()) or kinds))

    @property
    def ways(self) -> tuple[StoredQuantization, ...]:
        """The stored forms, one or more."""
        return self.schemes or (self,)

    @property
    def method(self) -> str:
        """The `quant_method` of this form: one of `METHODS`, or gguf."""
        return self.format if self.format in (*METHODS, "gguf") else "compressed-tensors"

    def of(self, name: str) -> StoredQuantization | None:
        """How the linear layer of this full name is stored; None: as floats.

        Raises:
            UnsupportedModelError: matrices that are fused here are stored in different forms, or
                one has several forms.
        """
        if self.format == "mxfp4":
            return self if ".experts." in name else None
        names = self.matrices(name)
        if self.format == "gguf":
            # Why all: matrices that are multiplied as one can't mix floats and blocks.
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
    """How the engine stores and multiplies linear layers.

    Attributes:
        bits: bits per weight.
        activations: "int8": quantized per token; "float": not quantized.
        stored: the checkpoint's stored form; None: floats, which are quantized while they load.
    """

    bits: int
    activations: Literal["int8", "float"]
    stored: StoredQuantization | None = None

    @property
    def holds_embedding(self) -> bool:
        """Whether the embedding is also kept in the checkpoint's stored form."""
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
    """Resolves `EngineConfig.quantization` for this checkpoint. None: the model runs with plain
    floats, and a quantized checkpoint is dequantized while it loads.

    On a CPU, a quantized checkpoint is run as it was made, except that e4m3 activations become
    floats. An option with the same number of bits may still select the activations, and an option
    with the name of its format changes nothing. A GPU uses float activations for any option.

    Raises:
        ConfigError: the option contradicts the checkpoint or is not supported on this device.
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
    # Why: 8-bit integers are not 8-bit floats, and a GPU supports only one kind of activations.
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
