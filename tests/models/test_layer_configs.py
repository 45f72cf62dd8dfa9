"""Models with random sizes and options: tokens of an engine with chunks and a small pool match
transformers, whose modules compute the model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.engines import greedy, make_engine, random_prompts, run, tokens

FULL, SLIDING = "full_attention", "sliding_attention"
SIZE_KEYS = {
    "opt": "ffn_dim", "gpt2": "n_inner", "gpt_bigcode": "n_inner",
    "gptj": "n_inner",
}  # fmt: skip
"""Family -> its key for the intermediate size, unless it is "intermediate_size"."""
GROUPED = ("exaone", "granite_swa", "granitemoe_swa", "nanochat", "olmo")
ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"]
PROMPTS = random_prompts(7, (26, 3, 19))

pytestmark = pytest.mark.guards(
    "nanoengine/checkpoint/**/*.py", "nanoengine/models/*.py", "nanoengine/layers/*.py"
)


def random_overrides(family: str, seed: int) -> dict[str, Any]:
    """Random config keys of a family; the seed determines their values."""
    draw = random.Random(f"{family} {seed}")
    heads, size, layers = draw.choice((2, 3, 4, 6)), draw.choice((8, 16, 24)), draw.randint(1, 3)
    kv_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    intermediate_size = draw.choice((40, 96, 130))
    flags = [draw.random() < 0.5 for _ in range(8)]
    found: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if family in GROUPED else heads,
        "hidden_size": heads * size,
        "num_hidden_layers": layers,
        "tie_word_embeddings": flags[0] and family != "gptj",  # its head has biases
        "max_position_embeddings": draw.choice((64, 100)),
        SIZE_KEYS.get(family, "intermediate_size"): intermediate_size,
        "intermediate_size": intermediate_size,
    }
    if family in ("exaone", "gpt_neox", "granite_swa", "nanochat", "olmo"):
        found["attention_bias"] = flags[1]
    if family in ("exaone", "granite_swa"):
        found["mlp_bias"] = flags[2]
    if family in ("granite_swa", "granitemoe_swa"):
        found |= {
            "sliding_window": draw.choice((3, 16)),
            "layer_types": [draw.choice((FULL, SLIDING)) for _ in range(layers)],
            "layer_rope_theta": [draw.choice((0, 50.0, 1e4)) for _ in range(layers)],
            "embedding_multiplier": draw.choice((1.0, 3.0)),
        }
    if family == "gpt_bigcode":
        found["num_key_value_heads"] = 1
    if family == "gpt_neox":
        found |= {"use_parallel_residual": flags[3], "rotary_pct": draw.choice((0.25, 0.5, 1.0))}
    if family == "gptj":
        found["rotary_dim"] = draw.choice((2, 4, size))
    if family == "opt":
        found["enable_bias"] = flags[3]
    if family in ("gpt2", "gptj", "opt"):
        found["activation_function"] = draw.choice(ACTIVATIONS)
    if family == "nanochat":
        found["final_logit_softcapping"] = draw.choice((None, 5.0))
    if family == "olmo":
        found["clip_qkv"] = draw.choice((None, 0.3))
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", [*GROUPED, *SIZE_KEYS, "gpt_neox"])
def test_tokens_match_transformers(family: str, seed: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, family, **random_overrides(family, seed)).to(torch.float64)
    with torch.inference_mode():
        expected_tokens = [list(prompt) for prompt in PROMPTS]
        for prompt in expected_tokens:
            for _ in range(5):
                prompt.append(int(model(torch.tensor([prompt])).logits[0, -1].argmax()))
    options = {"max_num_batched_tokens": 7, "max_num_seqs": 3, "max_model_len": 48}
    engine = make_engine(
        str(tmp_path), block_size=8, num_kv_blocks=13, dtype="float32", attention_backend="cpu",
        **options,
    )  # fmt: skip
    got = tokens(run(engine, PROMPTS, greedy(5)))
    assert got == [[prompt[-5:]] for prompt in expected_tokens]
