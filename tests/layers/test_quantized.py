"""Quantized linear layers: arithmetic, error bounds, and rejected options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine import ConfigError, EngineConfig
from nanoengine.build import build_engine
from nanoengine.checkpoint.quantization import (
    Quantization,
    StoredQuantization,
    resolve_quantization,
)
from nanoengine.errors import WeightLoadError
from nanoengine.kernels.code_tables import E2M1, GROUP, ROTATED
from nanoengine.layers.collectives import Shard
from nanoengine.layers.packed import PackedLinear
from nanoengine.layers.quantized import (
    QuantizedLinear,
    int4_bits,
    matmul_int8,
    quantize_activations,
)
from nanoengine.layers.quantized_weight import (
    QuantizedWeight,
    pack_pairs,
    quantize,
    quantize_rotated,
    rotate,
    unpack_pairs,
)
from nanoengine.models import loader
from nanoengine.models.loader import model_size
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run
from tests.support.model_helpers import build, cpu_kernels

CPU = torch.device("cpu")
OPTIONS = ("int8", "int4", "int8_weight_only", "int4_weight_only")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def method(
    weight: torch.Tensor, option: str, *, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    """A layer that is created and loaded as in a model, in two parts."""
    quantization = resolve_quantization(option, None, device="cpu")
    layer = cpu_kernels(dtype, quantization).linear("model.layers.0.mlp.down_proj")
    layer.create(weight.shape, dtype, CPU)
    half = weight.shape[0] // 2
    layer.load(weight[half:], half)  # parts may be loaded in any order
    layer.load(weight[:half])
    layer.finish()
    return layer


# --- weights --------------------------------------------------------------------------------------


@given(st.sampled_from([96, 32]), st.integers(0, 2**32), st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_8_bit_errors_are_at_most_half_a_step(group_size: int, seed: int, size: float) -> None:
    weight = size * random(3, 96, seed=seed)
    weight[1] = 0
    quantized = quantize(weight, 8, group_size)
    assert quantized.values.dtype == torch.int8
    assert quantized.scales.shape == (3, 96 // group_size)
    assert quantized.values.min() >= -127
    steps = quantized.scales.abs().repeat_interleave(group_size, 1)
    error = (quantized.dequantized() - weight).abs()
    # Group scales are rounded to 11 bits.
    assert (error <= steps * (0.5 + 127 * 2**-11 * (group_size < 96)) * (1 + 1e-5)).all()
    assert (quantized.dequantized()[1] == 0).all()


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """Rounding without a search: the largest magnitude per group of 32 becomes -8 (ggml's Q4_0)."""
    grouped = weight.unflatten(1, (-1, 32))
    high, low = grouped.amax(2, keepdim=True), grouped.amin(2, keepdim=True)
    scales = (torch.where(high >= -low, high, low) / -8).half().float()
    return ((grouped / scales).round().clamp(-8, 7) * scales).flatten(1)


def relative_error(found: torch.Tensor, weight: torch.Tensor) -> float:
    return float((found - weight).pow(2).sum() / weight.pow(2).sum())


@pytest.mark.parametrize("inputs", [64, 576, 896, 512])
@pytest.mark.parametrize(("bits", "max_ratio"), [(4, 0.70), (5, 0.18), (6, 0.05)])
def test_few_bits_have_smaller_errors_than_q4_0(bits: int, max_ratio: float, inputs: int) -> None:
    normal, other = random(64, inputs), random(64, inputs, seed=1)
    for weight, size in (
        (normal, 1), (normal * other.abs(), 1), (3 + normal.abs(), 1), (normal, 1e-6)
    ):  # fmt: skip
        quantized = quantize(size * weight, bits, 32)
        assert quantized.values.min() >= 0
        assert quantized.values.max() == 2**bits - 1
        assert quantized.factors is not None
        assert quantized.factors.shape == (64, -(-inputs // 256))
        found = relative_error(quantized.dequantized() / size, weight)
        assert found < max_ratio * relative_error(q4_0(weight), weight)


def test_few_bits_are_close_to_an_exhaustive_search() -> None:
    weight = random(16, 256, seed=3)
    groups = weight.view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best = torch.full((len(groups),), torch.inf)
    for shift in torch.linspace(-0.1, 0.2, 31):
        minimum = low + shift * (high - low)
        for stretch in torch.linspace(0.7, 1.1, 41):
            scale = stretch * (high - low) / 15
            codes = ((groups - minimum) / scale).round().clamp(0, 15)
            best = torch.minimum(best, (codes * scale + minimum - groups).pow(2).sum(1))
    found = (quantize(weight, 4, 32).dequantized().view(-1, 32) - groups).pow(2).sum(1)
    assert found.sum() < 1.06 * best.sum()


def test_constant_groups_are_exact_up_to_the_scale() -> None:
    for value in (0.0, 1.0, -1.0, 7.5):
        for bits in (4, 5, 6):
            found = quantize(torch.full((2, 96), value), bits, 32).dequantized()
            assert torch.allclose(found, torch.full((2, 96), value), rtol=1e-3, atol=0)


def test_errors_on_normal_weights_are_as_documented() -> None:
    weight = random(256, 512)
    for bits, error in ((4, 0.0050), (5, 0.00128), (8, 0.0000285)):
        found = quantize(weight, bits, 32).dequantized()
        assert relative_error(found, weight) == pytest.approx(error, rel=0.1)


def test_pairs_of_values_share_a_byte() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).view(2, 8)
    form = {"scales": torch.ones(2, 1), "zeros": None, "bits": 4, "group_size": 8}
    pairs = pack_pairs(QuantizedWeight(values=values, **form))
    assert pairs.dtype == torch.uint8
    assert pairs[0, 0] == 0 | (1 << 4)
    assert torch.equal(unpack_pairs(pairs), values)
    floats = torch.tensor(E2M1, dtype=torch.int8).view(2, 8)
    pairs = pack_pairs(QuantizedWeight(values=floats, **form, table=E2M1))
    assert pairs[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack_pairs(pairs, E2M1), floats)


def test_weights_are_stacked_and_split_for_ranks() -> None:
    weight = random(8, 64)
    whole = quantize(weight, 8, 32)
    cut = whole.part(slice(2, 6), slice(32, 64))
    assert torch.equal(cut.dequantized(), whole.dequantized()[2:6, 32:])
    blocks = quantize(random(8, 576), 4, 32)
    cut = blocks.part(slice(2, 6), slice(256, 576))
    assert torch.equal(cut.dequantized(), blocks.dequantized()[2:6, 256:])
    with pytest.raises(WeightLoadError, match=r"inputs 288 to 576 cut through .* groups of 256"):
        blocks.part(slice(0, 8), slice(288, 576))
    rows = quantize(weight, 8, 64)
    assert torch.equal(
        rows.part(slice(0, 8), slice(16, 40)).dequantized(), rows.dequantized()[:, 16:40]
    )
    with pytest.raises(WeightLoadError, match=r"inputs 16 to 48 cut through .* groups of 32"):
        whole.part(slice(0, 8), slice(16, 48))
    zeros = replace(whole, zeros=torch.ones_like(whole.scales))
    stacked = QuantizedWeight.stacked([whole, zeros], "x")
    assert torch.equal(stacked.dequantized(), torch.cat([whole.dequantized(), zeros.dequantized()]))
    reordered = replace(whole, order=torch.arange(64).flip(0))
    for different in (rows, reordered, quantize(weight, 8, 16)):
        with pytest.raises(WeightLoadError, match=r"fused in qkv are quantized differently"):
            QuantizedWeight.stacked([whole, different], "qkv")


# --- activations ----------------------------------------------------------------------------------


def test_each_group_of_a_row_is_quantized_independently() -> None:
    x = random(5, 48) * torch.tensor([1e-3, 1, 0, 1e6, 7.0]).unsqueeze(1)
    x[1, 40] = 1000.0
    values, scales = quantize_activations(x, 32)
    assert values.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert scales.shape == (5, 2)
    for part in (values[:, :32], values[:, 32:]):
        assert part.abs().amax(1).tolist() == [127, 127, 0, 127, 127]
    steps = scales.repeat_interleave(32, 1)[:, :48]
    assert ((values * steps - x).abs() <= steps * 0.5001).all()
    for row in range(5):
        alone = quantize_activations(x[row : row + 1, :32], 32)
        assert torch.equal(alone[0][0], values[row, :32])
        assert torch.equal(alone[1][0], scales[row, :1])


def test_ties_round_to_even() -> None:
    values, _ = quantize_activations(torch.tensor([[127.0, 0.5, 1.5, -2.5]]), 32)
    assert values.tolist() == [[127, 0, 2, -2]]


@pytest.mark.parametrize("option", OPTIONS)
def test_nan_and_infinity_stay_in_their_row(option: str) -> None:
    layer, x = method(random(16, 64), option), random(4, 64)
    expected = layer.apply(x, None)
    spoiled = x.clone()
    spoiled[1, 3], spoiled[2, 5] = torch.nan, torch.inf
    found = layer.apply(spoiled, None)
    assert not torch.isfinite(found[1:3]).any()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])


