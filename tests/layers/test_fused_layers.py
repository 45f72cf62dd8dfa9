"""Decoder layers as one compiled call match their separate steps, in every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.attention.batch import Batch
from nanoengine.kernels import cpu_decoder
from nanoengine.layers.cpu_decoder import FusedLayers
from nanoengine.models.decoder import DecoderLayer
from nanoengine.outputs import Logprob
from tests.support.engines import checkpoint, random_prompts
from tests.support.quantized_checkpoints import SYMMETRIC, int_config, write_quantized

SIZES = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512}


def load(family: str | Path, fields: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An engine on the CPU with a model of a family, or from a directory."""
    directory = family if isinstance(family, Path) else checkpoint(family, **(fields or {}))
    options = {"dtype": "float32", "num_kv_blocks": 96} | SIZES | options
    return LLM(directory, device="cpu", skip_tokenizer_init=True, **options)


def outputs(llm: LLM) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities of prompts with one and with many tiles, chunks and decodes;
    then of a single prompt whose first chunks need no logits, and of one with prompt_logprobs."""
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
    # The last layer returns more rows than it gets: six sequences sample from one prompt token.
    llm.reset_prefix_cache()
    drawn = SamplingParams(n=6, seed=3, max_tokens=4, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": [5, 7]}], drawn, use_tqdm=False)
    return found + [(result.token_ids, result.logprobs) for result in output.outputs]


def outputs_of_separate_steps(llm: LLM) -> list[tuple[object, ...]]:
    """The same outputs with all layers unfused."""
    decoder = llm.engine.executor.model.model
    decoder.executed_layers = list(decoder.layers)
    return outputs(llm)


def log_probabilities(found: object) -> list[float]:
    """All log-probabilities."""
    if isinstance(found, Logprob):
        return [found.logprob]
    parts = found.values() if isinstance(found, dict) else found
    return [x for part in parts or () if not isinstance(part, int) for x in log_probabilities(part)]


@dataclass(frozen=True)
class Case:
    """A model and the expected result.

    `tolerance` bounds the difference of log-probabilities from the separate steps; 0: equal bits.
    `calls` is the number of fused calls, `depths` the number of layers per call; empty: unchecked.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0
    depths: tuple[int, ...] = ()
    calls: int = 0


