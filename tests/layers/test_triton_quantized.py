"""4-bit and 8-bit weights in a Triton GEMM, against the dequantized weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.quantization import Quantization, StoredQuantization
from nanoengine.errors import ConfigError
from nanoengine.layers import triton_quantized
from nanoengine.layers.collectives import Shard
from nanoengine.layers.kernels import Kernels, UnquantizedLinear
from nanoengine.layers.quantized import QuantizedLinear, quantized_linears
from nanoengine.layers.quantized_weight import QuantizedWeight, quantize
from nanoengine.layers.triton_quantized import (
    E4M3Linear,
    TritonQuantizedLinear,
    e4m3_rows,
    make_triton_linear,
)
from nanoengine.models.triton import TritonKernels
from tests.support.attention_cases import DEVICE
from tests.support.checkpoints import make_checkpoint
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import make_engine
from tests.support.model_helpers import DenseAttention, all_logits, build, random_prompts
from tests.support.quantized_checkpoints import (
    AWQ,
    awq,
    stored_kernels,
    write_case,
    write_quantized,
)


def random_weight(form: str, outputs: int, inputs: int, group: int, zeros: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(3)
    if form == "e4m3":
        codes = torch.arange(outputs * inputs).view(outputs, inputs) * 37 % 254
        codes = (codes + (codes >= 127).int()).to(torch.uint8).view(torch.int8)
        scales = torch.rand(outputs, inputs // group, generator=generator) * 1e-3
        return QuantizedWeight(values=codes, scales=scales, zeros=None, bits=8, group_size=group,
                               floats=True)  # fmt: skip
    bits = int(form[3])
    codes = torch.randint(1 << bits, (outputs, inputs), generator=generator) - (1 << bits - 1)
    scales = torch.randn(outputs, inputs // group, generator=generator) * inputs**-0.5 / 2**bits
    weight = QuantizedWeight(
        values=codes.to(torch.int8), scales=scales, bits=bits, group_size=group
    )
    points = torch.randint(-4, 4, weight.scales.shape, generator=generator).float()
    return replace(weight, zeros=points if zeros else None)


def layer(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> TritonQuantizedLinear:
    method = TritonQuantizedLinear(
        "layer", bits=weight.bits, group_size=weight.group_size, activations="float"
    )
    method.create(tuple(weight.values.shape), dtype, DEVICE)
    method.load_quantized(weight)
    return method


def as_stored(stored: StoredQuantization) -> Quantization:
    return Quantization(bits=stored.bits, activations="float", stored=stored)


FORMS = [
    ("int4", 32, False), ("int4", 128, True), ("int8", 256, False), ("int8", 64, True),
    ("e4m3", 128, False), ("e4m3", 16, False),
]  # fmt: skip


@pytest.mark.parametrize(("form", "group", "zeros"), FORMS)
def test_products_match_the_dequantized_weights(form: str, group: int, zeros: bool) -> None:
    weight = random_weight(form, 70, 256, group, zeros)
    method, floats = layer(weight), weight.dequantized().to(DEVICE)
    assert method.weight.element_size() == 1 and method.tile
    for num_rows in (1, 19):
        x = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        bias = torch.linspace(-1, 1, 70).to(DEVICE)
        for added, wide in ((None, None), (bias, bias.double())):
            expected = F.linear(x.double(), floats.double(), wide)
            error = (method.apply(x, added).double() - expected).abs().max()
            assert error < 2e-6 * expected.abs().max()


def test_float16_rounds_weights_once() -> None:
    weight = random_weight("int4", 40, 256, 64, True)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)
    found = layer(weight, torch.float16).apply(x, None)
    expected = F.linear(x.double(), weight.dequantized().to(DEVICE).half().double())
    assert ((found.double() - expected).abs() < 1e-3 + 2**-11 * expected.abs()).all()


def test_reordered_inputs_and_groups_without_a_tile_size_match() -> None:
    generator = torch.Generator().manual_seed(4)
    for size, group in ((128, 32), (120, 24)):
        order = torch.randperm(size, generator=generator)
        weight = replace(random_weight("int4", 20, size, group, True), order=order)
        method = layer(weight)
        assert bool(method.tile) == (group == 32)
        x = torch.randn(3, size, generator=generator).to(DEVICE)
        expected = F.linear(x, weight.dequantized().to(DEVICE))
        torch.testing.assert_close(method.apply(x, None), expected, rtol=0, atol=2e-5)


def kernels_with_stored_weights(directory: Path) -> Kernels:
    """Kernels that keep a checkpoint's weights in their stored format."""
    return stored_kernels(directory, Kernels(DenseAttention()), make_triton_linear)


