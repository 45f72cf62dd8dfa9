"""Decoders that transformers' modules compute: equal tokens, or a refusal that says why."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoengine import LLM, SamplingParams
from nanoengine.attention.base import AttentionSpec
from nanoengine.checkpoint.config import load_model_config
from nanoengine.cli import main as cli
from nanoengine.errors import ConfigError, UnsupportedModelError, WeightLoadError
from nanoengine.models import transformers_backend
from tests.support.checkpoints import TRANSFORMERS, make_model
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.gguf_files import make_gguf

PROMPTS = random_prompts(4, (26, 19, 3, 26))
PROMPTS[3] = PROMPTS[0][:17] + PROMPTS[3][17:]  # two prompts share a prefix
CHUNKS = {
    "max_num_batched_tokens": 7, "max_num_seqs": 4, "max_model_len": 48, "block_size": 8,
    "num_kv_blocks": 17,
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def write(directory: Path, kind: str, **fields: Any) -> str:
    """Writes a random model of a config class of transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, **fields})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("backend", ["naive", "cpu"])
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_greedy_tokens_match_transformers(family: str, backend: str) -> None:
    directory = checkpoint(family)
    assert load_model_config(directory).model_impl == "transformers"
    engine = make_engine(directory, dtype="float32", attention_backend=backend, **CHUNKS)
    found = tokens(run(engine, PROMPTS, greedy(8)))
    assert tokens(run(engine, PROMPTS, greedy(8))) == found, "from the prefix cache"
    model = make_model(family).to(torch.float64)
    for prompt, (output,) in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *output[:-1]]])).logits[0]
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == output


@pytest.mark.parametrize(
    ("family", "quantization"), [("llama", "int8"), ("qwen3_moe", "int8"), ("llama", "int4")]
)
def test_linear_layers_have_the_native_kernels(family: str, quantization: str) -> None:
    """Layers are quantized alike, so log-probabilities are close; in floats they are equal."""
    found = {}
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for model_impl in ("auto", "transformers"):
        with LLM(
            checkpoint(family), model_impl=model_impl, quantization=quantization,
            skip_tokenizer_init=True, max_model_len=48, num_kv_blocks=17,
        ) as llm:  # fmt: skip
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)
            entries = zip(PROMPTS[0][1:], output.prompt_logprobs[1:], strict=True)
            found[model_impl] = torch.tensor([each[i].logprob for i, each in entries])
    error = (found["auto"] - found["transformers"]).abs()
    assert error.mean() < 0.1, "another rounding of inputs changes them by less"


def test_info_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 64}
    path = write(tmp_path, "OPTConfig", **sizes)
    assert cli.main(["info", path, "--all"]) == 0
    assert caplog.text.count("has no native model") == 1
    assert "OPTForCausalLM: 2 layers" in capsys.readouterr().out


