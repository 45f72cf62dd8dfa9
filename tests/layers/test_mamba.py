"""Mamba-2: chunks match single tokens; unsupported config values raise."""

from __future__ import annotations

import pytest
import torch

from nanoengine.checkpoint.config import load_model_config, parse_model_config
from nanoengine.errors import ConfigError, UnsupportedModelError
from nanoengine.layers.delta_rule import CHUNK
from nanoengine.layers.mamba2 import MambaInputs, scan, step
from nanoengine.models.loader import check_ranks
from tests.support.engines import checkpoint

HEADS, GROUPS, KEYS, VALUES = 6, 2, 8, 5


def random_inputs(count: int) -> MambaInputs:
    torch.manual_seed(count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    x, b, c = normal(count, HEADS, VALUES), normal(count, GROUPS, KEYS), normal(count, GROUPS, KEYS)
    dt = torch.rand(count, HEADS, dtype=torch.float64)
    decay = -dt * torch.rand(HEADS, dtype=torch.float64)
    return MambaInputs(x, b, c, dt, decay, torch.randn(HEADS).double().expand(count, -1))


def test_a_step_computes_the_formula():
    x, b, c, dt, decay, d = inputs = random_inputs(1)
    states = torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64)
    before, one = states[1].clone(), torch.tensor([1])
    out = step(inputs, states, one, one)[0]
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        state = decay[0, h].exp() * before[h] + torch.outer(b[0, g], dt[0, h] * x[0, h])
        assert torch.allclose(states[1, h], state)
        assert torch.allclose(out[h], c[0, g] @ state + d[0, h] * x[0, h])


@pytest.mark.parametrize("count", [1, 5, CHUNK, 2 * CHUNK + 9])
@pytest.mark.parametrize("position", [0, 1, CHUNK - 1, CHUNK])
def test_chunks_match_single_tokens(count, position):
    inputs = random_inputs(count)
    states = torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64)
    first, one = states[1].clone(), torch.tensor([1])
    expected = [step(inputs.part(slice(t, t + 1)), states, one, one) for t in range(count)]
    out, last = scan(inputs, first, position)
    assert torch.allclose(out, torch.cat(expected), rtol=1e-10, atol=1e-12)
    assert torch.allclose(last, states[1], rtol=1e-10, atol=1e-12)


def test_a_prompt_split_at_a_chunk_has_the_same_bits():
    inputs = MambaInputs(*(tensor.float() for tensor in random_inputs(3 * CHUNK)))
    zero = torch.zeros(HEADS, KEYS, VALUES)
    whole, last = scan(inputs, zero, 0)
    head, between = scan(inputs.part(slice(CHUNK)), zero, 0)
    tail, end = scan(inputs.part(slice(CHUNK, None)), between, CHUNK)
    assert torch.equal(torch.cat((head, tail)), whole)
    assert torch.equal(end, last)


def test_ranks_that_split_a_group_raise():
    config = load_model_config(checkpoint("bamba", mamba_n_groups=1))
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 must divide mamba_n_groups=1"):
        check_ranks(config, 2)


RAW = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4,
    "max_position_embeddings": 64, "head_dim": 16, "num_key_value_heads": 2,
}  # fmt: skip
NEMOTRON = {**RAW, "architectures": ["NemotronHForCausalLM"], "mamba_num_heads": 4,
            "mamba_head_dim": 8, "n_groups": 2, "hybrid_override_pattern": "M-M*-",
            "num_hidden_layers": 5}  # fmt: skip


def test_a_hybrid_pattern_defines_the_layers():
    config = parse_model_config(NEMOTRON)
    assert config.num_hidden_layers == 5 and config.moe is None
    assert config.attention_layers == (3,) and config.states.layers == (0, 2)
    assert config.plan.layers_block_type == (
        "linear_attention", "mlp", "linear_attention", "full_attention", "mlp",
    )  # fmt: skip
    assert config.states.channels == 4 * 8 + 2 * 2 * 128


def test_layer_types_of_transformers_4_are_parsed():
    raw = {**RAW, "architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 3,
           "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8,
           "num_local_experts": 0, "position_embedding_type": "nope",
           "time_step_limit": [0.0, float("inf")]}  # fmt: skip
    config = parse_model_config(raw)
    assert config.states.layers == (0, 2) and config.attention_layers == (1,)
    assert config.ropes == (None, None, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern='M-X\\*' must have"),
        ({"hybrid_override_pattern": "M-M"}, "no layer with attention"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern=None must have"),
        ({"n_groups": 3}, "mamba_n_heads=4 must be a multiple of mamba_n_groups=3"),
        ({"mamba_head_dim": "auto"}, "mamba_head_dim must be an integer from 1, got 'auto'"),
        ({"time_step_limit": [0.5]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit must be two numbers"),
        ({"moe_latent_size": 8}, "moe_latent_size=8 is not implemented"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not implemented"),
        ({"residual_in_fp32": True}, "residual_in_fp32=True is not implemented"),
    ],
)
def test_unsupported_keys_are_named(keys, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse_model_config(NEMOTRON | keys)
