"""StoredQuantization: how a checkpoint is quantized. Quantization: how the engine runs it.

`resolve_quantization` combines the result of `quantization_parsers.parse_quantization` with the
option `quantization`. Plain values, no torch. Called by `build_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nanoengine.errors import ConfigError, UnsupportedModelError

GGUF_WEIGHT_ONLY = "gguf_weight_only"
"""The value of the option `quantization` that runs a GGUF file with float activations."""

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
"""The supported values of `quant_method`."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last part of the name of a fused layer -> last parts of the names in the checkpoint."""
FUSED_RECURRENT = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""The same for recurrent layers in GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How the linear layers of a checkpoint are stored.

    Attributes:
        format: the layout of the tensors (`layers/quantized_formats.py`). With "mxfp4" only experts
            are quantized; with "gguf" each matrix has its own type.
        bits: 4 or 8; for gguf, whichever is nearer to the average of its types.
        group_size: number of inputs that share a scale; None: all inputs of a row.
        group_rows: number of outputs that share a scale; None: all outputs. The last group of
            outputs may be smaller.
        symmetric: there are no zero points; GPTQ and AWQ always have them.
        zero_offset: added to the stored zero points.
        desc_act: GPTQ with act-order: the tensor g_idx has the group of each input.
        activations: the dtype of activations that the checkpoint was calibrated for; "int8":
            quantized per token; "e4m3": 8-bit floats.
        skipped: regular expressions of names of linear layers that are not quantized.
        types: gguf: name of a matrix -> its type.
        targets: regular expressions of names of linear layers that are stored in this form, except
            the skipped ones.
        schemes: all forms in the checkpoint, each with its targets, if there are several; the other
            fields have the values of the first form.
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
    desc_act: bool = False
    activations: Literal["int8", "e4m3", "float"] = "float"
    skipped: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ("",)
    schemes: tuple[StoredQuantization, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the weights, such as "int4" or "fp8"."""
        kinds = {f"{'fp' if s.format in FLOAT_FORMATS else 'int'}{s.bits}" for s in self.forms}
        return ", ".join(sorted(set(self.types.values()) or kinds))

    @property
    def forms(self) -> tuple[StoredQuantization, ...]:
        """All stored forms; at least one."""
        return self.schemes or (self,)

    @property
    def method(self) -> str:
        """The `quant_method` of this form: one of `METHODS`, or gguf."""
        return self.format if self.format in (*METHODS, "gguf") else "compressed-tensors"

    def of(self, name: str) -> StoredQuantization | None:
        """How the linear layer with this full name is stored; None: it is not quantized.

        Raises:
            UnsupportedModelError: the layer is fused here from matrices that are stored in
                different forms, or several forms match a matrix.
        """
        if self.format == "mxfp4":
            return self if ".experts." in name else None
        names = self.matrices(name)
        if self.format == "gguf":
            # Why all: a fused matrix can't have both floats and quantized blocks.
            is_stored = name in self.types or all(part in self.types for part in names)
            return self if is_stored else None
        found = [self._of_matrix(part) for part in names]
        if any(scheme is not found[0] for scheme in found):
            raise UnsupportedModelError(
                f"quantization_config does not quantize {', '.join(names)} in the same way, but"
                " they are fused into one layer; supported: the same scheme for all, or for none"
            )
        return found[0]

    def matrices(self, name: str) -> list[str]:
        """The names of the matrices in the checkpoint that form the linear layer of this name."""
        prefix, _, last = name.rpartition(".")
        parts = FUSED.get(last) or (FUSED_RECURRENT.get(last) if self.format == "gguf" else None)
        return [f"{prefix}.{part}" for part in parts] if parts else [name]

    def _of_matrix(self, name: str) -> StoredQuantization | None:
        if any(re.match(skipped, name) for skipped in self.skipped):
            return None
        found = [s for s in self.forms if any(re.match(target, name) for target in s.targets)]
        if len(found) > 1:
            raise UnsupportedModelError(
                f"quantization_config has {len(found)} config_groups for {name}; supported: one per"
                " layer"
            )
        return found[0] if found else None


FLOAT_FORMATS = ("fp8", "float-quantized", "nvfp4-pack-quantized", "mxfp4")
"""Formats whose weights are 4-bit or 8-bit floats."""

MXFP4_EXPERTS = StoredQuantization(format="mxfp4", bits=4, group_size=32, symmetric=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the engine runs linear layers.

    Attributes:
        bits: bits per weight.
        activations: "int8": quantized per token; "float": not quantized.
        stored: the form in the checkpoint; None: floats, which are quantized during loading.
    """

    bits: int
    activations: Literal["int8", "float"]
    stored: StoredQuantization | None = None

    @property
    def holds_embedding(self) -> bool:
        """Whether the embedding is also quantized, in the checkpoint's form."""
        return self.stored is not None and "model.embed_tokens" in self.stored.types

    def __str__(self) -> str:
        if self.stored is None:
            return f"int{self.bits} weights (quantized at load), {self.activations} activations"
        formats = " and ".join(dict.fromkeys(form.format for form in self.stored.forms))
        kind = self.stored.kind
        return f"{kind} weights (stored as {formats}), {self.activations} activations"


def resolve_quantization(
    option: str | None, stored: StoredQuantization | None, *, device: str
) -> Quantization | None:
    """Resolves the option `quantization` for a checkpoint. None: linear layers run as plain floats,
    and a quantized checkpoint is dequantized during loading.

    On a CPU, a quantized checkpoint runs in its own form, except that e4m3 activations become
    floats. An option with the same number of bits may select other activations, and an option with
    the name of the checkpoint's format changes nothing. A GPU always uses float activations.

    Raises:
        ConfigError: the option contradicts the checkpoint.
    """
    method = "gguf" if option == GGUF_WEIGHT_ONLY else option
    if method in (*METHODS, "gguf"):
        found = stored.method if stored else "floats"
        if method != found:
            raise ConfigError(
                f"quantization={option!r} contradicts the checkpoint, which is stored as {found}:"
                " remove the option, or give a checkpoint of that format"
            )
        if stored and option == GGUF_WEIGHT_ONLY:
            stored = replace(stored, activations="float")
        option = None
    if option is not None and stored and stored.format == "gguf":
        raise ConfigError(
            f"quantization={option!r} would quantize a GGUF file that is already quantized in"
            f" {', '.join(sorted(set(stored.types.values())))}: remove the option, use"
            f" {GGUF_WEIGHT_ONLY!r}, or give a GGUF file that is not quantized"
        )
    if option is not None:
        bits, floats = int(option[3]), option.endswith("weight_only")
        activations: Literal["int8", "float"] = "float" if floats else "int8"
    elif stored is None or device != "cpu":
        return None
    else:
        bits, activations = stored.bits, "int8" if stored.activations == "int8" else "float"
    # Why: "int8" does not mean 8-bit floats, and a GPU supports only float activations.
    fixed = stored is not None and (device != "cpu" or bool(stored.schemes) or stored.kind == "fp8")
    if stored and (fixed or bits != stored.bits) and option is not None:
        hint = f", or use 'int{stored.bits}' or 'int{stored.bits}_weight_only'"
        raise ConfigError(
            f"quantization={option!r} contradicts the checkpoint, which is stored in {stored.kind}"
            f" ({stored.format}): remove the option{'' if fixed else hint}"
        )
    if device != "cpu":
        activations = "float"
    return Quantization(bits=bits, activations=activations, stored=stored)