def test_options_and_embeddings_match_the_native_model() -> None:
    found = {}
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=3, repetition_penalty=1.2)
    for model_impl in ("auto", "transformers"):
        with LLM(
            checkpoint("qwen3"), model_impl=model_impl, skip_tokenizer_init=True, dtype="float64",
            attention_backend="naive", **CHUNKS, speculative="ngram",
        ) as llm:  # fmt: skip
            rows = [{"prompt_token_ids": ids} for ids in PROMPTS]
            texts = [[c.token_ids for c in o.outputs] for o in llm.generate(rows, params)]
            vectors = torch.tensor([output.outputs.embedding for output in llm.embed(rows)])
            found[model_impl] = texts, vectors
    assert found["auto"][0] == found["transformers"][0]
    torch.testing.assert_close(found["auto"][1], found["transformers"][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("BloomConfig", {"n_head": 4}, "call AttentionInterface 0 times"),
        ("BertLMHeadConfig", {}, ""),
        ("DiffLlamaConfig", HEADS, "2 layers call AttentionInterface 4 times"),
        ("MambaConfig", {}, "num_attention_heads"),
        ("FalconConfig", {"num_attention_heads": 4}, "modules: its attention has an interface"),
        (
            "LlamaConfig",
            {**HEADS, "rope_parameters": {
                "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0
            }},
            "it has dynamic",
        ),
    ],
)  # fmt: skip
def test_what_the_cache_cannot_hold_is_refused(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    if kind == "BertLMHeadConfig":
        kind, fields = "BertConfig", {"num_attention_heads": 4, "is_decoder": False}
        reason = "its attention is not causal"
    directory = write(tmp_path, kind, **fields)
    with pytest.raises(UnsupportedModelError, match=reason):
        make_engine(directory, model_impl="transformers", dtype="float32", num_kv_blocks=4)


def test_a_model_that_depends_on_earlier_tokens_outside_attention_is_refused(monkeypatch) -> None:
    """A model whose embeddings depend on the previous token, as convolutions and n-grams do."""

    def shifted(model, token_ids, positions):
        hidden = plain(model, token_ids, positions)
        return hidden + 0.5 * hidden.roll(1, 0)

    plain = transformers_backend.TransformersLM.body
    monkeypatch.setattr(transformers_backend.TransformersLM, "body", shifted)
    with pytest.raises(
        UnsupportedModelError, match=r"attention is not causal|earlier ones outside"
    ):
        make_engine(checkpoint("llama"), model_impl="transformers", num_kv_blocks=4)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: replace(spec, scale=1.02 * spec.scale),
        lambda spec: replace(spec, sliding_window=transformers_backend.PROBE_WINDOW + 1),
        lambda spec: replace(spec, sliding_window=None),
        lambda spec: replace(spec, softcap=20.0),
    ],
)
@pytest.mark.parametrize("family", ["cwm", "starcoder2", "granite_swa.gguf"])
def test_attention_that_differs_a_little_is_refused(
    family: str,
    change: Callable[[AttentionSpec], AttentionSpec],
    monkeypatch: Any,
    tmp_path: Path,
) -> None:
    def changed(model: Any, module: Any, spec: AttentionSpec, *qkv: torch.Tensor) -> torch.Tensor:
        return plain(model, module, change(spec), *qkv)

    plain = transformers_backend.TransformersLM.attend_probe
    monkeypatch.setattr(transformers_backend.TransformersLM, "attend_probe", changed)
    path = str(tmp_path / family)
    if family.endswith(".gguf"):
        make_gguf(Path(path), family.removesuffix(".gguf"), types=lambda name: "Q8_0")
    else:
        path = checkpoint(family)
    with pytest.raises(UnsupportedModelError, match="attention is not causal"):
        make_engine(path, dtype="float32", num_kv_blocks=4)


def test_a_narrower_head_defines_the_vocabulary() -> None:
    assert load_model_config(checkpoint("apertus1p5_vision")).vocab_size == 256


def test_the_probe_leaves_the_config_as_it_was() -> None:
    engine = make_engine(checkpoint("cwm"), dtype="float32", num_kv_blocks=4)
    assert engine.executor.model.whole.config.sliding_window == 16


def test_ranks_and_new_weights_are_refused() -> None:
    directory = checkpoint("gpt2")
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1"):
        make_engine(directory, tensor_parallel_size=2, num_kv_blocks=4)
    with (
        LLM(directory, skip_tokenizer_init=True, num_kv_blocks=4, max_model_len=32) as llm,
        pytest.raises((WeightLoadError, ConfigError), match="transformers' modules"),
    ):
        llm.load_weights(directory)


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    directory = Path(write(tmp_path, "GPT2Config", n_head=4, n_layer=2, n_embd=64))
    (directory / "model.safetensors").unlink()
    engine = make_engine(str(directory), load_format="dummy", **CHUNKS, dtype="float32")
    prompts = [[random.Random(1).randrange(256) for _ in range(5)]]
    assert len(tokens(run(engine, prompts, greedy(3)))[0][0]) == 3
