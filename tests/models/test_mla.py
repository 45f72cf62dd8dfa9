"""MLA against transformers: random sizes, quantized checkpoints, log-probabilities per token in two
dtypes, and the size of the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.checkpoint.config import load_model_config
from nanoengine.settings.params import SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import all_logits, build, transformers_logits
from tests.support.model_helpers import random_prompts as plain_prompts
from tests.support.quantized_checkpoints import (
    PROJECTIONS,
    load_dequantized_model,
    load_quantized_model,
    write_case,
)


def sizes(seed: int) -> dict[str, Any]:
    """Random config fields."""
    pick = random.Random(seed).choice
    heads, rank, query_rank = pick((1, 3, 8)), pick((8, 32, 72)), pick((None, 16, 48))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": pick((2, 16, 30)),
        "qk_rope_head_dim": pick((4, 16)),
        "v_head_dim": pick((6, 16, 34)),
        "attention_bias": pick((False, True)),
        "tie_word_embeddings": pick((False, True)),
        "hidden_size": 24 * heads,
        "rms_norm_eps": 1e-3,  # the inner norms use their default
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_logits_of_random_sizes_match_transformers(family: str, seed: int, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, family, seed=seed, **sizes(seed)).to(torch.float64)
    prompts = plain_prompts(33)
    expected = transformers_logits(reference, prompts)
    found = all_logits(build(tmp_path, torch.float64), prompts)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


STORED_SIZES = {
    "q_lora_rank": 64, "kv_lora_rank": 160, "qk_nope_head_dim": 20, "v_head_dim": 24,
    "moe_intermediate_size": 64,
    "names": (*PROJECTIONS, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
}  # fmt: skip
"""Blocks of 128 end within heads and within the dimensions that RoPE rotates."""


@pytest.mark.parametrize("case", ["fp8", "block", "gptq-desc-act", "awq", "pack-quantized-8-bit"])
def test_a_quantized_model_matches_its_float_weights(case: str, tmp_path: Path) -> None:
    floats, stored = (
        write_case(tmp_path, case, "deepseek_v3", **STORED_SIZES),
        tmp_path / "quantized",
    )
    prompts = plain_prompts(33)
    expected = all_logits(build(floats, torch.float64), prompts)
    for model in (load_quantized_model(stored), load_dequantized_model(stored)):
        assert (all_logits(model, prompts) - expected).abs().max() < 1e-9
    (prompt,) = random_prompts(1, (40,))
    fast, slow = (
        tokens(
            run(
                make_engine(str(path), dtype="float32", attention_backend=name), [prompt], greedy(8)
            )
        )
        for path, name in ((stored, "cpu"), (floats, "naive"))
    )
    assert fast == slow


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.25)])
@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_log_probabilities_of_a_prompt_match_plain_torch(
    backend: str, dtype: str, tolerance: float
) -> None:
    """Prefills in chunks with a paged cache."""
    fields = {"kv_lora_rank": 40, "q_lora_rank": 48, "v_head_dim": 16}
    directory = checkpoint("deepseek_v3", **fields)
    (prompt,) = random_prompts(1, (40,))
    options = {"attention_backend": backend, "dtype": dtype, "max_num_batched_tokens": 9}
    engine = make_engine(directory, max_num_seqs=2, block_size=8, num_kv_blocks=20, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (result,) = run(engine, [prompt], params)
    found = [next(iter(entries)).logprob for entries in result.prompt_logprobs or []]
    exact = build(Path(directory), torch.float64)
    expected = all_logits(exact, [prompt]).log_softmax(-1)[:-1]
    expected = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (torch.tensor(found, dtype=torch.float64) - expected).abs().max() < tolerance


def test_block_bytes_count_the_latent_and_the_rope_dims() -> None:
    engine = make_engine(checkpoint("deepseek_v3"), dtype="float32", block_size=8, num_kv_blocks=4)
    latent = load_model_config(checkpoint("deepseek_v3")).plan.mla
    assert latent is not None
    assert latent.size == 24 + 8
    assert engine.info.block_bytes == 8 * latent.size * 3 * 4
