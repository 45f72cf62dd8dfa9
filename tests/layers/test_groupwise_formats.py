"""Models whose matrices have different quantization formats, as in GGUF files: fused layers,
experts, and a quantized embedding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.kernels.cpu_groupwise import PARTS
from nanoengine.layers.cpu_experts import CPUExperts
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.embedding import Embedding, OutputHead
from nanoengine.layers.quantized import QuantizedLinear
from tests.layers.test_cpu_experts import check
from tests.layers.test_fused_layers import load, outputs, outputs_of_separate_steps
from tests.support.checkpoints import make_checkpoint
from tests.support.groupwise_weights import make_weight
from tests.support.model_helpers import build, cpu_kernels, make_context

SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}


def form_of(name: str, first: int) -> str:
    """The format of a layer's rows from `first` on, as in Q4_K_M: more bits for v and for the down
    projection of some layers."""
    if "experts" in name:
        return "Q6_K" if "down" in name else "Q4_K"
    is_second = ".1." in name
    if "qkv" in name:
        return ("Q6_K" if is_second else "Q5_K") if first >= 192 else "Q4_K"
    return "Q6_K" if (is_second and "down" in name) or name == "lm_head" else "Q4_K"


def load_several_formats(
    self: QuantizedLinear, weight: torch.Tensor, first: int = 0, bits: int | None = None
) -> None:
    """Replaces `QuantizedLinear.load`: rows of small seeded random values. A tied head keeps the
    checkpoint's embedding."""
    rows, inputs = weight.shape
    if self.tied is not None:
        self.tied[first : first + rows] = weight
    if "experts" in self.name:
        rows = len(weight) // 2
    for start in range(0, len(weight), rows):
        quantized = make_weight(form_of(self.name, first + start), rows, inputs, seed=first + start)
        self.load_quantized(quantized, first + start)


def test_fused_layers_with_several_formats_are_one_call(tmp_path: Path, monkeypatch) -> None:
    make_checkpoint(tmp_path, "qwen2", **SIZES)
    monkeypatch.setattr(CPUQuantizedLinear, "load", load_several_formats)
    with load(tmp_path, quantization="int4") as llm:
        decoder = llm.engine.executor.model.model
        (layers,) = decoder.executed_layers
        qkv = decoder.layers[1].self_attn.qkv_proj.method
        assert int(qkv.values.view(torch.int64)[PARTS]) == 2
        fused = outputs(llm)
        assert [len(call.operands) for call in layers._calls] == [2]
        assert fused == outputs_of_separate_steps(llm)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_group_wise_quantized_experts_are_one_call(
    tmp_path: Path, activations, monkeypatch
) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    monkeypatch.setattr(CPUQuantizedLinear, "load", load_several_formats)
    kernels = cpu_kernels(torch.float32, Quantization(bits=4, activations="int8"))
    make_linear = kernels.linear

    def linear(name: str) -> QuantizedLinear:
        method = make_linear(name)
        if isinstance(method, CPUQuantizedLinear):
            method.activations = activations
        return method

    kernels.linear = linear
    model = build(tmp_path, kernels=kernels)
    mlp = next(layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "routed"))
    assert isinstance(mlp.routed, CPUExperts)
    check(mlp, 1, 256)
    check(mlp, 33, 256)


@dataclass
class Stored:
    """A stored format without tensors."""

    def matrix_slots(self, *_: object) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("kind", [QuantizedLinear, CPUQuantizedLinear])
def test_a_quantized_embedding_and_its_tied_head_share_one_weight(kind) -> None:
    context = make_context()

    def linear(name: str) -> QuantizedLinear:
        return kind(name, bits=6, group_size=16, activations="float", stored=Stored())

    context.kernels.linear = context.kernels.embedding = linear
    embedding = Embedding(100, 256, context=context)
    head = OutputHead("lm_head", embedding, tied=True, context=context)
    assert not list(embedding.parameters())
    weight = make_weight("Q6_K", 100, 256)
    embedding.method.load_quantized(weight.part(slice(0, 64)))
    embedding.method.load_quantized(weight.part(slice(64, 100)), 64)
    ids, floats = torch.tensor([99, 3, 3, 64]), weight.dequantized()
    assert torch.equal(embedding(ids), floats[ids])
    hidden = torch.randn(3, 256)
    expected = hidden @ floats.T
    assert (head(hidden) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert list(embedding.weight_slots("model.embed_tokens")) == ["model.embed_tokens.weight"]
    assert head.weight_slots("lm_head") == {}
