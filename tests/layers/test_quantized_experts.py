"""Experts in 4 and 8 bits on a GPU: kept in their stored format, in one grouped product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.layers.collectives import Shard
from nanoengine.layers.quantized_weight import quantize
from nanoengine.layers.triton_experts import TritonExperts, stacked
from nanoengine.layers.triton_quantized import TritonQuantizedLinear, triton_kind
from nanoengine.models.decoder import CausalLM
from nanoengine.models.moe import SparseMLP
from nanoengine.models.triton import TritonKernels
from tests.layers.test_triton_quantized import drawn, layer
from tests.support.attention_cases import DEVICE
from tests.support.checkpoints import make_checkpoint
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import greedy, make_engine, run, tokens
from tests.support.gguf_files import make_gguf
from tests.support.model_helpers import DenseAttention, build, random_prompts
from tests.support.quantized_checkpoints import SMALL_FLOATS, make_mxfp4, stored_kernels, write_case

# Why: the interpreter takes a minute.
pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py", "nanoengine/layers/*quantized*.py", "nanoengine/layers/moe.py",
    "nanoengine/checkpoint/quantization*.py", "tests/support/emulated_gpu.py",
)  # fmt: skip

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
FORMS = {
    "fp8": ("e4m3", 64, 128), "channel": ("e4m3", 64, 128), "nvfp4": ("e2m1", 16, 16),
    "gptq": ("int4", 32, 32), "awq": ("int4", 32, 32), "pack-quantized": ("int4", 32, 32),
    "gptq-8-bit": ("int8", 32, 32), "int-quantized": ("int8", 64, 128),
}  # fmt: skip
"""Checkpoint format -> form, inputs per tile, inputs per scale."""


def stored_as(case: str, directory: Path, **overrides: Any) -> Path:
    """Writes a quantized mixture of experts and the same weights as floats; returns the former."""
    sizes = SIZES | {"mlp_only_layers": []} | overrides
    sizes |= {"head_dim": 32} if case in SMALL_FLOATS else {}
    write_case(directory, case, "qwen3_moe", **sizes)
    return directory / "quantized"


def on_gpu(directory: Path, **fields: Any) -> CausalLM:
    """The model as an engine on a GPU loads it, in float32."""
    kernels = TritonKernels(DenseAttention(), dtype=torch.float32)
    kernels = stored_kernels(directory, kernels, triton_kind)
    return build(directory, torch.float32, kernels=kernels, **fields)


def mixture(model: CausalLM) -> SparseMLP:
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp


def rows(count: int, size: int = 128) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", FORMS)
def test_a_grouped_product_widens_what_is_stored(case: str, tmp_path: Path) -> None:
    """The reference uses the same weights in float64, one expert after another."""
    directory = stored_as(case, tmp_path)
    mlp, floats = mixture(on_gpu(directory)), mixture(build(tmp_path / "floats", torch.float64))
    grouped = mlp.routed
    assert isinstance(grouped, TritonExperts)
    for stack in (grouped.gate_up, grouped.down):
        assert stack.form == FORMS[case] and stack.weight.element_size() == 1
        assert (stack.zeros is not None) == (case in ("gptq", "awq", "gptq-8-bit"))
    bits = 4 if FORMS[case][0] in ("int4", "e2m1") else 8
    assert grouped.gate_up.weight.numel() == 8 * 256 * 128 * bits // 8
    for index, expert in enumerate(mlp.experts.experts):  # nothing is stored twice
        for method, stack in ((expert.gate_up, grouped.gate_up), (expert.down, grouped.down)):
            for name in ("weight", "scales"):
                part = getattr(stack, name)[index]
                assert getattr(method, name).data_ptr() == part.data_ptr()
    for count in (1, 40):
        x = rows(count)
        expected = floats(x.double())
        assert (grouped(x).double() - expected).abs().max() < 2e-6 * expected.abs().max()
        assert (mlp.experts(x, *mlp.gate(x)).double() - expected).abs().max() < 1e-5


def test_inputs_in_another_order_are_multiplied_expert_by_expert(tmp_path: Path) -> None:
    """Each expert has its own input order."""
    directory = stored_as("gptq-desc-act", tmp_path)
    mlp, floats = mixture(on_gpu(directory)), mixture(build(tmp_path / "floats", torch.float64))
    assert not mlp.graph_safe and isinstance(mlp.experts.experts[3].down, TritonQuantizedLinear)
    expected = floats(rows(7).double())
    assert (mlp(rows(7)).double() - expected).abs().max() < 1e-5


def test_an_expert_without_zero_points_may_be_beside_one_that_has_them() -> None:
    methods = [layer(drawn("int4", 16, 64, 32, zeros)) for zeros in (False, True)]
    points = methods[1].zeros.clone()
    found = stacked(methods).zeros
    assert found is not None and not found[0].any() and torch.equal(found[1], points)


def test_new_weights_of_an_expert_come_into_the_stack() -> None:
    weights = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    methods = [layer(quantize(weights[0], 5, 32)) for _ in range(2)]
    held, fresh = stacked(methods), layer(quantize(weights[1], 5, 32))
    methods[1].load(weights[1])
    for name in ("weight", "scales", "zeros"):
        assert torch.equal(getattr(held, name)[1], getattr(fresh, name))
        assert not torch.equal(*getattr(held, name))


def test_a_matrix_without_a_tile_is_floats_beside_one_that_is_held(tmp_path: Path) -> None:
    """down_proj has 40 inputs, no multiple of a tile of 16."""
    directory = stored_as("int-quantized", tmp_path, moe_intermediate_size=40)
    grouped, floats = mixture(on_gpu(directory)).routed, build(tmp_path / "floats", torch.float64)
    assert isinstance(grouped, TritonExperts)
    assert (grouped.gate_up.form.name, grouped.down.form.name) == ("int8", "")
    expected = mixture(floats)(rows(7).double())
    assert (grouped(rows(7)).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("case", "inputs"), [("fp8", 192), ("awq", 128), ("nvfp4", 64)])
def test_two_ranks_hold_their_parts(case: str, inputs: int, tmp_path: Path) -> None:
    """Groups that cross a rank's boundary are split into smaller groups."""
    directory = stored_as(case, tmp_path, moe_intermediate_size=inputs)
    floats, found = mixture(build(tmp_path / "floats", torch.float64)), torch.zeros(7, 128)
    for rank in (0, 1):
        grouped = mixture(on_gpu(directory, shard=Shard(rank, 2))).routed
        assert isinstance(grouped, TritonExperts) and grouped.down.shape == (8, 128, inputs // 2)
        assert grouped.down.weight.element_size() == 1
        found += grouped(rows(7))
    expected = floats(rows(7).double())
    assert (found.double() - expected).abs().max() < 1e-5


# --- engines --------------------------------------------------------------------------------------

ON_GPU = {"device": "cuda", "attention_backend": "triton", "max_num_batched_tokens": 16}
SMALL = {"dtype": "float32", "max_num_seqs": 2, "num_kv_blocks": 32, "block_size": 16}
PROMPTS = random_prompts(40, 3)
"""The first prompt is prefilled in chunks, which have no logits."""


@pytest.mark.parametrize("case", ["fp8", "awq", "mxfp4", "int4", "int8", "Q4_0", "Q8_0"])
def test_tokens_are_those_of_float_activations_on_the_cpu(case: str, tmp_path: Path) -> None:
    """Stored formats, quantization at load, and GGUF blocks: decodes replay CUDA graphs, no step
    synchronizes, and the experts of a layer take two products."""
    options, path, sizes = dict(SMALL), tmp_path, SIZES | {"mlp_only_layers": []}
    if case == "mxfp4":
        make_mxfp4(path)
    elif case in ("int4", "int8"):
        make_checkpoint(path, "qwen3_moe", **sizes)
        options["quantization"] = f"{case}_weight_only"
    elif case in ("Q4_0", "Q8_0"):
        path = tmp_path / "m.gguf"
        make_gguf(path, "qwen3_moe", types=lambda name: case, **sizes)
        options["quantization"] = "gguf_weight_only"
    else:
        path = stored_as(case, tmp_path)
    cpu = make_engine(str(path), device="cpu", attention_backend="cpu", **options)
    expected, held = tokens(run(cpu, PROMPTS, greedy(5))), cpu.info.weight_bytes
    with EmulatedGPU() as gpu:
        engine = make_engine(str(path), **options | ON_GPU)
        experts = [m for m in engine.executor.model.modules() if isinstance(m, SparseMLP)]
        stacks = [one for m in experts for one in (m.routed.gate_up, m.routed.down)]
        assert all(stack.form.name and stack.weight.element_size() == 1 for stack in stacks)
        assert engine.info.weight_bytes < 1.3 * held
        del experts, stacks
        gpu.waits.clear()
        gpu.kernels.clear()
        assert tokens(run(engine, PROMPTS, greedy(5))) == expected
        assert set(gpu.waits) == {"event.synchronize, runner/transfers.py wait"}
        assert gpu.num_replayed > 0
        assert gpu.kernels["expert_gemm_kernel"] == 2 * gpu.kernels["route_kernel"] > 0
        assert case == "mxfp4" or gpu.kernels["quantized_gemm_kernel"] > 0
        engine.close()
        assert not gpu.disorder
        assert gpu.num_allocated == 0


def test_the_products_of_layers_are_named(tmp_path: Path) -> None:
    directory = stored_as("fp8", tmp_path)
    with EmulatedGPU():
        engine = make_engine(str(directory), **SMALL | ON_GPU, enforce_eager=True)
        found = engine.info.products
        engine.close()
    assert found == (
        "2 matrices: e4m3, widened in a product by Triton",
        "2 matrices: floats, by torch",
        "16 matrices: e4m3, a grouped product of experts by Triton",
    )
