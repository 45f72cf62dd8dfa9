"""Which families use the plain model. test_limits.py checks which modules a start loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.layer_config import LayerConfig
from nanoengine.models.decoder import CausalLM
from nanoengine.models.loader import model_class
from tests.support.engines import checkpoint


@pytest.mark.parametrize(
    ("family", "overrides", "plain"),
    [
        ("llama", {"attention_bias": True}, True),
        ("qwen3", {}, True),
        ("mistral", {}, True),  # windows
        ("gemma3", {}, False),  # sandwich norms, two RoPE configurations
        ("qwen3_moe", {}, False),
        ("lfm2", {}, False),  # recurrent states
        ("granite", {}, False),  # multipliers
    ],
)
def test_configs_like_llama_or_qwen3_use_the_plain_model(family, overrides, plain):
    config = load_model_config(checkpoint(family, **overrides))
    assert (model_class(config) is CausalLM) is plain
    assert model_class(replace(config, plan=LayerConfig(hidden_act="relu2"))) is not CausalLM