# --- the layer ------------------------------------------------------------------------------------


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Inputs [T, K] rounded to int8: rotated, rounded group by group, and rotated back."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values, scales = quantize_activations(rotate(wide), GROUP)
    back = rotate(values.double() * scales.double().repeat_interleave(GROUP, 1)) / ROTATED
    return back[:, : x.shape[1]]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_the_dequantized_weight(option: str, dtype: torch.dtype) -> None:
    weight, x, bias = random(48, 96), random(2, 5, 96, seed=1, dtype=dtype), random(48, seed=2)
    layer = method(weight, option, dtype=dtype)
    bits, group_size = (8, 96) if option.startswith("int8") else (6, 32)  # narrow, or down_proj
    rounded = quantize_rotated(weight) if option == "int8" else quantize(weight, bits, group_size)
    matrix, inputs = rounded.dequantized().double(), x.double()
    if option == "int8":
        inputs = rounded_inputs(x.flatten(0, 1)).view_as(inputs)
    elif option == "int4":
        values, scales = quantize_activations(x.flatten(0, 1), 32)
        inputs = (values.double() * scales.double().repeat_interleave(32, 1)).view_as(inputs)
    expected = inputs @ matrix.T + bias.double()
    found = layer.apply(x, bias.to(dtype))
    assert found.dtype == dtype
    assert found.shape == (2, 5, 48)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.3}[dtype]
    assert (found.double() - expected).abs().max() < tolerance
    if dtype != torch.bfloat16:
        exact = x.double() @ weight.double().T + bias.double()
        assert (found.double() - exact).abs().max() > 100 * tolerance, "nothing was quantized"


