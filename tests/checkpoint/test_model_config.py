"""ModelConfig: configs of transformers 4 and 5 have equal values; errors name invalid values."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_MODELS,
)

from nanoengine.checkpoint.config import (
    UnknownArchitectureError,
    load_model_config,
    parse_model_config,
)
from nanoengine.checkpoint.config_reader import SCHEMA
from nanoengine.checkpoint.families import TEXT_PARTS, every_family
from nanoengine.checkpoint.layer_config import LayerConfig, MoEConfig
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.errors import ConfigError, ModelError, UnsupportedModelError
from nanoengine.runner.sampling.greedy import MAX_VOCAB_SIZE
from tests.support.checkpoints import DATA, make_config
from tests.support.checkpoints import FAMILIES as MODELS

CONFIGS = yaml.safe_load((DATA / "configs.yaml").read_text(encoding="utf-8"))
BASE: dict[str, Any] = CONFIGS["base"]
VERSION_4: dict[str, dict[str, Any]] = CONFIGS["version_4"]
LLAMA3 = {key: n for key, n in VERSION_4["llama 3"]["rope_scaling"].items() if key != "rope_type"}
GEMMA3 = VERSION_4["gemma3"]


def raw_config(family: str) -> dict[str, Any]:
    """A config.json with all keys of the family's config class."""
    raw = make_config(family).to_dict()
    names = IMAGE_MODELS if family.endswith("_vision") else CAUSAL_MODELS
    raw["architectures"] = [names[raw["model_type"]]]
    if raw.keys() & {"layer_norm_epsilon", "norm_eps"}:
        raw.pop("rms_norm_eps", None)  # The test models set it, but the class lacks it.
    return raw


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("case", VERSION_4)
def test_configs_of_transformers_4_and_5_are_equal(case: str, tmp_path: Path) -> None:
    old, new = tmp_path / "4", tmp_path / "5"
    old.mkdir()
    write(old, "config.json", {**BASE, **VERSION_4[case]})
    AutoConfig.from_pretrained(old).save_pretrained(new)
    written = json.loads((new / "config.json").read_text(encoding="utf-8"))
    assert "rope_parameters" in written
    assert "rope_scaling" not in written
    assert "torch_dtype" not in written
    assert load_model_config(old) == load_model_config(new)


def test_values_of_a_llama_3_config() -> None:
    config = parse_model_config({**BASE, **VERSION_4["llama 3"]})
    assert config.ropes[-1] == RopeConfig(theta=500000.0, type="llama3", **LLAMA3)
    assert (config.architecture, config.head_dim, config.dtype) == (
        "LlamaForCausalLM",
        16,
        "bfloat16",
    )
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (256, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (512, 1e-5)
    assert config.sliding_windows == (None,) * 4
    assert config.plan == LayerConfig()
    assert config.moe is None


def test_a_field_with_an_unknown_value_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="norms must be one of pre, post, sandwich"):
        LayerConfig(norms="both")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="hidden_act must be one of silu, gelu_"):
        LayerConfig(hidden_act="swiglu")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="score must be one of softmax, sigmoid"):
        MoEConfig(  # type: ignore[arg-type]
            num_experts=8, num_experts_per_tok=2, intermediate_size=32, layers=(0,), score="relu"
        )


