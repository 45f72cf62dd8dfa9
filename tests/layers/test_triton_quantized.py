"""Weights of 4 and 8 bits by the Triton product, beside the floats that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.quantization import Quantization, StoredQuantization
from nanoengine.layers.kernels import Kernels, UnquantizedLinear
from nanoengine.layers.quantized_weight import QuantizedWeight, quantize
from nanoengine.layers.triton_quantized import TritonQuantizedLinear, held_linears
from nanoengine.models.triton import TritonKernels
from tests.layers.test_quantized_formats import CASES as WHOLE_NUMBERS
from tests.layers.test_small_floats import write
from tests.support.attention_cases import DEVICE
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import greedy, make_engine, run, tokens
from tests.support.model_helpers import DenseAttention, all_logits, build, random_prompts
from tests.support.quantized_checkpoints import write_quantized


def drawn(form: str, outputs: int, inputs: int, group: int, zeros: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    if form == "e4m3":
        codes = torch.arange(outputs * inputs).view(outputs, inputs) * 37 % 254
        codes = (codes + (codes >= 127).int()).to(torch.uint8).view(torch.int8)
        scales = torch.rand(outputs, inputs // group, generator=generator) * 1e-3
        return QuantizedWeight(values=codes, scales=scales, zeros=None, bits=8, group_size=group,
                               floats=True)  # fmt: skip
    weight = quantize(floats, int(form[3]), group)
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
def test_products_are_those_by_the_floats(form: str, group: int, zeros: bool) -> None:
    weight = drawn(form, 70, 256, group, zeros)
    method, floats = layer(weight), weight.dequantized().to(DEVICE)
    assert method.weight.element_size() == 1 and method.tile
    for num_rows in (1, 19):
        x = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        bias = torch.linspace(-1, 1, 70).to(DEVICE)
        for added, wide in ((None, None), (bias, bias.double())):
            expected = F.linear(x.double(), floats.double(), wide)
            error = (method.apply(x, added).double() - expected).abs().max()
            assert error < 2e-6 * expected.abs().max()


def test_float16_rounds_a_weight_once() -> None:
    weight = drawn("int4", 40, 256, 64, True)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)
    found = layer(weight, torch.float16).apply(x, None)
    expected = F.linear(x.double(), weight.dequantized().to(DEVICE).half().double())
    assert ((found.double() - expected).abs() < 1e-3 + 2**-11 * expected.abs()).all()


def test_every_stored_byte_is_widened_to_its_number() -> None:
    codes = [code for code in range(256) if code & 127 != 127]
    values = torch.tensor([*codes, 0, 0], dtype=torch.uint8).view(torch.int8).view(16, 16)
    weight = QuantizedWeight(
        values=values, scales=torch.ones(16, 1), zeros=None, bits=8, group_size=16, floats=True
    )
    found = layer(weight).apply(torch.eye(16, device=DEVICE), None).T
    assert torch.equal(found.cpu(), values.view(torch.float8_e4m3fn).float())


def test_inputs_in_another_order_and_groups_without_a_tile() -> None:
    generator = torch.Generator().manual_seed(4)
    for size, group in ((128, 32), (120, 24)):
        order = torch.randperm(size, generator=generator)
        weight = replace(drawn("int4", 20, size, group, True), order=order)
        method = layer(weight)
        assert bool(method.tile) == (group == 32)
        x = torch.randn(3, size, generator=generator).to(DEVICE)
        expected = F.linear(x, weight.dequantized().to(DEVICE))
        torch.testing.assert_close(method.apply(x, None), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["gptq-desc-act", "awq", "pack-quantized-zeros", "int-quantized"])
def test_a_model_of_stored_whole_numbers(case: str, tmp_path: Path) -> None:
    config, pack, options = WHOLE_NUMBERS[case]
    floats = write_quantized(tmp_path, "llama", config, pack, **options)
    check(tmp_path / "quantized", floats)


def test_a_model_of_stored_small_floats(tmp_path: Path) -> None:
    floats = write(tmp_path, "fp8")
    check(tmp_path / "stored", floats)


def check(directory: Path, floats: Path) -> None:
    """Held in a byte or half of one, and the logits of the weights as floats."""
    stored = load_model_config(directory).quantization
    assert stored is not None
    kernels = Kernels(DenseAttention())
    kernels.linear = held_linears(as_stored(stored), UnquantizedLinear)
    model = build(directory, torch.float32, kernels=kernels)
    held = [m for m in model.modules() if isinstance(m, TritonQuantizedLinear)]
    assert len(held) == 8 and all(m.tile and m.weight.element_size() == 1 for m in held)
    prompts = random_prompts(9, 3)
    expected = all_logits(build(floats, torch.float64), prompts)
    assert (all_logits(model, prompts) - expected).abs().max() < 1e-4 * expected.std()


def test_the_kernel_set_of_a_gpu_holds_what_is_stored_but_experts() -> None:
    stored = StoredQuantization(format="awq", bits=4, group_size=128, skipped=("lm_head$",))
    kernels = TritonKernels(DenseAttention(), dtype=torch.bfloat16)
    kernels.hold(as_stored(stored))
    name = "model.layers.0.mlp.down_proj"
    assert isinstance(kernels.linear(name), TritonQuantizedLinear)
    for other in ("model.layers.0.mlp.experts.3.down_proj", "lm_head", "model.layers.0.mlp.gate"):
        assert isinstance(kernels.linear(other), UnquantizedLinear)
    backend = DenseAttention()
    backend.deterministic = True
    kernels = TritonKernels(backend, dtype=torch.bfloat16)
    kernels.hold(as_stored(stored))
    assert isinstance(kernels.linear(name), UnquantizedLinear)


def test_tokens_on_an_emulated_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Decodes are replays of graphs."""
    config, pack, options = WHOLE_NUMBERS["awq"]
    write_quantized(tmp_path, "llama", config, pack, **options)
    directory, prompts = str(tmp_path / "quantized"), random_prompts(9, 3)
    cpu = make_engine(directory, dtype="float32", device="cpu")
    expected = tokens(run(cpu, prompts, greedy(5)))
    on_gpu = {"device": "cuda", "attention_backend": "triton", "max_num_seqs": 2}
    with EmulatedGPU() as gpu:
        engine = make_engine(directory, dtype="float32", num_kv_blocks=32, **on_gpu)
        gpu.kernels.clear()
        assert tokens(run(engine, prompts, greedy(5))) == expected
        assert gpu.kernels["quantized_gemm_kernel"] > 0 and gpu.num_replayed > 0
        engine.close()
        assert not gpu.disorder
        assert gpu.num_allocated == 0