def test_a_few_large_inputs_keep_the_precision_of_the_others() -> None:
    """A few inputs of trained models are 30 times as large as the rest. With one scale per token
    and one per output, the squared error would be 34 times as large."""
    weight, x = random(64, 640), random(20, 640, seed=1)
    x[:, [5, 300]] *= 30
    exact = x.double() @ weight.double().T
    error = (method(weight, "int8").apply(x, None) - exact).square().mean() / exact.square().mean()
    assert error < 1e-4


def test_stored_weights_with_row_scales_are_rotated_for_int8_activations() -> None:
    stored = quantize(random(48, 96), 8, 96)
    x = random(5, 96, seed=1)
    for activations, max_error in (("int8", 2e-4), ("float", 1e-12)):
        layer = QuantizedLinear("x", bits=8, group_size=None, activations=activations)
        layer.create((48, 96), torch.float32, CPU)
        layer.load_quantized(stored)
        exact = x.double() @ stored.dequantized().double().T
        error = (layer.apply(x, None) - exact).square().mean() / exact.square().mean()
        assert error < max_error


@pytest.mark.parametrize("inputs", [64, 72, 640])
def test_rotated_weights_are_rounded_once(inputs: int) -> None:
    """This includes a matrix with one group, which looks like one scale per output."""
    weight = random(16, inputs)
    layer = QuantizedLinear("x", bits=8, group_size=None, activations="int8")
    layer.create((16, inputs), torch.float32, CPU)
    layer.load(weight)
    expected = quantize_rotated(weight)
    assert torch.equal(layer.values, expected.values)
    assert (expected.dequantized() - weight).abs().max() < 0.04
    assert torch.equal(expected.scales, expected.scales.bfloat16().float())
    assert expected.values.abs().amax() <= 127