def test_layers_with_a_sliding_window() -> None:
    def windows(case: str, **overrides: Any) -> tuple[int | None, ...]:
        return parse_model_config({**BASE, **VERSION_4[case], **overrides}).sliding_windows

    assert windows("mistral") == (16,) * 4
    assert windows("mistral full") == (None,) * 4
    assert windows("qwen2") == (None,) * 4
    assert windows("qwen2 windows") == (None, None, 32, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen2 windows", layer_types=kinds) == (32, None, 32, None)
    assert windows("qwen3_moe", use_sliding_window=True, sliding_window=5) == (5,) * 4


def test_values_of_a_gemma_3_config() -> None:
    config = parse_model_config({**BASE, **VERSION_4["gemma3 linear"]})
    assert config.ropes[2] == RopeConfig(theta=1000000.0, type="linear", factor=8.0)
    assert config.ropes[0] == RopeConfig(theta=5000.0)
    assert config.sliding_windows == (512, 512, None, 512, 512, None, 512)
    assert (config.plan.hidden_act, config.plan.attention_multiplier) == (
        "gelu_pytorch_tanh",
        24**-0.5,
    )
    optional = ("rope_theta", "rope_local_base_freq", "sliding_window", "sliding_window_pattern",
                "head_dim", "query_pre_attn_scalar", "tie_word_embeddings")  # fmt: skip
    raw = {key: value for key, value in {**BASE, **GEMMA3}.items() if key not in optional}
    del raw["num_key_value_heads"], raw["max_position_embeddings"]
    absent = parse_model_config(raw)
    assert (absent.ropes[5].theta, absent.ropes[0]) == (1e6, RopeConfig(theta=1e4))
    assert absent.sliding_windows == (4096,) * 5 + (None, 4096)
    assert (absent.head_dim, absent.plan.attention_multiplier) == (256, 1 / 16)
    assert (absent.num_key_value_heads, absent.max_position_embeddings) == (4, 131_072)
    assert absent.tie_word_embeddings


def test_mixture_of_experts_layers() -> None:
    def moe(**overrides: Any) -> MoEConfig | None:
        return parse_model_config({**BASE, **VERSION_4["qwen3_moe"], **overrides}).moe

    assert moe() == MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        intermediate_size=32,
        norm_topk_prob=True,
        layers=(0, 1, 2, 3),
    )
    assert moe(mlp_only_layers=[0, 2]).layers == (1, 3)
    assert moe(decoder_sparse_step=2, mlp_only_layers=[3]).layers == (1,)


def test_yarn_extends_the_context_and_scales_attention() -> None:
    config = parse_model_config({**BASE, **VERSION_4["yarn"]})
    assert config.max_position_embeddings == 2048
    assert config.ropes[-1].attention_factor == pytest.approx(1.13862943611)  # 0.1 ln(4) + 1
    assert config.ropes[-1].original_max_position_embeddings == 512
    scaling = {"type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}
    config = parse_model_config({**BASE, "rope_scaling": scaling})
    assert config.ropes[-1].attention_factor == pytest.approx(1.27725887222 / 1.13862943611)
    assert config.ropes[-1].original_max_position_embeddings == 512
    config = parse_model_config({**BASE, "rope_scaling": {**scaling, "attention_factor": 0.5}})
    assert config.ropes[-1].attention_factor == 0.5


def test_generation_config_adds_end_tokens_and_defaults(tmp_path: Path) -> None:
    write(tmp_path, "config.json", BASE)
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    assert load_model_config(tmp_path).generation_defaults == {}
    write(
        tmp_path,
        "generation_config.json",
        {"eos_token_id": [5, 2], "temperature": 0.6, "max_new_tokens": 99, "top_p": None},
    )
    config = load_model_config(tmp_path)
    assert config.eos_token_ids == (5, 2)
    assert config.generation_defaults == {"temperature": 0.6, "max_tokens": 99}


def test_missing_keys_have_the_defaults_of_the_family() -> None:
    optional = ("rms_norm_eps", "num_key_value_heads", "torch_dtype", "eos_token_id")
    raw = {key: value for key, value in BASE.items() if key not in optional}
    config = parse_model_config(raw)
    assert (config.rms_norm_eps, config.num_key_value_heads) == (1e-6, 4)
    assert (config.dtype, config.eos_token_ids) == ("float32", ())
    assert config.ropes[-1] == RopeConfig(theta=10000.0)
    raw["num_attention_heads"] = 64
    qwen3 = parse_model_config({**raw, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_dim, qwen3.num_key_value_heads) == (128, 32)
    by_type = {**raw, "architectures": None, "model_type": "qwen2", "head_dim": 16}
    assert parse_model_config(by_type).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(("family", "keys", "message"), CONFIGS["refused"])
def test_a_key_that_changes_the_computation_is_rejected_with_its_value(
    family: str, keys: dict[str, Any], message: str
) -> None:
    raw = BASE if family == "base" else raw_config(family)
    parse_model_config(raw)
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_config({**raw, **keys})
    assert message in str(error.value)


def test_harmless_keys_are_accepted() -> None:
    harmless = {"attention_dropout": 0.1, "pretraining_tp": 2, "use_cache": False, "note": "x"}
    defaults = {"quantization_config": None, "partial_rotary_factor": 1.0, "mlp_bias": False}
    assert parse_model_config({**BASE, **harmless, **defaults}) == parse_model_config(BASE)


def test_an_unknown_architecture_raises_with_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_config({**BASE, "architectures": ["BloomForCausalLM"]})
    known = len(every_family() | dict.fromkeys(TEXT_PARTS)) - 3
    assert re.search(
        rf"'BloomForCausalLM'; supported: \w+, \w+, \w+ and {known} more$", str(error.value)
    )
    # Other values are not checked: transformers' modules may support them.
    with pytest.raises(UnknownArchitectureError, match="model_type='bloom'"):
        parse_model_config({"model_type": "bloom", "num_experts": 16384, "intermediate_size": [1]})


def test_a_directory_without_a_valid_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model_config(tmp_path)
    write(tmp_path, "config.json", [1])
    with pytest.raises(ModelError, match="JSON object, got list"):
        load_model_config(tmp_path)


# --- invalid values -------------------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        (key, {**VERSION_4["qwen3_moe"], key: value}, words)
        for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
            "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
        )
        for value, words in (
            (2**63, "from"), (-1, "from"), (0, "from"), ("8", "an integer"), (True, "an integer"),
        )
    ),
    ("rope_theta", {"rope_theta": 10**400}, "a finite number"),
    *CONFIGS["wrong"],
]  # fmt: skip
"""Key, changed keys of the config, and what is allowed according to the message."""