@pytest.mark.parametrize(
    "case", ["gptq-desc-act", "awq", "pack-quantized-zeros", "int-quantized", "fp8"]
)
def test_a_model_keeps_its_stored_format(case: str, tmp_path: Path) -> None:
    """Weights take one or half a byte; the logits match the dequantized model."""
    floats, directory = write_case(tmp_path, case), tmp_path / "quantized"
    model = build(directory, torch.float32, kernels=kernels_with_stored_weights(directory))
    layers = [m for m in model.modules() if isinstance(m, TritonQuantizedLinear)]
    assert len(layers) == 8 and all(m.tile and m.weight.element_size() == 1 for m in layers)
    prompts = random_prompts(9, 3)
    expected = all_logits(build(floats, torch.float64), prompts)
    assert (all_logits(model, prompts) - expected).abs().max() < 1e-4 * expected.std()


def test_triton_kernels_keep_stored_formats() -> None:
    stored = StoredQuantization(format="awq", bits=4, group_size=128, skipped=("lm_head$",))
    kernels = TritonKernels(DenseAttention(), dtype=torch.bfloat16)
    assert kernels.quantized_linear_factory() is make_triton_linear
    make = quantized_linears(as_stored(stored), kernels.linear, make_triton_linear)
    name = "model.layers.0.mlp.down_proj"
    for quantized in (name, "model.layers.0.mlp.experts.3.down_proj"):
        assert type(make(quantized)) is TritonQuantizedLinear
    for other in ("lm_head", "model.layers.0.mlp.gate"):
        assert isinstance(make(other), UnquantizedLinear)
    backend = DenseAttention()
    backend.deterministic = True
    assert TritonKernels(backend, dtype=torch.bfloat16).quantized_linear_factory() is None


# --- fp8 by fp8 -----------------------------------------------------------------------------------


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`e4m3_rows` in plain torch."""
    scales = x.float().abs().amax(1, keepdim=True) / 448
    divisors = torch.where(scales == 0, 1.0, scales)
    return (x.float() / divisors).to(torch.float8_e4m3fn), scales


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter round to e4m3 as torch does. Why: it drops the carry when it rounds a
    mantissa up, and digits below the smallest exponent."""
    convert = interpreter._convert_float

    def converted(data: Any, kind: Any, to: Any, mode: Any) -> Any:
        if kind != tl.float32 or to != tl.float8e4nv:
            return convert(data, kind, to, mode)
        codes = torch.from_numpy(data.view(np.float32)).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_to_the_nearest_fp8_values(dtype: torch.dtype) -> None:
    x = torch.randn(40, 150, generator=torch.Generator().manual_seed(1)) * 3
    x[:, 7] *= torch.logspace(-6, 6, 40)
    x[3], x[4, 5], x[5, 6] = 0, torch.nan, torch.inf
    x = x.to(DEVICE, dtype)[:, :140]
    codes, scales = e4m3_rows(x)
    expected, expected_scales = rounded_rows(x)
    sound = [row for row in range(40) if row not in (4, 5)]
    assert torch.equal(scales[sound], expected_scales[sound])
    assert torch.equal(codes.view(torch.uint8)[sound], expected.view(torch.uint8)[sound])
    wrong = codes[4:6].float() * scales[4:6]
    assert wrong.isnan().any(1).all()


def e4m3_layer(weight: QuantizedWeight, dtype: torch.dtype = torch.bfloat16) -> E4M3Linear:
    method = E4M3Linear("layer", bits=8, group_size=None, activations="float")
    method.create(tuple(weight.values.shape), dtype, DEVICE)
    method.load_quantized(weight)
    return method


