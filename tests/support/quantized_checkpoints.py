"""Tiny quantized checkpoints in the published layouts, and the same models as floats.

They follow the packing code of each format, independently of this package's readers. A matrix of
integers is drawn as values, scales and zero points; words are filled value by value. 8-bit and
4-bit floats are rounded block by block. Sources: AutoGPTQ's `QuantLinear.pack` (qlinear_cuda.py),
AutoAWQ's `WQLinear_GEMM.from_linear`, compressed-tensors' `pack_to_int32`, `quantize` and
`pack_fp4_to_uint8`, transformers' `Fp8Quantize`.

A packer takes a matrix and its name. It returns the stored tensors, and the float matrix that they
represent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.quantization import Quantization, resolve_quantization
from nanoengine.kernels.code_tables import E2M1
from nanoengine.layers.kernels import Kernels
from nanoengine.layers.quantized import dequantize_all, quantized_linears
from nanoengine.models.decoder import CausalLM
from tests.support.checkpoints import make_checkpoint
from tests.support.model_helpers import DenseAttention, build, cpu_kernels

Tensors = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor, str], tuple[Tensors, torch.Tensor]]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MATRICES = (*PROJECTIONS, "qkv_proj", "gate_up_proj")
BYTE, HALF = torch.float8_e4m3fn, torch.tensor(E2M1) / 2


# --- integer formats ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A random quantized matrix: weight[n, k] = (values - zeros) * scales, with zeros and scales of
    k's group. Values start at 0."""

    values: np.ndarray  # [N, K]
    zeros: np.ndarray  # [N, G]
    scales: np.ndarray  # [N, G] float16
    groups: np.ndarray  # [K]
    bits: int
    is_symmetric: bool

    @property
    def weight(self) -> torch.Tensor:
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return torch.from_numpy((self.values - zeros) * scales.astype(np.float64))


def draw(
    shape: torch.Size,
    name: str,
    *,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = False,
    is_scattered: bool = False,
) -> Drawn:
    """A random matrix, seeded by its name; scales give weights of about 0.15.

    Args:
        is_scattered: inputs belong to groups in a random order, which is equal for matrices with
            the same input.
    """
    rng, (outputs, inputs) = np.random.default_rng(sum(map(ord, name))), shape
    num_groups, middle = inputs // (group_size or inputs), 1 << (bits - 1)
    drawn_zeros = rng.integers(middle // 2, middle * 3 // 2, (outputs, num_groups))
    scale = 0.15 / (0.6 * middle)
    groups = np.arange(inputs) // (group_size or inputs)
    if is_scattered:
        seed = sum(map(ord, name.rpartition(".")[0])) + inputs + ("o_proj" in name)
        groups = np.random.default_rng(seed).permutation(groups)
    return Drawn(
        values=rng.integers(0, 1 << bits, shape),
        zeros=np.full_like(drawn_zeros, middle) if symmetric else drawn_zeros,
        scales=(scale * rng.uniform(0.5, 1.5, drawn_zeros.shape)).astype(np.float16),
        groups=groups, bits=bits, is_symmetric=symmetric,
    )  # fmt: skip


def fill_words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[R, C] -> int32 [R, C / p]: position i of a word, from the low bits, is column order[i]."""
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


def integers(store: Callable[..., Tensors]) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """Makes a packer that draws a random matrix (`how`: arguments of `draw`) and stores it with
    `store` (`options`: its arguments)."""

    @functools.wraps(store)
    def pack(weight: torch.Tensor, name: str, *, options: Any = None, **how: Any) -> Any:
        drawn = draw(weight.shape, name, **how)
        return store(drawn, **(options or {})), drawn.weight

    return pack


@integers
def gptq(drawn: Drawn, *, less: int = 1) -> Tensors:
    """A word has adjacent inputs; zero points are stored minus `less`: 1 in v1, 0 in v2."""
    return {
        "qweight": fill_words(drawn.values, drawn.bits).T.contiguous(),
        "qzeros": fill_words(drawn.zeros.T - less, drawn.bits),
        "scales": torch.from_numpy(drawn.scales.T.copy()),
        "g_idx": torch.from_numpy(drawn.groups.astype(np.int32)),
    }


@integers
def awq(drawn: Drawn) -> Tensors:
    """A word has adjacent outputs, in AutoAWQ's order_map."""
    order_map = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": fill_words(drawn.values.T, 4, order_map),
        "qzeros": fill_words(drawn.zeros.T, 4, order_map),
        "scales": torch.from_numpy(drawn.scales.T.copy()),
    }


