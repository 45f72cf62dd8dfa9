"""Decoder layers as one compiled call: the same bits as their parts one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.attention.batch import Batch
from nanoengine.kernels import cpu_decoder
from nanoengine.layers.cpu_decoder import FusedLayers
from nanoengine.models.decoder import DecoderLayer
from tests.support.engines import checkpoint, random_prompts
from tests.support.quantized_checkpoints import SYMMETRIC, int_config, write_quantized

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "granite", "exaone4", "glm4",
            "ernie4_5", "phi3", "seed_oss", "smollm3", "arcee", "gpt_oss",
            "glm4_moe", "granitemoe", "olmo2")  # fmt: skip
"""Plain; biases; norms of heads; windows; norms on both sides and softcaps; factors; norms behind
only; neighbours turned; merged tensors; biases of the MLP; layers that are not turned; no gate;
sinks and biased experts; groups of experts and a shared one; factors on what experts add; a
norm over all heads."""
QUANTIZATIONS = (None, "int8", "int4", "int8_weight_only", "int4_weight_only")


def outputs(llm: LLM) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities: prompts of one tile and of many, chunks, decodes; then a prompt
    alone, whose first chunks need no logits, and one that is scored."""
    found: list[tuple[object, ...]] = []
    for lengths, scored in (((1, 5, 40, 90, 300, 2), None), ((270,), None), ((150,), 0)):
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(len(lengths), lengths)]
        params = SamplingParams(
            temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=scored
        )
        llm.reset_prefix_cache()
        for output in llm.generate(prompts, params, use_tqdm=False):
            (result,) = output.outputs
            assert result.finish_reason == "length", result.error
            found.append((result.token_ids, result.logprobs, output.prompt_logprobs))
    # More rows leave the last layer than have come in: all six sample from the prompt's last token.
    llm.reset_prefix_cache()
    drawn = SamplingParams(n=6, seed=3, max_tokens=4, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": [5, 7]}], drawn, use_tqdm=False)
    return found + [(result.token_ids, result.logprobs) for result in output.outputs]


def all_rows(forward: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
    """A forward that takes the rows of logits at its end, not in the last layer."""
    hidden = forward(replace(batch, logits_indices=None))
    return hidden if batch.logits_indices is None else hidden[batch.logits_indices]


@pytest.mark.parametrize(
    ("family", "quantization", "kv_cache_dtype", "dtype"),
    [(family, None, "auto", "float32") for family in FAMILIES]
    + [("qwen2", kind, "auto", "float32") for kind in QUANTIZATIONS[1:]]
    + [("qwen3_moe", "int8", "auto", "float32"), ("qwen3_moe", None, "auto", "bfloat16")]
    + [("qwen3", None, "bfloat16", "float32"), ("qwen2", None, "auto", "bfloat16")]
    + [("qwen3", None, "int8", "float32")],
)
def test_a_fused_layer_gives_the_bits_of_its_parts(
    family, quantization, kv_cache_dtype, dtype, monkeypatch
):
    options = {
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "max_model_len": 512,
        "num_kv_blocks": 64,
        "kv_cache_dtype": kv_cache_dtype,
    }
    with LLM(
        checkpoint(family),
        dtype=dtype,
        device="cpu",
        skip_tokenizer_init=True,
        quantization=quantization,
        **options,
    ) as llm:
        decoder = llm.engine.executor.model.model
        assert all(isinstance(layers, FusedLayers) for layers in decoder.stack)
        fused = outputs(llm)
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "forward", partial(all_rows, decoder.forward))
            assert fused == outputs(llm)
        decoder.stack = list(decoder.layers)
        assert fused == outputs(llm)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("hunyuan", {}),  # norms behind the rotation
        ("cohere2", {}),  # LayerNorm; attention and MLP side by side
        ("llama", {"dtype": "float64"}),  # kernels of linear layers are for float32
        ("llama", {"attention_backend": "naive"}),
    ],
)
def test_a_layer_that_no_kernel_fits_runs_part_by_part(family, options):
    options = {"dtype": "float32", "num_kv_blocks": 16} | options
    with LLM(checkpoint(family), device="cpu", skip_tokenizer_init=True, **options) as llm:
        stack = llm.engine.executor.model.model.stack
        assert all(isinstance(layer, DecoderLayer) for layer in stack)


def test_mixed_layers_of_a_model_are_fused_where_a_kernel_fits():
    """Qwen3-MoE with experts in some layers only, all of which are in one call of their own."""
    directory = checkpoint("qwen3_moe")
    with LLM(directory, dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        stack = llm.engine.executor.model.model.stack
        assert [len(layers.layers) for layers in stack] == [3]
        assert stack[0].rest is None


@pytest.mark.parametrize(("family", "calls"), [("qwen3", [[2]]), ("gemma3", [[1, 1], [1]])])
def test_neighbours_that_turn_their_heads_alike_are_one_call(family, calls, monkeypatch):
    """Gemma 3's first two have a window each, and a KV group each."""
    ran: list[int] = []

    def run(*arguments: object) -> None:
        *_, first, last, _ = arguments
        ran.append(last - first)
        cpu_decoder.decoder_layers(*arguments)

    monkeypatch.setattr("nanoengine.layers.cpu_decoder.decoder_layers", run)
    with LLM(checkpoint(family), dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        outputs(llm)
        stack = llm.engine.executor.model.model.stack
        assert [[len(call.operands) for call in layers._calls] for layers in stack] == calls
    assert min(ran) > 0  # where not all rows go on, the last layer runs apart


def test_neighbours_with_other_kinds_of_weights_have_calls_of_their_own(tmp_path):
    """A checkpoint of which one layer is int4 and the next is not quantized."""
    ignored = {**int_config(), "ignore": ["lm_head", "re:.*layers[.]1[.]"]}
    floats = write_quantized(tmp_path, "llama", ignored, SYMMETRIC)
    path = tmp_path / "quantized" / "model.safetensors"
    mixed, plain = load_file(path), load_file(floats / "model.safetensors")
    second = "model.layers.1."
    mixed = {name: value for name, value in mixed.items() if not name.startswith(second)}
    mixed |= {name: value for name, value in plain.items() if name.startswith(second)}
    save_file(mixed, path)
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 8}
    with LLM(path.parent, skip_tokenizer_init=True, **options) as llm:
        decoder = llm.engine.executor.model.model
        (layers,) = decoder.stack
        fused = outputs(llm)
        assert [len(call.operands) for call in layers._calls] == [1, 1]
        decoder.stack = list(decoder.layers)
        assert fused == outputs(llm)


def test_layers_that_are_bound_again_read_and_write_the_new_cache():
    with LLM(checkpoint("qwen3"), dtype="float32", device="cpu", skip_tokenizer_init=True) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2, (3, 150))]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

        def tokens() -> list[list[int]]:
            llm.reset_prefix_cache()
            found = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in found]

        before = tokens()
        old = [attention.cache for attention in llm.engine.executor.model.attention_layers]
        attentions = llm.engine.executor.model.attention_layers
        with torch.inference_mode():
            for attention, (k_cache, v_cache, spec) in zip(attentions, old, strict=True):
                attention.bind(torch.zeros_like(k_cache), torch.zeros_like(v_cache), spec.group)
                k_cache.fill_(torch.nan)
                v_cache.fill_(torch.nan)
        assert tokens() == before
        assert all(cache.k_cache.isnan().all() for cache in old)