@pytest.mark.usefixtures("rounding")
def test_fp8_products_match_the_reference() -> None:
    """The reference multiplies the dequantized values in float64."""
    weight = random_weight("e4m3", 48, 160, 160, False)
    method, bias = e4m3_layer(weight), torch.linspace(-9, 9, 48).to(DEVICE, torch.bfloat16)
    assert method.form == "e4m3 by e4m3" and method.weight.dtype == torch.float8_e4m3fn
    for num_rows in (1, 19):
        x = torch.randn(num_rows, 160, generator=torch.Generator().manual_seed(2))
        x = x.to(DEVICE, torch.bfloat16)
        codes, scales = rounded_rows(x)
        left, right = codes.double() * scales, weight.dequantized().to(DEVICE).double()
        for added in (None, bias):
            expected = left @ right.T + (0 if added is None else added.double())
            found = method.apply(x, added)
            assert found.dtype == torch.bfloat16
            error = (found.double() - expected).abs()
            assert (error < 2**-8 * expected.abs() + 1e-4).all()
            assert error.max() < (found.double() - x.double() @ right.T).abs().max()


def test_unsupported_fp8_layers_use_float_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_row, by_block = (
        random_weight("e4m3", 48, 160, 160, False),
        random_weight("e4m3", 48, 256, 128, False),
    )
    assert e4m3_layer(by_block).form == "e4m3"
    assert e4m3_layer(by_row, torch.float16).form == "e4m3"
    assert e4m3_layer(random_weight("e4m3", 40, 160, 160, False)).form == "e4m3", "40 outputs"
    monkeypatch.setattr(triton_quantized, "arch_of", lambda device: 80)
    assert e4m3_layer(by_row).form == "e4m3"


class Emulated(QuantizedLinear):
    """The reference of `E4M3Linear`: a weight times activations rounded to e4m3, both as floats."""

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        codes, scales = rounded_rows(x)
        out = (codes.double() * scales) @ self.unpacked().dequantized().double().T
        return out.to(x.dtype)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("case", ["channel", "fp8-matrix"])
def test_an_fp8_model_is_close_to_the_emulated_one(case: str, tmp_path: Path) -> None:
    """Logits are closer to a model with rounded activations than to one with float activations."""
    write_case(tmp_path, case, head_dim=32)
    stored = load_model_config(tmp_path / "quantized").quantization
    assert stored is not None and stored.activations == "e4m3"

    def logits(make: Any) -> torch.Tensor:
        kernels = Kernels(DenseAttention())
        kernels.linear = make
        model = build(tmp_path / "quantized", torch.bfloat16, kernels=kernels)
        forms = [m.form for m in model.modules() if isinstance(m, E4M3Linear)]
        assert forms in ([], ["e4m3 by e4m3"] * 8)
        return all_logits(model, random_prompts(9, 20)).float()

    found = logits(quantized_linears(as_stored(stored), UnquantizedLinear, make_triton_linear))
    rounded, plain = (
        logits(quantized_linears(as_stored(stored), UnquantizedLinear, kind))
        for kind in (Emulated, QuantizedLinear)
    )
    near, far = ((one - found).abs().mean() for one in (rounded, plain))
    assert near < 0.5 * far, (near, far)


# --- engines --------------------------------------------------------------------------------------

ON_GPU = {"device": "cuda", "attention_backend": "triton", "dtype": "float32", "max_num_seqs": 2}


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_weights_with_mins_get_zero_points(bits: int) -> None:
    floats = torch.randn(40, 256, generator=torch.Generator().manual_seed(3))
    floats[:, 0], floats[:, 32:64] = 1000, -0.3
    weight = quantize(floats, bits, 32)
    assert not weight.scales[:, 1].any() and weight.mins[:, 1].all()
    method, x = layer(weight), torch.randn(5, 256, generator=torch.Generator().manual_seed(4))
    assert method.form == ("int4" if bits == 4 else "int8")
    expected = x.double() @ weight.dequantized().double().T
    assert (method.apply(x.to(DEVICE), None) - expected).abs().max() < 1e-6 * expected.abs().max()