@pytest.mark.parametrize("option", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_any_batch(option: str) -> None:
    layer, x = method(random(48, 320), option), random(37, 320, seed=1)
    together = layer.apply(x, None)
    for size in (1, 2, 5, 16):
        parts = [layer.apply(part, None) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)


def test_zero_points_and_the_order_of_inputs_are_applied() -> None:
    codes = torch.randint(-8, 8, (24, 96), generator=torch.Generator().manual_seed(2))
    weight = QuantizedWeight(
        values=codes.to(torch.int8), scales=random(24, 3) / 50, bits=4, group_size=32
    )
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    zeros = torch.randint(-5, 5, weight.scales.shape, generator=torch.Generator().manual_seed(1))
    weight = replace(weight, zeros=zeros.float(), order=order)
    x = random(7, 96, seed=3)
    values, scales = quantize_activations(x[:, order], 32)
    for activations, inputs in (
        ("float", x[:, order].double()),
        ("int8", values.double() * scales.double().repeat_interleave(32, 1)),
    ):
        layer = QuantizedLinear("x", bits=4, group_size=32, activations=activations)
        layer.create((24, 96), torch.float32, CPU)
        layer.load_quantized(weight)
        expected = inputs @ weight.dequantized()[:, order].double().T
        assert (layer.apply(x, None) - expected).abs().max() < 1e-5
    plain = (weight.values.double() - zeros.repeat_interleave(32, 1)) * (
        weight.scales.double().repeat_interleave(32, 1)
    )
    assert torch.allclose(weight.dequantized()[:, order].double(), plain, atol=1e-6)


def test_long_dot_products_are_exact() -> None:
    """Sums of 12,000 products of 127 exceed the integers that float32 represents exactly."""
    weight = QuantizedWeight(
        values=torch.full((1, 12_001), 127, dtype=torch.int8),
        scales=torch.ones(1, 1), zeros=None, bits=8, group_size=12_001,
    )  # fmt: skip
    x = torch.full((1, 12_001), 127.0, dtype=torch.float64)
    assert matmul_int8(x, weight).item() == 127 * 127 * 12_001


# --- the model ------------------------------------------------------------------------------------


def test_layers_get_methods_by_name_and_quantization() -> None:
    def make(name: str, quantization: Quantization | None) -> object:
        return cpu_kernels(torch.float32, quantization).linear(name)

    for option, bits in (("int8", 8), ("int4", 4)):
        quantization = resolve_quantization(option, None, device="cpu")
        inner, head = (
            make("model.layers.0.mlp.down_proj", quantization),
            make("lm_head", quantization),
        )
        assert (inner.bits, inner.group_size) == (bits, None if bits == 8 else 32)
        assert (head.bits, head.group_size) == (8, None), "the head is int8 with both options"
    assert isinstance(make("lm_head", None), PackedLinear)
    stored = StoredQuantization(format="gptq", bits=4, group_size=128, skipped=("lm_head$",))
    quantization = resolve_quantization(None, stored, device="cpu")
    assert isinstance(make("lm_head", quantization), PackedLinear)
    assert make("model.layers.3.self_attn.qkv_proj", quantization).group_size == 128


FEW_BITS = {
    "qkv_proj": [(96, 5), (32, 8)], "o_proj": [(64, 5)], "gate_up_proj": [(192, 4)],
    "down_proj": [(64, 6)],
}  # fmt: skip
"""(rows, bits) of each matrix of a layer in these checkpoints, whose hidden size is 64."""


def test_int4_has_more_bits_for_sensitive_matrices() -> None:
    for hidden, bits in ((576, (5, 8, 5, 4, 6)), (768, (4, 5, 4, 4, 5)), (4096, (4, 5, 4, 4, 5))):
        shapes = {"qkv_proj": (hidden, hidden), "v_proj": (192, hidden), "o_proj": (hidden, 2048),
                  "gate_up_proj": (3072, hidden), "down_proj": (hidden, 1536)}  # fmt: skip
        assert tuple(int4_bits(f"model.layers.0.x.{n}", *s) for n, s in shapes.items()) == bits


def test_model_size_counts_weights_and_stored_bytes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    plain, plain_bytes = model_size(build(tmp_path))
    assert plain_bytes == 4 * plain
    for option in ("int8", "int4"):
        quantization = resolve_quantization(option, None, device="cpu")
        model = build(tmp_path, kernels=cpu_kernels(torch.float32, quantization))
        count, num_bytes = model_size(model)
        assert count == plain
        rows = 2 * (128 + 64 + 2 * 96 + 64)
        if option == "int8":  # Inputs fill groups of 64 with 2-byte scales.
            layers = 2 * (64 * 128 + 64 * 64 + 2 * 64 * 96 + 64 * 128)
            scales = 2 * (rows + 2 * 64)
        else:  # 16 bytes per output and block, plus headers.
            inputs = {name: 96 if name == "down_proj" else 64 for name in FEW_BITS}
            layers = 2 * sum(n * b * inputs[i] for i, of in FEW_BITS.items() for n, b in of) // 8
            scales = 4 * rows + rows * 16 + 2 * (4 * 256 + 192)
        head = 256 * 64 + 256 * 2
        floats = 4 * (256 * 64 + 5 * 64)
        assert num_bytes == layers + scales + head + floats


def test_ranks_have_parts_of_the_quantized_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", intermediate_size=512)
    quantization = resolve_quantization("int4", None, device="cpu")
    # Why float64: its weights are not packed, so the test can read them.
    kernels = cpu_kernels(torch.float64, quantization)
    whole = build(tmp_path, torch.float64, kernels=kernels).model.layers[0]
    shard = Shard(1, 2)
    half = build(tmp_path, torch.float64, kernels=kernels, shard=shard)
    half = half.model.layers[0]
    down, cut = whole.mlp.down_proj.method, half.mlp.down_proj.method
    assert torch.equal(cut.scales, down.scales[:, 8:])
    assert torch.equal(cut.values, down.values[:, 256:])
    assert torch.equal(cut.min_factors, down.min_factors[:, 1:])
    gate_up, cut = whole.mlp.gate_up_proj.method, half.mlp.gate_up_proj.method
    assert torch.equal(cut.scales, gate_up.scales.view(2, 512, -1)[:, 256:].flatten(0, 1))


@pytest.mark.parametrize("option", OPTIONS)
def test_dummy_weights_are_quantized(option: str) -> None:
    engine = make_engine(checkpoint("llama"), load_format="dummy", quantization=option)
    (request,) = run(engine, random_prompts(1, [5]), greedy(3))
    assert len(request.sequences[0].output_token_ids) == 3
    assert engine.info.quantization is not None
    assert engine.info.quantization.startswith(option[:4])


# --- rejected options -----------------------------------------------------------------------------

STORED = StoredQuantization(format="awq", bits=4, group_size=128)
GPTQ = replace(STORED, format="gptq")
PACKED = replace(STORED, format="pack-quantized")
FROM_AWQ = Quantization(bits=4, activations="float", stored=STORED)


@pytest.mark.parametrize(
    ("option", "stored", "device", "expected"),
    [
        (None, None, "cpu", None),
        ("int4", None, "cpu", Quantization(bits=4, activations="int8")),
        ("int8_weight_only", None, "cpu", Quantization(bits=8, activations="float")),
        (None, STORED, "cpu", FROM_AWQ),
        ("int4", STORED, "cpu", replace(FROM_AWQ, activations="int8")),
        # The option may name the checkpoint's own format.
        ("awq", STORED, "cpu", FROM_AWQ),
        ("gptq", GPTQ, "cpu", replace(FROM_AWQ, stored=GPTQ)),
        ("compressed-tensors", PACKED, "cpu", replace(FROM_AWQ, stored=PACKED)),
        # A GPU uses float activations, and keeps stored weights without an option.
        (None, STORED, "cuda", None),
        ("awq", STORED, "cuda", None),
        *((o, None, "cuda", Quantization(bits=int(o[3]), activations="float")) for o in OPTIONS),
        ("int8", STORED, "cpu", r"int8.* contradicts .* int4 \(awq\): .*'int4'"),
        ("int8_weight_only", STORED, "cpu", r"int8_weight_only.* contradicts .*'int4'"),
        ("awq", GPTQ, "cpu", "'awq' contradicts .* stored as gptq"),
        ("gptq", PACKED, "cpu", "'gptq' contradicts .* stored as compressed-tensors"),
        ("compressed-tensors", None, "cpu", "'compressed-tensors' contradicts .* as floats"),
        ("int4", STORED, "cuda", r"contradicts the checkpoint, .*: remove the option$"),
    ],
)  # fmt: skip
def test_options_select_activations_and_must_match_the_checkpoint(
    option: str | None, stored: StoredQuantization | None, device: str, expected: Any
) -> None:
    if not isinstance(expected, str):
        assert resolve_quantization(option, stored, device=device) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        resolve_quantization(option, stored, device=device)


@pytest.mark.parametrize("option", ["int8", "int4", "int8_weight_only"])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_quantized_while_they_load(option: str, stacked: bool, tmp_path: Path) -> None:
    """An expert's matrices equal separately quantized ones, whether or not they are stacked."""
    make_checkpoint(tmp_path, "qwen3_moe", fused_experts=stacked)
    resolved = resolve_quantization(option, None, device="cpu")
    kernels = cpu_kernels(torch.float32, resolved)
    model, plain = build(tmp_path, kernels=kernels), build(tmp_path)
    expert, floats = (one.model.layers[0].mlp.experts.experts[5] for one in (model, plain))
    alone = kernels.linear("model.layers.0.mlp.experts.5.down_proj")
    alone.create((64, 32), torch.float32, CPU)
    alone.load(floats.down.weight.detach())
    inner = torch.randn(3, 32)
    assert torch.equal(expert.down.apply(inner, None), alone.apply(inner, None))
    exact = floats.down.apply(inner, None)
    assert 0 < (alone.apply(inner, None) - exact).abs().mean() < 0.2 * exact.abs().mean()
    assert model_size(model)[0] == model_size(plain)[0]
    assert model_size(model)[1] < 0.6 * model_size(plain)[1]


@pytest.mark.parametrize("value", ["int3", "fp4", 4, True])
def test_unknown_values_raise(value: object) -> None:
    with pytest.raises(ConfigError, match=r"quantization must be one of int8, int4, .*, None, got"):
        EngineConfig(model="m", quantization=value)  # type: ignore[arg-type]


def test_inputs_that_do_not_fill_groups_raise_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama", intermediate_size=72)
    monkeypatch.setattr(loader, "load_weights", None)
    with pytest.raises(ConfigError, match=r"a multiple of 32 inputs, and .*down_proj has 72"):
        build_engine(EngineConfig(model=str(tmp_path), device="cpu", quantization="int4"))
