"""Gemma 4: slices of the KV cache that layers share, per-layer inputs, and rejected values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.checkpoint.config import parse_model_config
from nanoengine.checkpoint.layer_config import Gemma4Config
from nanoengine.errors import ConfigError
from nanoengine.runner.kv_cache import layers_per_slice, make_groups
from nanoengine.settings.params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import all_logits, build, transformers_logits
from tests.support.model_helpers import random_prompts as plain_prompts
from tests.support.thread_ranks import thread_ranks_fixture as thread_ranks_fixture

WINDOW = 512


def plan(shared: int = 0, **shapes: tuple[int, int]) -> Gemma4Config:
    window, full = shapes["window"], shapes["full"]
    return Gemma4Config(
        shapes=(window, full), keys_are_values=False, num_kv_shared=shared, shared_mlp_factor=1,
        input_size=0,
    )  # fmt: skip


def test_layers_of_the_narrower_kind_share_a_slice() -> None:
    windows = [WINDOW, WINDOW, WINDOW, None, WINDOW, WINDOW, None]
    narrow = plan(window=(256, 1), full=(512, 1), shared=3)
    assert narrow.slices(windows) == [(0, 1), (2,), (3,)]
    wide = plan(window=(256, 8), full=(512, 2))
    assert wide.slices(windows) == [(0,), (1,), (2,), (3, 6), (4,), (5,)]
    assert [wide.layers_per_slice(window) for window in (WINDOW, None)] == [1, 2]
    alike = plan(window=(64, 2), full=(128, 1))
    assert alike.slices(windows) == [(n,) for n in range(7)]


def test_a_pool_for_the_published_shapes_wastes_no_memory() -> None:
    """The 31B model: 50 sliding-window layers, and 10 full-attention layers with half as many
    elements per token."""
    text = {
        "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024,
    }  # fmt: skip
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    config = parse_model_config(raw)
    assert (config.head_dim, config.num_key_value_heads) == (256, 16)
    groups = make_groups(config, block_size=16, dtype=torch.float32, kv_dtype=torch.float32)
    assert {len(group.layers) for group in groups} == {5}
    assert layers_per_slice(config, groups) == [1] * 10 + [2]


def test_key_tensors_of_layers_with_shared_kv_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_checkpoint(tmp_path, "gemma4")
    file, prompts = tmp_path / "model.safetensors", plain_prompts(9)
    key_tensors = {
        f"model.layers.5.self_attn.{name}.weight": torch.ones(8) for name in ("k_proj", "v_norm")
    }
    save_file(load_file(file) | key_tensors, file)
    expected = transformers_logits(reference, prompts)
    assert (all_logits(build(tmp_path), prompts) - expected).abs().max() < 1e-4
    assert "2 of its" in caplog.text


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma4", {}),
        ("gemma4", {"global_head_dim": 16, "num_kv_shared_layers": 0}),
        ("gemma4_moe", {}),
    ],
)
def test_logits_of_config_variants_match_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    fields: dict[str, Any] = {
        "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "use_double_wide_mlp": False, "attention_bias": True,
        **overrides,
    }  # fmt: skip
    reference = make_checkpoint(tmp_path, family, seed=3, **fields)
    prompts = plain_prompts(40)
    expected = transformers_logits(reference, prompts)
    assert (all_logits(build(tmp_path), prompts) - expected).abs().max() < 1e-4


def test_more_ranks_than_kv_heads_of_a_layer_raise() -> None:
    directory = checkpoint("gemma4_moe", num_global_key_value_heads=1, global_head_dim=16)
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel_size=2 must be at most 1, the smallest number of KV heads",
    ):
        make_engine(directory, device="cpu", dtype="float32", tensor_parallel_size=2)


@pytest.mark.usefixtures("thread_ranks")
def test_ranks_may_share_a_single_kv_head() -> None:
    directory = checkpoint("gemma4", num_key_value_heads=1)
    options = {"device": "cpu", "dtype": "float32", "block_size": 8, "num_kv_blocks": 30}
    prompts = random_prompts(3, (21, 5, 30))
    one = tokens(run(make_engine(directory, **options), prompts, greedy(6)))
    two = make_engine(directory, tensor_parallel_size=2, **options)
    assert tokens(run(two, prompts, greedy(6))) == one
    two.close()


def test_chunked_prompts_have_the_scores_and_tokens_of_whole_prompts() -> None:
    """Steps in which some, all or no tokens need logits."""
    prompts = random_prompts(3, (21, 5, 30))
    scored = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    plain = greedy(4)
    found = []
    for budget in (7, 256):
        engine = make_engine(
            checkpoint("gemma4"), dtype="float32", attention_backend="cpu", block_size=8,
            num_kv_blocks=60, max_num_batched_tokens=budget, max_num_seqs=4, max_model_len=64,
        )  # fmt: skip
        outputs = run(engine, prompts, [scored, plain, scored])
        scores = [
            [entry[0].logprob for entry in (output.prompt_logprobs or ()) if entry]
            for output in outputs
        ]
        found.append((tokens(outputs), scores))
    (chunked, chunked_scores), (whole, whole_scores) = found
    assert chunked == whole
    assert list(map(len, chunked_scores)) == [20, 0, 29]
    for a, b in zip(chunked_scores, whole_scores, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