MLA_SIZES = {"kv_lora_rank": 40, "q_lora_rank": 48, "v_head_dim": 16, "qk_nope_head_dim": 16}
BFLOAT16, INT8 = {"dtype": "bfloat16"}, {"quantization": "int8"}
SHARED = {"num_kv_shared_layers": 2}
CASES = {
    "plain": Case("llama"),
    "biases": Case("qwen2"),
    "QK norms": Case("qwen3"),
    "sandwich norms, soft caps": Case("gemma2", depths=(2,)),
    "sliding windows": Case("gemma3", depths=(2, 1)),
    "multipliers": Case("granite"),
    "post-norms": Case("exaone4"),
    "interleaved RoPE": Case("glm4"),
    "fused tensors": Case("phi3"),
    "MLP biases": Case("seed_oss"),
    "layers without RoPE": Case("smollm3"),
    "sinks, biased experts": Case("gpt_oss"),
    "expert groups, a shared expert": Case("glm4_moe"),
    "experts with multipliers": Case("granitemoe"),
    "QK norm over all heads": Case("olmo2"),
    "int8": Case("qwen2", INT8),
    "int4": Case("qwen2", {"quantization": "int4"}),
    "int8 weight-only": Case("qwen2", {"quantization": "int8_weight_only"}),
    "int4 weight-only": Case("qwen2", {"quantization": "int4_weight_only"}),
    "int8 experts": Case("qwen3_moe", INT8),
    "bfloat16": Case("qwen2", BFLOAT16),
    "bfloat16 experts": Case("qwen3_moe", BFLOAT16),
    "a bfloat16 cache": Case("qwen3", {"kv_cache_dtype": "bfloat16"}),
    "an int8 cache": Case("qwen3", {"kv_cache_dtype": "int8"}),
    "convolutions": Case("lfm2", calls=1),
    "convolutions, experts": Case("lfm2_moe", calls=1),
    "convolutions, two RoPE configurations": Case("lfm3", tolerance=1e-5, calls=2),
    # torch's sigmoid of the attention gates rounds differently.
    "delta rule": Case("qwen3_5", tolerance=1e-5, calls=1),
    "delta rule, int8": Case("qwen3_5", INT8, tolerance=0.02),
    "delta rule, experts": Case("qwen3_next", tolerance=1e-5, calls=1),
    "Mamba-2, int8": Case("bamba", INT8, calls=1),
    "Mamba-2, experts": Case("granite_hybrid", calls=1),
    # MLA: RoPE rounds differently.
    "MLA": Case("deepseek_v2", fields=MLA_SIZES, tolerance=1e-4),
    "MLA, bfloat16": Case("deepseek_v3", BFLOAT16, MLA_SIZES, tolerance=0.05),
    "MLA, a bfloat16 cache": Case(
        "deepseek_v3", {"kv_cache_dtype": "bfloat16"}, MLA_SIZES, tolerance=0.05
    ),
    "MLA, int8 weight-only": Case(
        "glm4_moe_lite", {"quantization": "int8_weight_only"}, MLA_SIZES, tolerance=1e-4
    ),
    # Gemma 4: torch's value norms, query norms and input gate round differently.
    "shared KV, per-layer inputs": Case("gemma4", {}, SHARED, 5e-5, (3, 1, 1, 1, 1)),
    "values equal to keys": Case(
        "gemma4", {}, {"attention_k_eq_v": True, "num_kv_shared_layers": 0}, 5e-5, (3, 1, 2, 1)
    ),
    "no per-layer inputs": Case(
        "gemma4", {}, {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, 5e-5,
        (3, 1, 2, 1),
    ),
    "shared KV, int8": Case("gemma4", INT8, SHARED, 0.2, (3, 1, 1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fused_layers_match_their_separate_steps(case: Case) -> None:
    with load(case.family, case.fields, **case.options) as llm:
        stack = llm.engine.executor.model.model.executed_layers
        assert all(isinstance(layers, FusedLayers) for layers in stack)
        if case.depths:
            assert [layers.num_layers for layers in stack] == [*case.depths]
        if case.calls:
            assert len(stack) == case.calls
        fused = outputs(llm)
        expected = outputs_of_separate_steps(llm)
    if not case.tolerance:
        assert fused == expected
        return
    if case.tolerance < 0.1:
        assert [tokens for tokens, *_ in fused] == [tokens for tokens, *_ in expected]
    else:  # Ties may change tokens, so scores of a single prompt are compared.
        fused, expected = fused[7][2], expected[7][2]
    scores = log_probabilities(expected)
    assert len(scores) > 100
    assert log_probabilities(fused) == pytest.approx(scores, abs=case.tolerance, rel=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_selecting_rows_in_the_last_layer_changes_no_output(family: str, monkeypatch: Any) -> None:
    def all_rows(forward: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
        hidden = forward(replace(batch, logits_indices=None))
        return hidden if batch.logits_indices is None else hidden[batch.logits_indices]

    with load(family) as llm:
        decoder = llm.engine.executor.model.model
        expected = outputs(llm)
        monkeypatch.setattr(decoder, "forward", partial(all_rows, decoder.forward))
        assert outputs(llm) == expected


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("hunyuan", {}),  # QK norm after RoPE
        ("gemma4_moe", {}),  # experts in parallel with an MLP
        ("llama", {"dtype": "float64"}),  # linear-layer kernels support float32 only
        ("llama", {"attention_backend": "naive"}),
        ("granitemoe", {"fields": {"intermediate_size": 20}}),  # experts of incomplete panels
    ],
)
def test_layers_without_a_kernel_run_step_by_step(family: str, options: Any) -> None:
    with load(family, **options) as llm:
        stack = llm.engine.executor.model.model.executed_layers
        assert all(isinstance(layer, DecoderLayer) for layer in stack)


def test_layers_with_and_without_experts_are_one_call() -> None:
    """Qwen3-MoE with experts in some layers only: one call runs all layers."""
    with load("qwen3_moe") as llm:
        stack = llm.engine.executor.model.model.executed_layers
        assert [len(layers.layers) for layers in stack] == [3]


@pytest.mark.parametrize(("family", "calls"), [("qwen3", [[2]]), ("gemma3", [[1, 1], [1]])])
def test_adjacent_layers_with_the_same_rope_are_one_call(
    family: str, calls: list[list[int]], monkeypatch: Any
) -> None:
    """The first two layers of Gemma 3 have their own windows and KV cache groups."""
    ran: list[int] = []

    def run(*arguments: object) -> None:
        *_, first, last, _ = arguments
        ran.append(last - first)
        cpu_decoder.decoder_layers(*arguments)

    monkeypatch.setattr("nanoengine.layers.cpu_decoder.decoder_layers", run)
    with load(family) as llm:
        outputs(llm)
        stack = llm.engine.executor.model.model.executed_layers
        assert [[len(call.operands) for call in layers._calls] for layers in stack] == calls
    assert min(ran) > 0  # with row selection, the last layer runs separately


def test_adjacent_layers_with_different_weight_types_are_separate_calls(tmp_path: Path) -> None:
    """A checkpoint with one int4 layer, followed by an unquantized one."""
    ignored = {**int_config(), "ignore": ["lm_head", "re:.*layers[.]1[.]"]}
    floats = write_quantized(tmp_path, "llama", ignored, SYMMETRIC)
    path = tmp_path / "quantized" / "model.safetensors"
    mixed, plain = load_file(path), load_file(floats / "model.safetensors")
    second = "model.layers.1."
    mixed = {name: value for name, value in mixed.items() if not name.startswith(second)}
    mixed |= {name: value for name, value in plain.items() if name.startswith(second)}
    save_file(mixed, path)
    with load(path.parent) as llm:
        (layers,) = llm.engine.executor.model.model.executed_layers
        fused = outputs(llm)
        assert [len(call.operands) for call in layers._calls] == [1, 1]
        assert fused == outputs_of_separate_steps(llm)


def test_layers_bound_to_another_cache_use_it() -> None:
    with load("qwen3") as llm:
        before = outputs(llm)[:8]  # Forks copy KV blocks that the runner allocated.
        attentions = llm.engine.executor.model.attention_layers
        old = [attention.cache for attention in attentions]
        with torch.inference_mode():
            for attention, (k_cache, v_cache, spec) in zip(attentions, old, strict=True):
                attention.bind(torch.zeros_like(k_cache), torch.zeros_like(v_cache), spec.group)
                k_cache.fill_(torch.nan)
                v_cache.fill_(torch.nan)
        assert outputs(llm)[:8] == before
        assert all(cache.k_cache.isnan().all() for cache in old)
