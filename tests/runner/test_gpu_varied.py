"""Models whose layers differ, on a GPU that is not there: tokens are those of the CPU, by layers of
two head sizes, in slices that they share, with windows and with keys of an earlier layer."""

from __future__ import annotations

import pytest

from nanoengine import SamplingParams
from nanoengine.checkpoint.config import parse_model_config
from tests.support.attention_cases import DEVICE
from tests.support.engines import greedy, random_prompts
from tests.support.gpu_tokens import check_tokens

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one"),
    pytest.mark.guards(
        "nanoengine/attention/triton*.py",
        "nanoengine/models/gemma4.py",
        "nanoengine/runner/decode_step.py",
        "nanoengine/runner/graphs.py",
        "tests/support/emulated_gpu.py",
        "tests/support/gpu_tokens.py",
    ),
]
PROMPTS = random_prompts(3, [38, 1, 19])
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)


@pytest.mark.parametrize(
    ("family", "params", "options"),
    [
        ("gemma4", greedy(4), {"max_num_batched_tokens": 21}),
        ("gemma4", SCORED, {"runs": 1}),  # which finds nothing in the cache a second time either
        ("gemma4_moe", greedy(4), {"max_num_batched_tokens": 21}),
        ("gemma4", greedy(3), {"runs": 1, "replays": 0, "deterministic": True}),
    ],
)
def test_tokens_are_those_of_the_cpu(family, params, options):
    check_tokens(family, params, PROMPTS, **options)


def test_a_backend_is_asked_for_the_larger_heads():
    """The 31B model's layers with a window keep more, in heads of half the size."""
    text = {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size": 5376,
        "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "sliding_window": 1024,
    }  # fmt: skip
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    config = parse_model_config(raw)
    assert (config.head_dim, config.largest_head) == (256, 512)