@pytest.mark.parametrize(("key", "change", "allowed"), WRONG)
def test_an_impossible_value_is_rejected_with_its_key_and_what_is_allowed(
    key: str, change: dict[str, Any], allowed: str
) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_config({**BASE, **change})
    message = str(error.value)
    assert key in message and allowed in message
    assert len(message) < 500


WRONG_GENERATION: dict[str, tuple[Any, str]] = {
    "eos_token_id: a float": (2.5, "an integer or a list"),
    "eos_token_id[0]": ([[2]], "an integer"),
    "temperature": ("hot", "a finite number"),
    "top_p": (float("nan"), "a finite number"),
    "top_k": (5.5, "an integer"),
    "min_p": (7.0, "min_p"),
    "max_new_tokens": (0, "max_tokens"),
    "repetition_penalty": ([1.0], "a finite number"),
}


@pytest.mark.parametrize("key", WRONG_GENERATION)
def test_types_and_ranges_in_a_generation_config_are_checked(key: str) -> None:
    value, allowed = WRONG_GENERATION[key]
    name = key.partition(":")[0].partition("[")[0]
    with pytest.raises(UnsupportedModelError) as error:
        parse_model_config(BASE, {name: value})
    assert f"generation_config.json: {name}" in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_is_not_a_file_or_is_nested_too_deeply_is_rejected(
    name: str, tmp_path: Path
) -> None:
    write(tmp_path, "config.json", BASE)
    write(tmp_path, "generation_config.json", {})
    file = tmp_path / name
    file.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(ModelError, match=f"{name} is nested too deeply"):
        load_model_config(tmp_path)
    file.write_text('{"vocab_size": ' + "[" * 200_000, encoding="utf-8")
    with pytest.raises(ModelError, match=f"{name} is nested too deeply"):
        load_model_config(tmp_path)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match=f"{name} is not valid JSON"):
        load_model_config(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        load_model_config(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        load_model_config(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        load_model_config(tmp_path)


def test_the_largest_vocabulary_equals_the_limit_of_the_sampler() -> None:
    assert SCHEMA["vocab_size"].maximum == MAX_VOCAB_SIZE


# --- unused keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MODELS)
def test_every_key_of_transformers_is_read_rejected_or_harmless(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = raw_config(family)
    caplog.clear()
    parse_model_config(raw)
    assert caplog.messages == []


def test_a_warning_names_unknown_keys(caplog: pytest.LogCaptureFixture) -> None:
    """A model with new computations may use an existing architecture name."""
    parse_model_config({**BASE, "mixes_heads": True, "unsloth_fixed": None})
    assert caplog.messages == ["config.json has unknown keys, which are ignored: 'mixes_heads'"]


def test_private_attributes_of_transformers_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    private = {
        "_model_name_or_path": "a",
        "_attn_implementation": "sdpa",
        "task_specific_params": {},
    }
    parse_model_config({**BASE, **private})
    assert caplog.messages == []


def test_an_unknown_architecture_raises_with_the_most_similar_ones() -> None:
    name = "Qwen3OmniForConditionalGeneration"
    with pytest.raises(UnsupportedModelError, match=r"supported: Qwen3.* more$") as error:
        parse_model_config({**BASE, "architectures": [name, *(["x" * 10_000] * 100)]})
    assert len(str(error.value)) < 4_000