@integers
def pack_quantized(drawn: Drawn, *, actorder: bool = False) -> Tensors:
    """A word has adjacent inputs; of zero points, adjacent outputs. Values are stored unsigned."""
    tensors = {
        "weight_packed": fill_words(drawn.values, drawn.bits),
        "weight_scale": torch.from_numpy(drawn.scales),
        "weight_shape": torch.tensor(drawn.values.shape),
    }
    if not drawn.is_symmetric:
        words = fill_words(drawn.zeros.T, drawn.bits).T
        tensors["weight_zero_point"] = words.contiguous()
    if actorder:
        tensors["weight_g_idx"] = torch.from_numpy(drawn.groups.astype(np.int32))
    return tensors


@integers
def int_quantized(drawn: Drawn) -> Tensors:
    """Unpacked int8."""
    return {
        "weight": torch.from_numpy((drawn.values - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(drawn.scales),
    }


# --- 8-bit and 4-bit floats -----------------------------------------------------------------------


def blocks(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """e4m3 codes, one scale per block [ceil(N / rows), ceil(K / columns)], and float values."""
    codes, numbers = torch.empty_like(weight, dtype=BYTE), torch.empty_like(weight)
    starts = range(0, len(weight), rows), range(0, weight.shape[1], columns)
    scales = torch.empty(len(starts[0]), len(starts[1]))
    for i, row in enumerate(starts[0]):
        for j, column in enumerate(starts[1]):
            place = slice(row, row + rows), slice(column, column + columns)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(BYTE)
            numbers[place] = codes[place].float() * scales[i, j]
    return codes, scales, numbers


def fp8(weight: torch.Tensor, _: str, *, scale: str = "weight_scale_inv") -> Any:
    codes, scales, numbers = blocks(weight, 128, 128)
    return {"weight": codes, scale: scales}, numbers


def fp8_matrix(
    weight: torch.Tensor, _: str, *, scale: str, of_inputs: str, shape: tuple[int, ...] = ()
) -> Any:
    codes, scales, numbers = blocks(weight, *weight.shape)
    return {"weight": codes, scale: scales.view(shape), of_inputs: torch.ones(shape)}, numbers


def fp8_rows(weight: torch.Tensor, _: str, *, columns: int | None = None) -> Any:
    codes, scales, numbers = blocks(weight, 1, columns or weight.shape[1])
    return {"weight": codes, "weight_scale": scales}, numbers


def nvfp4(weight: torch.Tensor, _: str) -> Any:
    groups = weight.unflatten(1, (-1, 16))
    whole = 448 * 6 / weight.abs().max()
    scales = (groups.abs().amax(2) / 6 * whole).to(BYTE)
    steps = (scales.float() / whole).unsqueeze(2)
    codes = ((groups / steps).unsqueeze(3) - HALF).abs().argmin(3).flatten(1)
    numbers = (HALF[codes].unflatten(1, (-1, 16)) * steps).flatten(1)
    tensors = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": whole.view(1),
        "input_global_scale": torch.ones(1),
    }
    return tensors, numbers


def nvfp4_or_fp8_rows(weight: torch.Tensor, name: str) -> Any:
    return (nvfp4 if name.endswith(("gate_proj", "up_proj")) else fp8_rows)(weight, name)


# --- configs in the formats' own layout -----------------------------------------------------------


def group(weights: dict[str, Any], targets: tuple[str, ...] = ("Linear",), **more: Any) -> Any:
    """An entry of `config_groups`: floats, with activations of the same number of bits."""
    given = {"type": "float", "symmetric": True, "dynamic": False, "num_bits": 8, **weights}
    inputs = {"type": "float", "num_bits": given["num_bits"], "dynamic": True}
    return {"targets": list(targets), "weights": given, "input_activations": inputs, **more}


def compressed(*groups: dict[str, Any], layout: str = "float-quantized") -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {f"group_{i}": one for i, one in enumerate(groups)},
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def int_config(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": None}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    activations = None if layout == "pack-quantized" else inputs
    return compressed(group({**given, **weights}, input_activations=activations), layout=layout)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
    "modules_to_not_convert": None,
}  # fmt: skip
FP8: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128],
}  # fmt: skip
FP8_MATRIX = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
FP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
SKIPPED = ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn"]
MIXED = compressed(
    group({"strategy": "channel"}, ("re:.*self_attn", "re:.*down_proj"), format="float-quantized"),
    group(FP4, ("re:.*(gate|up)_proj",), format="nvfp4-pack-quantized"),
    layout="mixed-precision",
)
FLOATS = {"hidden_size": 160, "intermediate_size": 192, "head_dim": 40, "dtype": torch.float32}
"""Sizes that are not multiples of 128: the last blocks are smaller, and blocks span q, k and v."""
SOME = ("gate_proj", "up_proj")
SYMMETRIC = partial(pack_quantized, symmetric=True)

