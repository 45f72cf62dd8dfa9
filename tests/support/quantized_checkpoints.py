"""Tiny quantized checkpoints in the published layouts, packed by numpy one value at a time.

Written from the formats' own packing code, not from the readers: a matrix is drawn as whole
numbers, scales and zero points, its float values are returned as the truth, and words are filled
value by value. Sources: AutoGPTQ's `QuantLinear.pack` (qlinear_cuda.py), AutoAWQ's
`WQLinear_GEMM.from_linear`, compressed-tensors' `pack_to_int32`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine.kernels.code_tables import E2M1
from tests.support.checkpoints import make_checkpoint

Tensors = dict[str, torch.Tensor]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A matrix as a format sees it: weight[n, k] = (values - zeros) * scales of k's group, all
    counted from 0."""

    values: np.ndarray  # [N, K]
    zeros: np.ndarray  # [N, G]
    scales: np.ndarray  # [N, G] float16
    groups: np.ndarray  # [K]
    bits: int

    @property
    def weight(self) -> torch.Tensor:
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return torch.from_numpy((self.values - zeros) * scales.astype(np.float64))


def draw(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    groups: np.ndarray | None = None,
) -> Drawn:
    """A random matrix; scales give weights of about 0.15."""
    size = group_size or shape[1]
    num_groups = shape[1] // size
    middle = 1 << (bits - 1)
    drawn_zeros = rng.integers(middle // 2, middle * 3 // 2, (shape[0], num_groups))
    scale = 0.15 / (0.6 * middle)
    return Drawn(
        values=rng.integers(0, 1 << bits, shape),
        zeros=np.full_like(drawn_zeros, middle) if symmetric else drawn_zeros,
        scales=(scale * rng.uniform(0.5, 1.5, drawn_zeros.shape)).astype(np.float16),
        groups=np.arange(shape[1]) // size if groups is None else groups,
        bits=bits,
    )


def fill_words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[R, C] -> int32 [R, C / p]: place i of a word, from the low bits, holds column order[i]."""
    places = 32 // bits
    order = order or tuple(range(places))
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // places)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place in range(places):
            column = word * places + order[place]
            if column < columns:
                words[:, word] |= values[:, column].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def gptq(drawn: Drawn, *, less: int = 1) -> Tensors:
    """Inputs side by side in a word; zero points of outputs, stored `less` one (v1) or not (v2)."""
    return {
        "qweight": fill_words(drawn.values, drawn.bits).T.contiguous(),
        "qzeros": fill_words(drawn.zeros.T - less, drawn.bits),
        "scales": torch.from_numpy(drawn.scales.T.copy()),
        "g_idx": torch.from_numpy(drawn.groups.astype(np.int32)),
    }


def awq(drawn: Drawn) -> Tensors:
    """Outputs side by side in a word, in AutoAWQ's order_map."""
    order_map = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": fill_words(drawn.values.T, 4, order_map),
        "qzeros": fill_words(drawn.zeros.T, 4, order_map),
        "scales": torch.from_numpy(drawn.scales.T.copy()),
    }


def pack_quantized(drawn: Drawn, *, symmetric: bool, actorder: bool = False) -> Tensors:
    """Inputs side by side in a word, zero points of outputs in columns; signed values plus half."""
    tensors = {
        "weight_packed": fill_words(drawn.values, drawn.bits),
        "weight_scale": torch.from_numpy(drawn.scales),
        "weight_shape": torch.tensor(drawn.values.shape),
    }
    if not symmetric:
        words = fill_words(drawn.zeros.T, drawn.bits).T
        tensors["weight_zero_point"] = words.contiguous()
    if actorder:
        tensors["weight_g_idx"] = torch.from_numpy(drawn.groups.astype(np.int32))
    return tensors


def int_quantized(drawn: Drawn) -> Tensors:
    """int8 as it is."""
    return {
        "weight": torch.from_numpy((drawn.values - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(drawn.scales),
    }


def write_quantized(
    directory: Path,
    family: str,
    config: dict[str, Any],
    pack: Callable[[Drawn], Tensors],
    *,
    names: tuple[str, ...] = PROJECTIONS,
    groups: Callable[[np.random.Generator, str, int], np.ndarray | None] = lambda *_: None,
    seed: int = 0,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint in `directory` / "quantized" whose projections are quantized, and in
    `directory` / "floats" the same model as floats; returns the latter's path.

    `groups(rng, name, K)` may scatter a matrix's inputs over its groups.
    """
    floats, quantized = directory / "floats", directory / "quantized"
    make_checkpoint(floats, family, dtype=torch.float64, seed=seed, **overrides)
    truth = load_file(floats / "model.safetensors")
    stored = {}
    rng = np.random.default_rng(seed)
    for name, tensor in truth.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or stem.rpartition(".")[2] not in names:
            stored[name] = tensor
            continue
        drawn = draw(
            rng,
            tuple(tensor.shape),
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            groups=groups(rng, stem, tensor.shape[1]),
        )
        truth[name] = drawn.weight
        stored |= {f"{stem}.{part}": value for part, value in pack(drawn).items()}
    save_file(truth, floats / "model.safetensors")
    quantized.mkdir()
    raw = json.loads((floats / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(stored, quantized / "model.safetensors")
    return floats


# --- MXFP4 ----------------------------------------------------------------------------------------

STACKS = ("gate_up_proj", "down_proj")
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""`quantization_config` of the published checkpoints of gpt-oss."""


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stacked matrices [E, outputs, inputs] as blocks of codes and their scales: the nearest."""
    groups = weight.unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    numbers = torch.tensor(E2M1) / 2
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - numbers).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def make_mxfp4(path: Path, *, intermediate_size: int = 64) -> torch.nn.Module:
    """Writes a checkpoint with MXFP4 experts; the model that transformers makes of its floats."""
    model = make_checkpoint(path, "gpt_oss", intermediate_size=intermediate_size)
    file, found = path / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        if not name.endswith(STACKS):
            found[name] = tensor
            continue
        blocks, scales = packed(tensor.transpose(1, 2))
        found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert (floats - tensor).abs().max() < 0.3
        model.get_parameter(name).data.copy_(floats)
    save_file(found, file)
    raw = json.loads((path / "config.json").read_text("utf-8"))
    raw["quantization_config"] = MXFP4
    (path / "config.json").write_text(json.dumps(raw), "utf-8")
    return model
