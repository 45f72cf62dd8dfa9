"""gpt-oss: MXFP4 experts in the published format, and supported config values.

`test_families.py` compares its greedy tokens with transformers', from a float checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.checkpoint.config import load_model_config, parse_model_config
from nanoengine.checkpoint.quantization import Quantization, resolve_quantization
from nanoengine.errors import UnsupportedModelError, WeightLoadError
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import all_logits, build, cpu_kernels, transformers_logits
from tests.support.model_helpers import random_prompts as plain_prompts
from tests.support.quantized_checkpoints import MXFP4, make_mxfp4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("mxfp4")
    return path, make_mxfp4(path)


PROMPTS = plain_prompts(21, 1, 40)


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, torch.nn.Module]) -> torch.Tensor:
    return transformers_logits(checkpoint[1], PROMPTS)


def quantized(path: Path, option: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    quantization = resolve_quantization(option, load_model_config(path).quantization, device="cpu")
    return build(path, dtype, kernels=cpu_kernels(dtype, quantization))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mxfp4_experts_match_the_dequantized_experts_of_transformers(
    checkpoint: tuple[Path, torch.nn.Module], expected: torch.Tensor, dtype: torch.dtype
) -> None:
    """Experts stay in 4 bits, in the CPU kernels (float32) and in plain torch (float64)."""
    model = quantized(checkpoint[0], dtype=dtype)
    expert = model.model.layers[0].mlp.experts.experts[3]
    assert expert.gate_up.values.nbytes == 2 * 64 * 64 // 2
    exact = checkpoint[1].model.layers[0].mlp.experts.gate_up_proj[3].T
    weight = expert.gate_up.apply(torch.eye(64, dtype=dtype), None).T
    assert torch.equal(weight[:64], exact[0::2].to(dtype))
    assert torch.equal(weight[64:], exact[1::2].to(dtype))
    found = all_logits(quantized(checkpoint[0], dtype=dtype), PROMPTS)
    assert (found - expected).abs().max() < 1e-4


def test_mxfp4_experts_are_dequantized_without_4_bit_methods(
    checkpoint: tuple[Path, torch.nn.Module], expected: torch.Tensor
) -> None:
    """A GPU also resolves to no quantization."""
    stored = load_model_config(checkpoint[0]).quantization
    assert resolve_quantization(None, stored, device="cuda") is None
    assert (all_logits(build(checkpoint[0]), PROMPTS) - expected).abs().max() < 1e-4


def test_activations_may_be_quantized_too(
    checkpoint: tuple[Path, torch.nn.Module], expected: torch.Tensor
) -> None:
    found = all_logits(quantized(checkpoint[0], "int4"), PROMPTS)
    error = (found - expected).square().mean() / expected.square().mean()
    assert 1e-6 < error < 0.02


def test_greedy_tokens_of_an_engine_match_transformers(
    checkpoint: tuple[Path, torch.nn.Module],
) -> None:
    """Chunks of 7, a pool that is too small for all prompts, and a second run from the prefix
    cache."""
    path, model = checkpoint
    prompts, found = random_prompts(4, (26, 19, 3)), []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(6):
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            found.append([ids[len(prompt) :]])
    options = {"max_num_batched_tokens": 7, "max_num_seqs": 4, "max_model_len": 48}
    engine = make_engine(
        str(path), dtype="float32", attention_backend="cpu", block_size=8, num_kv_blocks=17,
        **options,
    )  # fmt: skip
    for _ in range(2):
        assert tokens(run(engine, prompts, greedy(6))) == found


def test_the_published_config_is_parsed() -> None:
    """The config.json of the 20B model, without its layer types; it has no dtype."""
    raw = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "quantization_config": MXFP4, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip
    config = parse_model_config(raw)
    assert (config.dtype, config.rms_norm_eps) == ("bfloat16", 1e-5)
    assert config.sliding_windows[:3] == (128, None, 128)
    (rope,) = set(config.ropes)
    assert (rope.truncate, rope.factor, rope.theta) == (False, 32.0, 150000.0)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_tok) == (32, 4)
    resolved = resolve_quantization(None, config.quantization, device="cpu")
    assert resolved == Quantization(bits=4, activations="float", stored=config.quantization)
    assert config.quantization is not None
    assert config.quantization.of("model.layers.0.mlp.experts.3.down_proj")
    assert not config.quantization.of("model.layers.0.self_attn.qkv_proj")
    absent = {key: value for key, value in raw.items() if key != "rope_scaling"}
    assert parse_model_config(absent).ropes == config.ropes


def test_mxfp4_of_another_family_raises() -> None:
    raw = {"architectures": ["MixtralForCausalLM"], "quantization_config": MXFP4}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "num_local_experts", "num_experts_per_tok")  # fmt: skip
    sizes |= dict.fromkeys(counts, 2)
    with pytest.raises(UnsupportedModelError, match="mxfp4 is not implemented for mixtral"):
        parse_model_config(raw | sizes | {"max_position_embeddings": 64})


def test_a_nan_scale_raises_with_the_tensor_name(tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, file)
    with pytest.raises(
        WeightLoadError, match=r"layers\.1\.mlp\.experts\.down_proj: a scale is 255"
    ):
        quantized(tmp_path)


def test_floats_in_place_of_mxfp4_raise(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    raw["quantization_config"] = MXFP4
    (tmp_path / "config.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(WeightLoadError, match=r"missing: .*down_proj_blocks"):
        quantized(tmp_path)