CASES: dict[str, tuple[dict[str, Any], Packer, dict[str, Any]]] = {
    # name -> config, packer, options of `write_quantized`
    "gptq": (GPTQ, gptq, {}),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(gptq, options={"less": 0}), {}),
    "gptq-8-bit": (GPTQ | {"bits": 8}, partial(gptq, bits=8), {}),
    "gptq-row-scales": (GPTQ | {"group_size": -1}, partial(gptq, group_size=None), {}),
    "gptq-desc-act": (GPTQ | {"desc_act": True}, partial(gptq, is_scattered=True), {}),
    "gptq-head": (GPTQ | {"lm_head": True}, gptq, {"names": (*PROJECTIONS, "lm_head")}),
    "awq": (AWQ, awq, {}),
    "awq-old-keys": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, awq, {},
    ),
    "awq-some": (
        AWQ | {"modules_to_not_convert": ["down_proj", "self_attn"]}, awq, {"names": SOME},
    ),
    "pack-quantized": (int_config(), SYMMETRIC, {}),
    "pack-quantized-zeros": (int_config(symmetric=False), pack_quantized, {}),
    "pack-quantized-channel": (
        int_config(strategy="channel", group_size=None, symmetric=False),
        partial(pack_quantized, group_size=None), {},
    ),
    "pack-quantized-8-bit": (int_config(num_bits=8), partial(SYMMETRIC, bits=8), {}),
    "pack-quantized-actorder": (
        int_config(actorder="group"),
        partial(SYMMETRIC, is_scattered=True, options={"actorder": True}), {},
    ),
    "pack-quantized-ignore": (
        int_config() | {"ignore": ["lm_head", "re:.*self_attn", "re:.*down_proj"]},
        SYMMETRIC, {"names": SOME},
    ),
    "int-quantized": (
        int_config("int-quantized", num_bits=8, strategy="channel", group_size=None),
        partial(int_quantized, symmetric=True, bits=8, group_size=None), {},
    ),
    "fp8": (FP8, fp8, FLOATS),
    "fp8-matrix": (
        FP8_MATRIX,
        partial(fp8_matrix, scale="weight_scale_inv", of_inputs="activation_scale"), FLOATS,
    ),
    "fp8-older": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        partial(fp8_matrix, scale="weight_scale", of_inputs="input_scale"), FLOATS,
    ),
    "fp8-some": (FP8 | {"modules_to_not_convert": SKIPPED}, fp8, FLOATS),
    "tensor": (
        compressed(group({"strategy": "tensor"})),
        partial(fp8_matrix, scale="weight_scale", of_inputs="input_scale", shape=(1,)), FLOATS,
    ),
    "channel": (compressed(group({"strategy": "channel"})), fp8_rows, FLOATS),
    "group": (
        compressed(group({"strategy": "group", "group_size": 32})), partial(fp8_rows, columns=32),
        FLOATS,
    ),
    "block": (compressed(group(BLOCK)), partial(fp8, scale="weight_scale"), FLOATS),
    "nvfp4": (compressed(group(FP4), layout="nvfp4-pack-quantized"), nvfp4, FLOATS),
    "mixed": (MIXED, nvfp4_or_fp8_rows, FLOATS),
}  # fmt: skip
SMALL_FLOATS = [case for case, (*_, options) in CASES.items() if options is FLOATS]


