"""Mamba-2's rule: chunks, single tokens and the compiled call agree; what a config may say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nanoengine.attention.batch import Span
from nanoengine.checkpoint.config import load_model_config, parse_model_config
from nanoengine.errors import ConfigError, UnsupportedModelError
from nanoengine.layers.cpu_mamba import CPUMamba
from nanoengine.layers.delta_rule import CHUNK
from nanoengine.layers.mamba2 import MambaInputs, scan, step
from nanoengine.models.loader import check_ranks
from nanoengine.models.mamba import MambaMixer
from tests.layers.test_cpu_states import batch_of, wave_of
from tests.support.engines import checkpoint
from tests.support.model_helpers import make_context

HEADS, GROUPS, KEYS, VALUES = 6, 2, 8, 5
LENGTH, DTYPES = 150, (torch.float32, torch.float64)


def random_inputs(count: int) -> MambaInputs:
    torch.manual_seed(count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    x, b, c = normal(count, HEADS, VALUES), normal(count, GROUPS, KEYS), normal(count, GROUPS, KEYS)
    dt = torch.rand(count, HEADS, dtype=torch.float64)
    decay = -dt * torch.rand(HEADS, dtype=torch.float64)
    return MambaInputs(x, b, c, dt, decay, torch.randn(HEADS).double().expand(count, -1))


def test_one_token_by_the_formula():
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
def test_chunks_give_what_single_tokens_give(count, position):
    inputs = random_inputs(count)
    states = torch.randn(2, HEADS, KEYS, VALUES, dtype=torch.float64)
    first, one = states[1].clone(), torch.tensor([1])
    expected = [step(inputs.part(slice(t, t + 1)), states, one, one) for t in range(count)]
    out, last = scan(inputs, first, position)
    assert torch.allclose(out, torch.cat(expected), rtol=1e-10, atol=1e-12)
    assert torch.allclose(last, states[1], rtol=1e-10, atol=1e-12)


def test_a_prompt_cut_at_a_chunk_has_the_same_bits():
    inputs = MambaInputs(*(tensor.float() for tensor in random_inputs(3 * CHUNK)))
    zero = torch.zeros(HEADS, KEYS, VALUES)
    whole, last = scan(inputs, zero, 0)
    head, between = scan(inputs.part(slice(CHUNK)), zero, 0)
    tail, end = scan(inputs.part(slice(CHUNK, None)), between, CHUNK)
    assert torch.equal(torch.cat((head, tail)), whole)
    assert torch.equal(end, last)


def layer(dtype: torch.dtype, **other: object) -> tuple[MambaMixer, torch.Tensor]:
    """A layer whose weights are random, and its 8 states; the same numbers in any dtype."""
    config = load_model_config(checkpoint("bamba"))
    sizes = {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 7, "value_dim": 20} | other
    inner, keys = (sizes[f"num_{it}_heads"] * sizes[f"{it}_dim"] for it in ("value", "key"))
    plan = replace(config.states, **sizes, channels=inner + 2 * keys)
    torch.manual_seed(1)
    mixer = MambaMixer("layer", replace(config, states=plan), make_context(dtype))
    for parameter in mixer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    states = torch.randn(8, mixer.plan.size).to(dtype)
    mixer.bind(states)
    return mixer, states


def projected(mixer: MambaMixer, count: int) -> torch.Tensor:
    torch.manual_seed(2)
    plan = mixer.plan
    return torch.randn(count, mixer.inner + plan.channels + plan.num_value_heads)


FORMS = {
    "parts of strips": {},
    "one group, whole strips, no bias": {
        "num_key_heads": 1, "key_dim": 16, "value_dim": 64, "conv_bias": False,
    },
    "strips and a part, limits": {"value_dim": 72, "key_dim": 8, "step_limits": (0.3, 0.9)},
    "a norm before the gate, three taps": {"norm": "before", "kernel": 3},
    "no norm": {"norm": None},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_kernel_gives_what_plain_torch_gives(form):
    """Decodes, one in place; a prompt that leaves snapshots, one of them where it began; and one
    that begins, in a later wave, where another has ended."""
    first = Span(2, 100, 5, 4, ((1, 4), (70, 5), (98, 6)))
    waves = (
        wave_of(first, Span(100, 140, 0, 0, ((40, 7),)), singles=((1, 1), (2, 3))),
        wave_of(Span(140, LENGTH, 40, 7, ((10, 7),))),
    )
    (mixer, states), (plain, expected) = (layer(it, **form) for it in DTYPES)
    inputs, rows = projected(mixer, LENGTH), torch.tensor([0, 99, LENGTH - 1])
    found = CPUMamba(mixer)(inputs, batch_of(*waves), rows)
    wanted = plain.mix(inputs.double(), batch_of(*waves), rows)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(states.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 90], [64, 128], [63], [*range(1, LENGTH)]])
def test_a_token_has_the_same_bits_however_a_prompt_is_cut(cuts):
    mixer, states = layer(torch.float32, value_dim=72)
    kernel, inputs, start = CPUMamba(mixer), projected(mixer, LENGTH), states.clone()
    whole = wave_of(Span(0, LENGTH, 0, 1, ((LENGTH, 2),)))
    expected, last = kernel(inputs, batch_of(whole), None), states[2].clone()
    states.copy_(start)
    found = []
    for begin, end in pairwise([0, *cuts, LENGTH]):
        wave = wave_of(Span(0, end - begin, begin, 1, ((end - begin, 1),)))
        if end == begin + 1:
            wave = wave_of(singles=((1, 1),))
        found.append(kernel(inputs[begin:end], batch_of(wave), None))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(states[1], last)


def test_a_nan_stays_in_its_sequence():
    mixer, states = layer(torch.float32)
    inputs = projected(mixer, 40)
    inputs[3] = torch.nan
    wave = wave_of(Span(0, 20, 0, 1, ((20, 2),)), Span(20, 40, 0, 1, ((20, 3),)))
    out = CPUMamba(mixer)(inputs, batch_of(wave), None)
    assert out[:3].isfinite().all() and out[3:20].isnan().all() and out[20:].isfinite().all()
    assert states[3].isfinite().all()


def test_ranks_that_would_cut_a_group_in_two_are_refused():
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


def test_the_letters_of_a_pattern():
    config = parse_model_config(NEMOTRON)
    assert config.num_hidden_layers == 5 and config.moe is None
    assert config.attending == (3,) and config.states.layers == (0, 2)
    assert config.plan.layers_block_type == (
        "linear_attention", "mlp", "linear_attention", "full_attention", "mlp",
    )  # fmt: skip
    assert config.states.channels == 4 * 8 + 2 * 2 * 128


def test_names_of_layers_as_transformers_4_wrote_them():
    raw = {**RAW, "architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 3,
           "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8,
           "num_local_experts": 0, "position_embedding_type": "nope",
           "time_step_limit": [0.0, float("inf")]}  # fmt: skip
    config = parse_model_config(raw)
    assert config.states.layers == (0, 2) and config.attending == (1,)
    assert config.ropes == (None, None, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern='M-X\\*' must say"),
        ({"hybrid_override_pattern": "M-M"}, "no layer with attention"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern=None must say"),
        ({"n_groups": 3}, "mamba_n_heads=4 must be a multiple of mamba_n_groups=3"),
        ({"mamba_head_dim": "auto"}, "mamba_head_dim must be a size, got 'auto'"),
        ({"time_step_limit": [0.5]}, "time_step_limit must be two numbers"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit must be two numbers"),
        ({"moe_latent_size": 8}, "moe_latent_size=8 is not implemented"),
        ({"attention_bias": True}, "attention_bias=True is not implemented"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not implemented"),
        ({"residual_in_fp32": True}, "residual_in_fp32=True is not implemented"),
    ],
)
def test_what_is_refused_by_name(keys, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse_model_config(NEMOTRON | keys)
