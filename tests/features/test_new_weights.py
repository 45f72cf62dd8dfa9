"""New weights in place: afterwards an LLM answers as one that was made of the new checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.errors import EngineDeadError, WeightLoadError
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import random_prompts

PROMPTS = random_prompts(3, [5, 40, 21])
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
QUANTIZATIONS = ("int8", "int4", "int8_weight_only", "int4_weight_only")
SMALL = {"num_kv_blocks": 32, "max_model_len": 128, "skip_tokenizer_init": True, "device": "cpu"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(family, overrides) -> two checkpoints of the same model with other weights."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str, **overrides):
        name = f"{family}{overrides}"
        if name not in made:
            path = tmp_path_factory.mktemp("pair")
            old, new = path / "old", path / "new"
            make_checkpoint(old, family, **overrides)
            make_checkpoint(new, family, **overrides)
            tensors = load_file(new / "model.safetensors")
            generator = torch.Generator().manual_seed(7)
            tensors = {
                name: (t + 0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype)
                for name, t in tensors.items()
            }
            save_file(tensors, new / "model.safetensors")
            made[name] = old, new
        return made[name]

    return get


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


CASES = [
    ("qwen3", {}, {"dtype": "float32"}),
    ("qwen3", {}, {"dtype": "bfloat16"}),
    ("qwen3", {}, {"dtype": "float64", "attention_backend": "naive"}),
    ("qwen3", {"tie_word_embeddings": True}, {"dtype": "bfloat16"}),
    *(("qwen2", {"tie_word_embeddings": tied}, {"dtype": "float32", "quantization": kind})
      for kind in QUANTIZATIONS for tied in (True, False)),
    ("qwen2", {}, {"dtype": "float64", "attention_backend": "naive", "quantization": "int4"}),
    ("gemma3", {"tie_word_embeddings": True}, {"dtype": "bfloat16"}),
    ("qwen3_moe", {}, {"dtype": "bfloat16"}),
    ("qwen3_moe", {}, {"dtype": "float32", "quantization": "int8"}),
    ("mixtral", {}, {"dtype": "float32"}),
    ("qwen3_next", {}, {"dtype": "float32"}),
    ("gpt_oss", {}, {"dtype": "float32"}),
    ("phi3", {}, {"dtype": "float32"}),
]


@pytest.mark.parametrize(("family", "overrides", "options"), CASES, ids=map(str, CASES))
def test_as_an_llm_of_the_new_checkpoint(pair, family, overrides, options):
    old, new = pair(family, **overrides)
    with LLM(new, **SMALL, **options) as fresh:
        expected = answers(fresh)
    with LLM(old, **SMALL, **options) as llm:
        before = answers(llm)
        assert before != expected
        llm.load_weights(new)
        assert answers(llm) == expected
        llm.load_weights(tensors_of(old))
        assert answers(llm) == before
        for one in tensors_of(new).items():  # as training scripts give them
            assert llm.load_weights([one]) == {one[0]}
        assert answers(llm) == expected