# --- checkpoints ----------------------------------------------------------------------------------


def write_quantized(
    directory: Path,
    family: str,
    config: dict[str, Any],
    pack: Packer,
    *,
    names: tuple[str, ...] = MATRICES,
    dtype: torch.dtype = torch.float64,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint whose matrices of these names are packed to `directory` / "quantized",
    and the same model as floats to `directory` / "floats". Returns the latter's path."""
    floats, quantized = directory / "floats", directory / "quantized"
    make_checkpoint(floats, family, dtype=dtype, **overrides)
    truth, stored = load_file(floats / "model.safetensors"), Tensors()
    skipped = tuple(f"{name}." for name in config.get("modules_to_not_convert") or ())
    for name, tensor in truth.items():
        stem, _, kind = name.rpartition(".")
        named = kind == "weight" and stem.rpartition(".")[2] in names
        if not named or name.startswith(skipped):
            stored[name] = tensor
            continue
        tensors, truth[name] = pack(tensor, stem)
        stored |= {f"{stem}.{part}": value for part, value in tensors.items()}
    save_file(truth, floats / "model.safetensors", {"format": "pt"})
    quantized.mkdir()
    raw = json.loads((floats / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(stored, quantized / "model.safetensors")
    return floats


def write_case(directory: Path, case: str, family: str = "llama", **overrides: Any) -> Path:
    """`write_quantized` for one of `CASES`."""
    config, pack, options = CASES[case]
    return write_quantized(directory, family, config, pack, **{**options, **overrides})


def load_quantized_model(
    directory: Path, option: str | None = None, *, dtype: torch.dtype = torch.float64, **fields: Any
) -> CausalLM:
    """Loads the model as an engine on a CPU does."""
    stored = load_model_config(directory).quantization
    kernels = cpu_kernels(dtype, resolve_quantization(option, stored, device="cpu"))
    return build(directory, dtype, kernels=kernels, **fields)


def load_dequantized_model(
    directory: Path, *, dtype: torch.dtype = torch.float64, **fields: Any
) -> CausalLM:
    """Loads the model as an engine does on a device without kernels for the stored format."""
    kernels = stored_kernels(directory, Kernels(DenseAttention()), dequantize_all)
    return build(directory, dtype, kernels=kernels, **fields)


def stored_kernels(directory: Path, kernels: Kernels, kind: Callable[..., Any]) -> Kernels:
    """Makes `kernels` use methods of `kind` for the stored format of a checkpoint, as on a GPU."""
    stored = load_model_config(directory).quantization
    assert stored is not None and resolve_quantization(None, stored, device="cuda") is None
    as_stored = Quantization(bits=stored.bits, activations="float", stored=stored)
    kernels.linear = quantized_linears(as_stored, kernels.linear, kind)
    return kernels


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
    """Quantizes stacked matrices [E, outputs, inputs] to the nearest block codes and scales."""
    groups = weight.unflatten(2, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    numbers = torch.tensor(E2M1) / 2
    scaled = groups / torch.exp2(exponents).unsqueeze(-1)
    codes = (scaled.unsqueeze(-1) - numbers).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def make_mxfp4(path: Path, *, intermediate_size: int = 64) -> torch.nn.Module:
    """Writes a checkpoint with MXFP4 experts; returns transformers' dequantized model."""
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