def test_new_rows_overwrite_the_old_ones_in_place() -> None:
    weights = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    for bits, group_size in ((4, 32), (8, 64)):
        both = []
        for _ in range(2):
            method = TritonQuantizedLinear(
                "layer", bits=bits, group_size=group_size, activations="float"
            )
            method.create((24, 64), torch.float32, DEVICE)
            method.load(weights[0])
            both.append(method)
        method, fresh = both
        addresses = method.weight.data_ptr(), method.scales.data_ptr()
        method.load(weights[1, 8:], 8)
        assert addresses == (method.weight.data_ptr(), method.scales.data_ptr())
        fresh.weight = None
        fresh.load(torch.cat([weights[0, :8], weights[1, 8:]]))
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(6)).to(DEVICE)
        assert torch.equal(method.apply(x, None), fresh.apply(x, None))


def test_gguf_layers_with_one_supported_type_stay_quantized() -> None:
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    stored = StoredQuantization(
        format="gguf", bits=4, group_size=None,
        types=dict(zip(names, ("Q4_0", "Q4_0", "Q8_0", "Q4_K"), strict=True))
        | {"model.layers.1.self_attn.o_proj": "Q8_0"},
    )  # fmt: skip
    make = quantized_linears(as_stored(stored), UnquantizedLinear, make_triton_linear)
    for name in ("0.self_attn.qkv_proj", "0.self_attn.o_proj"):
        assert isinstance(make(f"model.layers.{name}"), UnquantizedLinear)
    assert isinstance(make("model.layers.1.self_attn.o_proj"), TritonQuantizedLinear)


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "tile"), [
    ("gptq-desc-act", 0), ("awq", 16), ("int-quantized", 32), ("fp8", 32), ("channel", 32),
])  # fmt: skip
def test_a_rank_has_its_part_of_the_stored_weights(case: str, tile: int, tmp_path: Path) -> None:
    """In some cases the part splits groups, or inputs are reordered."""
    if case == "awq":
        config, pack = AWQ | {"group_size": 64}, partial(awq, group_size=64)
        floats = write_quantized(tmp_path, "llama", config, pack, intermediate_size=192)
    else:
        floats = write_case(tmp_path, case, intermediate_size=192)
    directory = tmp_path / "quantized"
    whole = build(floats, torch.float32).model.layers[0].mlp.down_proj.method.weight
    kernels, generator = kernels_with_stored_weights(directory), torch.Generator().manual_seed(7)
    for rank in (0, 1):
        part = build(directory, torch.float32, kernels=kernels, shard=Shard(rank, 2))
        layer = part.model.layers[0]
        down = layer.mlp.down_proj.method
        assert isinstance(down, TritonQuantizedLinear) and down.tile == tile
        assert down.cuts_groups and not layer.mlp.gate_up_proj.method.cuts_groups
        rows = torch.randn(3, 96, generator=generator)
        expected = rows @ whole[:, 96 * rank : 96 * rank + 96].T
        torch.testing.assert_close(down.apply(rows, None), expected, rtol=0, atol=2e-5)


def test_a_rank_with_a_part_of_the_inputs_uses_float_activations(tmp_path: Path) -> None:
    """Why: a token's scale would depend on the rank's part of the inputs."""
    write_case(tmp_path, "channel")
    directory = tmp_path / "quantized"
    part = build(
        directory, torch.bfloat16, kernels=kernels_with_stored_weights(directory), shard=Shard(1, 2)
    )
    mlp = part.model.layers[0].mlp
    forms = mlp.gate_up_proj.method.form, mlp.down_proj.method.form
    assert forms == ("e4m3 by e4m3", "e4m3")


def test_quantization_without_triton_kernels_raises(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    options = {**ON_GPU, "attention_backend": "naive", "quantization": "int4"}
    with EmulatedGPU(), pytest.raises(ConfigError, match=r"require the Triton kernels: .*'naive'"):
        make_engine(str(tmp_path), **options)
