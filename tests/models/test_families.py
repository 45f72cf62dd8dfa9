"""Every model family: greedy tokens of a tiny checkpoint match transformers, with prefix caching,
chunked prefill and a pool that is too small for all prompts."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoengine.checkpoint import families
from nanoengine.checkpoint.config import load_model_config, parse_model_config
from nanoengine.checkpoint.families import every_family
from nanoengine.checkpoint.layer_config import LayerConfig
from nanoengine.errors import UnsupportedModelError, WeightLoadError
from nanoengine.layers.layouts import head_order
from tests.support.checkpoints import (
    EVERY,
    FAMILIES,
    MODELS,
    TEXT_PARTS,
    make_checkpoint,
    make_config,
    make_model,
)
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import all_logits, build, transformers_logits
from tests.support.model_helpers import random_prompts as plain_prompts

PROMPTS = random_prompts(4, (26, 19, 3, 26))
PROMPTS[3] = PROMPTS[0][:17] + PROMPTS[3][17:]  # two prompts share a prefix
NUM_TOKENS = 8

CASES = {family: (family, {}) for family in FAMILIES} | MODELS["variants"]
RARELY_RUN = {
    "ernie4_5_moe all", "gemma4_unified",
    "granitemoeshared", "hunyuan_moe", "hy_v3",
}  # fmt: skip
"""Cases with no mechanism of their own. They run only when model code changes."""
MODEL_CODE = ("nanoengine/checkpoint/**/*.py", "nanoengine/models/*.py", "nanoengine/layers/*.py")
MARKED_CASES = [
    pytest.param(case, marks=[pytest.mark.guards(*MODEL_CODE)] if case in RARELY_RUN else [])
    for case in CASES
]


@functools.cache
def expected_tokens(case: str) -> list[list[list[int]]]:
    """Per prompt, the most likely token of transformers in float64 at each position of the engine's
    output. If the output equals these tokens, it is the greedy one.

    Why not generate: one forward pass per token took a third of this file's time.
    """
    family, overrides = CASES[case]
    model, found = make_model(family, **overrides).to(torch.float64), []
    with torch.inference_mode():
        for prompt, (output,) in zip(PROMPTS, engine_tokens(case), strict=True):
            ids = torch.tensor([[*prompt, *output[:-1]]])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 :]
            found.append([logits.argmax(-1).tolist()])
    return found


@functools.cache
def directory(case: str) -> str:
    """The checkpoint of a case, written once per test run."""
    family, overrides = CASES[case]
    if not overrides:
        return checkpoint(family)
    path = Path(checkpoint(family)).with_name(case.replace(" ", "-"))
    make_checkpoint(path, family, **overrides)
    return str(path)


@functools.cache
def engine_tokens(case: str, **options: Any) -> list[list[list[int]]]:
    """Tokens of an engine with chunks of 7 and a pool that is too small for all prompts.

    The prompts run twice, the second time from the prefix cache.
    """
    windows = set(load_model_config(directory(case)).sliding_windows)
    options |= {"max_num_batched_tokens": 7, "max_num_seqs": 4, "max_model_len": 48}
    options |= {"block_size": 8, "num_kv_blocks": 11 if len(windows) == 1 else 17}
    engine = make_engine(directory(case), **options)
    first = tokens(run(engine, PROMPTS, greedy(NUM_TOKENS)))
    again = run(engine, PROMPTS, greedy(NUM_TOKENS))
    assert first == tokens(again)
    return first


@pytest.mark.parametrize("case", MARKED_CASES)
def test_greedy_tokens_match_transformers(case: str) -> None:
    assert len({token for (ids,) in expected_tokens(case) for token in ids}) > 3
    assert engine_tokens(case) == expected_tokens(case)


@pytest.mark.parametrize("case", MARKED_CASES)
def test_greedy_tokens_of_cpu_kernels_match(case: str) -> None:
    found = engine_tokens(case, dtype="float32", attention_backend="cpu")
    assert found == expected_tokens(case)


@pytest.mark.guards("nanoengine/*/triton*.py", "nanoengine/models/*.py", "nanoengine/layers/*.py")
@pytest.mark.parametrize("family", ["gemma2", "glm4_moe", "gpt_oss", "hunyuan", "olmo2", "phi3"])
def test_greedy_tokens_in_the_triton_interpreter_match(family: str) -> None:
    options = {"dtype": "float32", "attention_backend": "triton", "max_num_seqs": 4}
    engine = make_engine(directory(family), block_size=16, num_kv_blocks=20, **options)
    found = tokens(run(engine, PROMPTS[1:3], greedy(3)))
    assert found == [[ids[:3]] for (ids,) in expected_tokens(family)[1:3]]


def test_every_family_has_a_case() -> None:
    architectures = {load_model_config(checkpoint(name)).architecture for name in FAMILIES}
    assert architectures == set(every_family())
    written = [json.loads((Path(checkpoint(name)) / "config.json").read_text("utf-8"))
               for name in FAMILIES]  # fmt: skip
    named = {raw["architectures"][0] for raw in written}
    assert set(every_family()) <= named


@pytest.mark.guards(*MODEL_CODE)
@pytest.mark.parametrize("name", TEXT_PARTS)
def test_text_parts_of_multimodal_checkpoints_match_transformers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits, because a factor on them would not change greedy tokens."""
    reference = make_checkpoint(tmp_path, name)
    prompts = plain_prompts(30)
    expected = transformers_logits(reference, prompts)
    assert (all_logits(build(tmp_path), prompts) - expected).abs().max() < 1e-4
    assert "only a part of this checkpoint is used" in caplog.text


