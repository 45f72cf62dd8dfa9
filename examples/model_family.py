"""Adds a model family, Gemma 1, and compares it with transformers.

    python examples/model_family.py

A tiny random checkpoint must give the same greedy tokens in float64.
"""

import tempfile

import torch
from transformers import GemmaConfig, GemmaForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.checkpoint.families import FAMILIES, Family
from nanoengine.checkpoint.layer_config import LayerConfig


def gemma(keys):
    """Gemma 1: Llama with gelu, scaled embeddings, and norms with the factor 1 + weight."""
    for key in ("hidden_act", "hidden_activation"):
        keys.require_one_of(key, "gelu_pytorch_tanh")  # raises an error for other values
    return LayerConfig(
        norm="one_plus_weight",
        hidden_act="gelu_pytorch_tanh",
        embedding_multiplier=keys.require("hidden_size") ** 0.5,
    )


FAMILIES["GemmaForCausalLM"] = Family(
    model_type="gemma",
    layers=gemma,
    defaults={"head_dim": 256, "tie_word_embeddings": True},
)

torch.manual_seed(0)
config = GemmaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    head_dim=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
)
theirs = GemmaForCausalLM(config).double().eval()
for weights in theirs.parameters():
    torch.nn.init.normal_(weights, std=0.3)  # with the default, logits would hardly differ
prompts = [[3 + i % 7 for i in range(20)], [3 + i % 7 for i in range(20)] + [5, 9]]
with tempfile.TemporaryDirectory() as directory:
    theirs.save_pretrained(directory)
    with LLM(directory, dtype="float64", skip_tokenizer_init=True, block_size=8) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)  # else transformers masks its padding token
            expected = theirs.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
            print(len(prompt), "tokens,", output.num_cached_tokens, "cached: equal")
