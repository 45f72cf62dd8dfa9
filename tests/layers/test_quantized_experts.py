"""Experts in 4 and 8 bits on a GPU: kept in their stored format, multiplied by grouped GEMMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.layers.collectives import Shard
from nanoengine.layers.quantized_weight import quantize
from nanoengine.layers.triton_experts import TritonExperts, stack_weights
from nanoengine.layers.triton_quantized import TritonQuantizedLinear, make_triton_linear
from nanoengine.models.decoder import CausalLM
from nanoengine.models.moe import SparseMLP
from nanoengine.models.triton import TritonKernels
from tests.layers.test_triton_quantized import layer, random_weight
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


def write_experts(case: str, directory: Path, **overrides: Any) -> Path:
    """Writes a quantized mixture of experts, and the same model as floats; returns the former."""
    sizes = SIZES | {"mlp_only_layers": []} | overrides
    sizes |= {"head_dim": 32} if case in SMALL_FLOATS else {}
    write_case(directory, case, "qwen3_moe", **sizes)
    return directory / "quantized"


def load_on_gpu(directory: Path, **fields: Any) -> CausalLM:
    """Loads the model as an engine on a GPU does, in float32."""
    kernels = TritonKernels(DenseAttention(), dtype=torch.float32)
    kernels = stored_kernels(directory, kernels, make_triton_linear)
    return build(directory, torch.float32, kernels=kernels, **fields)


def mixture(model: CausalLM) -> SparseMLP:
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp


def rows(count: int, size: int = 128) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("case", FORMS)
def test_grouped_gemms_dequantize_stored_weights(case: str, tmp_path: Path) -> None:
    """The reference is the float64 model, one expert after the other."""
    directory = write_experts(case, tmp_path)
    mlp, floats = (
        mixture(load_on_gpu(directory)),
        mixture(build(tmp_path / "floats", torch.float64)),
    )
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


def test_experts_with_reordered_inputs_run_separately(tmp_path: Path) -> None:
    """Each expert has its own input order."""
    directory = write_experts("gptq-desc-act", tmp_path)
    mlp, floats = (
        mixture(load_on_gpu(directory)),
        mixture(build(tmp_path / "floats", torch.float64)),
    )
    assert not mlp.graph_safe and isinstance(mlp.experts.experts[3].down, TritonQuantizedLinear)
    expected = floats(rows(7).double())
    assert (mlp(rows(7)).double() - expected).abs().max() < 1e-5


def test_experts_with_and_without_zero_points_are_stacked() -> None:
    methods = [layer(random_weight("int4", 16, 64, 32, zeros)) for zeros in (False, True)]
    points = methods[1].zeros.clone()
    found = stack_weights(methods).zeros
    assert found is not None and not found[0].any() and torch.equal(found[1], points)


def test_new_weights_of_an_expert_are_written_to_the_stack() -> None:
    weights = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    methods = [layer(quantize(weights[0], 5, 32)) for _ in range(2)]
    stack, fresh = stack_weights(methods), layer(quantize(weights[1], 5, 32))
    methods[1].load(weights[1])
    for name in ("weight", "scales", "zeros"):
        assert torch.equal(getattr(stack, name)[1], getattr(fresh, name))
        assert not torch.equal(*getattr(stack, name))


def test_a_matrix_without_a_tile_size_is_dequantized(tmp_path: Path) -> None:
    """down_proj has 40 inputs, which is not a multiple of a tile of 16."""
    directory = write_experts("int-quantized", tmp_path, moe_intermediate_size=40)
    grouped, floats = (
        mixture(load_on_gpu(directory)).routed,
        build(tmp_path / "floats", torch.float64),
    )
    assert isinstance(grouped, TritonExperts)
    assert (grouped.gate_up.form.name, grouped.down.form.name) == ("int8", "")
    expected = mixture(floats)(rows(7).double())
    assert (grouped(rows(7)).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("case", "inputs"), [("fp8", 192), ("awq", 128), ("nvfp4", 64)])
def test_two_ranks_have_their_parts(case: str, inputs: int, tmp_path: Path) -> None:
    """Groups that cross a rank's boundary are split into smaller groups."""
    directory = write_experts(case, tmp_path, moe_intermediate_size=inputs)
    floats, found = mixture(build(tmp_path / "floats", torch.float64)), torch.zeros(7, 128)
    for rank in (0, 1):
        grouped = mixture(load_on_gpu(directory, shard=Shard(rank, 2))).routed
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
def test_tokens_match_float_activations_on_the_cpu(case: str, tmp_path: Path) -> None:
    """Stored formats, quantization at load, and GGUF blocks: decodes replay CUDA graphs, no step
    synchronizes, and the experts of a layer take two grouped GEMMs."""
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
        path = write_experts(case, tmp_path)
    cpu = make_engine(str(path), device="cpu", attention_backend="cpu", **options)
    expected, cpu_bytes = tokens(run(cpu, PROMPTS, greedy(5))), cpu.info.weight_bytes
    with EmulatedGPU() as gpu:
        engine = make_engine(str(path), **options | ON_GPU)
        experts = [m for m in engine.executor.model.modules() if isinstance(m, SparseMLP)]
        stacks = [stack for m in experts for stack in (m.routed.gate_up, m.routed.down)]
        assert all(stack.form.name and stack.weight.element_size() == 1 for stack in stacks)
        assert engine.info.weight_bytes < 1.3 * cpu_bytes
        del experts, stacks
        gpu.waits.clear()
        gpu.kernels.clear()
        assert tokens(run(engine, PROMPTS, greedy(5))) == expected
        assert set(gpu.waits) == {"event.synchronize, runner/transfers.py wait"}
        assert gpu.num_replayed > 0
        assert gpu.kernels["expert_gemm_kernel"] == 2 * gpu.kernels["route_kernel"] > 0
        assert case == "mxfp4" or gpu.kernels["gemm_kernel"] > 0
        engine.close()
        assert not gpu.disorder
        assert gpu.num_allocated == 0


def test_engine_info_describes_the_gemm_kernels(tmp_path: Path) -> None:
    directory = write_experts("fp8", tmp_path)
    with EmulatedGPU():
        engine = make_engine(str(directory), **SMALL | ON_GPU, enforce_eager=True)
        found = engine.info.products
        engine.close()
    assert found == (
        "2 matrices: e4m3, dequantized within a Triton GEMM",
        "2 matrices: floats, in torch",
        "16 matrices: e4m3, grouped GEMM of experts in Triton",
    )