def test_every_text_part_has_a_case() -> None:
    names = [name for name in EVERY if name.endswith("_vision")]
    found = {
        transformers.AutoModelForMultimodalLM._model_mapping[type(make_config(name))].__name__
        for name in names
    }
    assert found == families.TEXT_PARTS


def test_older_multimodal_configs_have_other_keys() -> None:
    """Qwen-VL had all keys outside of text_config; LLaVA omits sizes that its config class has."""
    raw = make_config("qwen2_5_vl_vision").to_dict()
    raw |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    text = raw.pop("text_config")
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 10000.0}
    flat = text | rope | raw
    del flat["rope_parameters"]
    assert parse_model_config(flat) == parse_model_config(raw | {"text_config": text})
    text = {"model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5}
    names = ["LlavaForConditionalGeneration"]
    config = parse_model_config({"architectures": names, "text_config": text})
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 32, 32064)
    with pytest.raises(UnsupportedModelError, match=r"text_config is not valid: .*hidden_size"):
        parse_model_config({"architectures": names, "text_config": text | {"hidden_size": "x"}})


# --- RoPE -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "interleaved", "expected"),
    [
        (None, False, None),
        (4, False, [0, 1, 4, 5, 2, 3, 6, 7]),
        (None, True, [0, 2, 4, 6, 1, 3, 5, 7]),
        (4, True, [0, 2, 4, 5, 1, 3, 6, 7]),
    ],
)
def test_head_order_gives_the_dimensions_of_the_checkpoint(
    size: int | None, interleaved: bool, expected: Sequence[int] | None
) -> None:
    plan = LayerConfig(rotary_dim=size, rope_interleaved=interleaved)
    config = load_model_config(checkpoint("llama", head_dim=8))
    order = head_order(replace(config, plan=plan))
    assert (None if order is None else order.tolist()) == expected


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.0, 4.0, 8.0],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(("length", "max_positions"), [(30, 32), (40, 64)])
def test_max_positions_select_the_longrope_factors(
    length: int, max_positions: int, tmp_path: Path
) -> None:
    fields = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}
    reference = make_checkpoint(tmp_path, "phi3", **fields)
    prompts = plain_prompts(length)
    expected = transformers_logits(reference, prompts)
    got = all_logits(build(tmp_path, max_positions=max_positions), prompts)
    assert (got - expected).abs().max() < 1e-4
    if length <= 32:
        longer = all_logits(build(tmp_path, max_positions=64), prompts)
        assert (longer - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
         "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_keys_next_to_layer_types_in_rope_parameters_are_ignored_with_a_warning(
    rope: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers ignores these keys too, and writes both forms."""
    reference = make_checkpoint(tmp_path, "olmo3", rope_parameters=dict(rope))
    file, prompts = tmp_path / "config.json", plain_prompts(40)
    expected = transformers_logits(reference, prompts)
    raw = json.loads(file.read_text("utf-8"))
    assert raw["rope_parameters"].keys() > {*rope, "full_attention"}
    for written in (raw["rope_parameters"], rope):
        file.write_text(json.dumps(raw | {"rope_parameters": written}), "utf-8")
        caplog.clear()
        assert (all_logits(build(tmp_path), prompts) - expected).abs().max() < 1e-4
        assert "ignored: 'rope_parameters.factor'" in caplog.text or "factor" not in rope
        assert "'rope_parameters.rope_theta', 'rope_parameters.rope_type'" in caplog.text


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_tensor_names_may_have_another_prefix(prefix: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."
    renamed = {
        name.replace("model.", prefix, 1).replace("lm_head.", head): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    prompts = plain_prompts(9)
    expected = transformers_logits(reference, prompts)
    assert (all_logits(build(tmp_path), prompts) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", families.ALIASES)
def test_architectures_may_have_their_published_names(name: str, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [name]}), "utf-8")
    assert load_model_config(tmp_path) == load_model_config(checkpoint("llama"))


def test_tensors_of_a_vision_tower_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        build(Path(checkpoint("gemma3_vision")))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "only a part of this checkpoint is used" in message
    assert "34 of its 75 tensors are ignored (multi_modal_projector., vision_tower.)" in message


def test_layers_for_multi_token_prediction_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(4, 8)}, file)
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    build(tmp_path)
    assert "1 of its" in caplog.text
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(WeightLoadError, match=r"unexpected: model\.layers\.3\.eh_proj"):
        build(tmp_path)


def test_a_gemma_3_text_config_may_omit_class_defaults() -> None:
    """Published configs of the 4B model contain five sizes only."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = parse_model_config(raw)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.tie_word_embeddings) == (262_208, True)
    assert config.sliding_windows[:6] == (1024,) * 5 + (None,)
    assert [rope.factor for rope in config.ropes[:6]] == [1.0] * 5 + [8.0]


def test_null_disables_the_soft_caps_of_gemma_2(tmp_path: Path) -> None:
    """If the keys are absent, the config class has other defaults."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    reference = make_checkpoint(tmp_path, "gemma2", **dict.fromkeys(caps))
    raw, prompts = json.loads((tmp_path / "config.json").read_text("utf-8")), plain_prompts(40)
    assert [raw[key] for key in caps] == [None, None]
    expected = transformers_logits(reference, prompts)
    assert (all_logits(build(tmp_path), prompts) - expected).abs().max() < 1e-4
