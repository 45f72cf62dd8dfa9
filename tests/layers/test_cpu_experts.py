"""A mixture of experts as one compiled call, against its separate steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.kernels import cpu_experts as kernels
from nanoengine.layers.cpu_experts import CPUExperts
from nanoengine.models.cpu import CPUKernels
from nanoengine.models.moe import SparseMLP
from tests.support.checkpoints import make_checkpoint, make_model
from tests.support.engines import checkpoint
from tests.support.model_helpers import DenseAttention, build, cpu_kernels

FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe", "minimax_m2", "qwen3_next")
"""In this order: softmax normalized by the sum; biases and a clamped gate; sigmoids, groups, a
correction bias, a scaling factor and a shared expert; sigmoids without groups; a shared expert with
a gate."""
QUANTIZATIONS = {
    "int8": Quantization(bits=8, activations="int8"),
    "int4": Quantization(bits=4, activations="int8"),
    "int8 weight only": Quantization(bits=8, activations="float"),
    "int4 weight only": Quantization(bits=4, activations="float"),
}


def mixture(directory: str | Path, weights: str = "float32") -> SparseMLP:
    """The fused mixture of experts in a checkpoint's last layer."""
    kept = weights in ("bfloat16", "16 bits")
    kernels = cpu_kernels(torch.float32, QUANTIZATIONS.get(weights))
    if weights == "bfloat16":
        kernels = CPUKernels(DenseAttention(), dtype=torch.bfloat16)
    fields = {"weight_dtype": torch.bfloat16, "keeps_weights": False} if kept else {}
    model = build(Path(directory), kernels=kernels, **fields)
    mlp = model.model.layers[-1].mlp
    assert isinstance(mlp, SparseMLP)
    assert isinstance(mlp.routed, CPUExperts)
    return mlp


def check(mlp: SparseMLP, tokens: int, size: int = 64) -> None:
    """The call must match the separate steps, and each token must have the same bits alone."""
    x = torch.randn(tokens, size, generator=torch.Generator().manual_seed(tokens))
    found, expected = mlp(x), separate_steps(mlp, x)
    atol = 2e-6 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=atol)
    for t in {0, tokens // 2, tokens - 1}:
        assert torch.equal(mlp(x[t : t + 1])[0], found[t]), "other bits alone"


def separate_steps(mlp: SparseMLP, x: torch.Tensor) -> torch.Tensor:
    fused, mlp.routed = mlp.routed, mlp._sequential_experts
    found = mlp(x)
    mlp.routed = fused
    return found


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_matches_the_separate_steps(family: str, tokens: int) -> None:
    check(mixture(checkpoint(family)), tokens)


@pytest.mark.parametrize("weights", [*QUANTIZATIONS, "bfloat16", "16 bits"])
def test_every_weight_format_matches_the_separate_steps(weights: str) -> None:
    mlp = mixture(checkpoint("gpt_oss"), weights)
    check(mlp, 1)
    check(mlp, 33)


@pytest.mark.parametrize("tokens", [kernels.MAX_ROWS // 2 + 100, 4 * kernels.MAX_ROWS])
def test_more_rows_than_a_chunk_match_the_separate_steps(tokens: int) -> None:
    """Chunks of whole experts, and experts with more rows than a chunk."""
    mlp = mixture(checkpoint("qwen3_moe"))  # two rows per token
    check(mlp, tokens)


def test_experts_in_one_call_have_the_bits_of_separate_experts() -> None:
    """With equal router scores, the results are equal."""
    mlp = mixture(checkpoint("gpt_oss"))
    x, (weights, ids) = torch.randn(40, 64), mlp.gate(torch.randn(40, 64))
    out = np.zeros((40, 64), np.float32)
    gate_up, down, sizes, _ = mlp.routed.arguments[3:]
    kernels.add_experts(
        x.numpy(), ids.numpy(), weights.numpy(), gate_up, down, sizes[0], *sizes[2:], out, 2
    )
    assert np.array_equal(out, mlp.experts(x, weights, ids).numpy())


@pytest.mark.parametrize("family", FAMILIES)
def test_routing_selects_the_same_experts(family: str) -> None:
    mlp = mixture(checkpoint(family))
    moe, x = mlp.gate.moe, torch.randn(300, 64)
    logits = mlp.gate.method.apply(x, mlp.gate.bias).numpy()
    ids = np.empty((300, moe.num_experts_per_tok), np.int64)
    weights = np.empty(ids.shape, np.float32)
    kernels.route(logits, *mlp.routed.arguments[1:3], ids, weights, 2)
    expected, experts = mlp.gate(x)
    found = torch.from_numpy(weights), torch.from_numpy(ids)
    order, expected_order = (each.argsort(1) for each in (found[1], experts))
    assert torch.equal(found[1].gather(1, order), experts.gather(1, expected_order))
    torch.testing.assert_close(
        found[0].gather(1, order), expected.gather(1, expected_order), rtol=1e-5, atol=1e-7
    )


def test_nan_stays_in_its_row() -> None:
    mlp = mixture(checkpoint("qwen3_moe"))
    x = torch.randn(6, 64)
    clean = mlp.routed(x)
    x[2, 5] = torch.nan
    found = mlp.routed(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])


def test_experts_without_whole_panels_run_separately(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", moe_intermediate_size=36)
    mlp = build(tmp_path, kernels=cpu_kernels()).model.layers[-1].mlp
    assert not isinstance(mlp.routed, CPUExperts)
    x = torch.randn(9, 64)
    assert torch.equal(mlp.routed(x), mlp.experts(x, *mlp.gate(x)))


def small_sums(family: str, gate: torch.nn.Module) -> None:
    """Changes a transformers router so that the sum of the selected scores is close to the epsilon
    that the family adds to it, or to its lower bound."""
    with torch.no_grad():
        if family == "ernie4_5_moe":  # expert 0 has nearly all the weight, others are selected
            gate.weight.mul_(0.1)[0].fill_(28 / 51)  # 64 inputs, 0.8 each
            bias = gate.moe_statics.e_score_correction_bias
            bias.copy_(torch.arange(bias.numel()).view_as(bias) * 2)
        else:
            logit = {"lfm2_moe": -14, "glm4_moe": -46}[family]
            gate.weight.mul_(0.1).add_(logit / 51)


@pytest.mark.parametrize("family", ["lfm2_moe", "glm4_moe", "ernie4_5_moe"])
def test_tiny_sums_of_scores_match_transformers(family: str, tmp_path: Path) -> None:
    """LFM2 and GLM add an epsilon to the sum of scores; ERNIE clamps the sum to a minimum."""
    model = make_model(family)
    block = [m for m in model.modules() if type(m).__name__.endswith(("MoeBlock", "MoeMoE", "MoE"))]
    small_sums(family, block[-1].gate)
    model.save_pretrained(tmp_path)
    x = torch.randn(20, 64).abs()
    with torch.no_grad():
        expected = block[-1](x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    mlp = mixture(tmp_path)
    sums = mlp.gate(x)[0].sum(1) / mlp.gate.moe.scaling_factor
    assert 0.1 < sums.mean() < 0.9, "sums must be about as large as the epsilon"
    atol = 1e-4 * expected.abs().max().item()  # the precision of logits near -46
    for found in (mlp(x), separate_steps(mlp, x)):
        torch.testing.assert_close(found, expected.view(20, 64), rtol=1e-4, atol=atol)
