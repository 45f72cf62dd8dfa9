"""vLLM's pooling API: encode, PoolerConfig, and rerankers configured by hf_overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.as_vllm.functions import print_embeddings
from nanoengine.as_vllm.llm import VLLM
from nanoengine.as_vllm.params import VLLMPooler
from nanoengine.errors import ConfigError, PromptTooLongError, RequestError
from nanoengine.settings.pooling import PoolingParams
from tests.support.pooled_checkpoints import make_pooled

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 64, "hf_overrides": {}, "pooler_config": {}}
QUIET = {"use_tqdm": False}
TEXTS = ["a dog went to the park", "é"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lm")
    make_pooled(directory, "lm")
    return directory


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[VLLM]:
    with VLLM(str(path), **OPTIONS) as llm:
        yield llm


def test_encode_returns_tensors(llm: VLLM) -> None:
    whole = llm.encode(TEXTS, pooling_task="embed", **QUIET)
    expected = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS, **QUIET)])
    assert torch.equal(torch.stack([one.outputs.data for one in whole]), expected)
    for one in llm.encode(TEXTS, PoolingParams(dimensions=3), pooling_task="token_embed", **QUIET):
        assert one.outputs.data.shape == (len(one.prompt_token_ids), 3)
        assert one.outputs.data.dtype == torch.float32
    with pytest.raises(RequestError, match="pooling_task must be one of"):
        llm.encode(TEXTS, pooling_task="plugin")
    old = llm.encode(TEXTS, **QUIET)
    assert [one.outputs.embedding for one in old] == expected.tolist()


def test_truncate_prompt_tokens_truncates_a_prompt(llm: VLLM) -> None:
    ids = [5] * 3000
    for cut, length in ((-1, llm.info.max_model_len), (7, 7)):
        options = {"tokenization_kwargs": {"truncate_prompt_tokens": cut}}
        (found,) = llm.encode([ids], pooling_task="embed", **options, **QUIET)
        assert len(found.prompt_token_ids) == length
    with pytest.raises(PromptTooLongError):
        llm.embed([ids], tokenization_kwargs={}, **QUIET)
    with pytest.raises(RequestError, match="tokenization_kwargs"):
        llm.embed(["a"], tokenization_kwargs={"padding": True}, **QUIET)


@pytest.mark.parametrize("name", ["pooler_config", "override_pooler_config"])
def test_a_pooler_config_sets_the_defaults_of_calls(path: Path, llm: VLLM, name: str) -> None:
    config = VLLMPooler(pooling_type="MEAN", use_activation=False, task="embed")
    mean, raw = PoolingParams(pooling="mean"), PoolingParams(pooling="mean", use_activation=False)
    value = config if name == "pooler_config" else dataclasses.asdict(config)
    with VLLM(str(path), num_gpu_blocks_override=64, **{name: value}) as other:
        assert other.embed(TEXTS, **QUIET)[0].outputs == (
            llm.embed(TEXTS, pooling_params=raw, **QUIET)[0].outputs
        )
        scaled = other.embed(TEXTS, pooling_params=PoolingParams(normalize=True), **QUIET)
        assert scaled[0].outputs == llm.embed(TEXTS, pooling_params=mean, **QUIET)[0].outputs


def test_unsupported_poolings_raise(path: Path) -> None:
    for options, message in (
        ({"tok_pooling_type": "STEP"}, "tok_pooling_type must be ALL"),
        ({"task": "plugin"}, "task must be one of embed"),
        ({"pooling_type": "STEP"}, "pooling"),
    ):
        with pytest.raises(RequestError, match=message):
            VLLMPooler(**options)
    late = VLLMPooler(task="token_embed", tok_pooling_type="ALL")
    message = r"score\(\) does not support task='token_embed'"
    with VLLM(str(path), num_gpu_blocks_override=64, pooler_config=late) as llm:
        assert llm.encode(["a"], pooling_task="token_embed", **QUIET)
        with pytest.raises(RequestError, match=message):
            llm.score("a", "b")


@pytest.mark.parametrize(
    "method", [{"is_original_qwen3_reranker": True}, {"method": "from_2_way_softmax"}]
)
def test_hf_overrides_define_a_reranker(path: Path, llm: VLLM, method: dict[str, Any]) -> None:
    base = {"architectures": ["Qwen3ForSequenceClassification"], **method}
    overrides = {"classifier_from_token": ["n", "y"], **base}
    expected = llm.score(TEXTS[0], TEXTS, answers=("n", "y"), **QUIET)
    with VLLM(str(path), num_gpu_blocks_override=64, hf_overrides=overrides) as other:
        found = other.score(TEXTS[0], TEXTS, **QUIET)
    assert [one.outputs for one in found] == [one.outputs for one in expected]
    for wrong in (base, overrides | {"rope_theta": 1e6}, overrides | {"method": "other"}):
        with pytest.raises(ConfigError, match="hf_overrides"):
            VLLM(str(path), hf_overrides=wrong)


def test_pooling_params_are_one_for_all_prompts(llm: VLLM) -> None:
    with pytest.raises(RequestError, match="one PoolingParams for all"):
        llm.embed(TEXTS, pooling_params=[PoolingParams()] * 2)


def test_vectors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_embeddings([[0.5, 1.0], [2.0, 3.0]], prefix="Rows")
    print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0])
    shown = (
        "Rows: [[0.5, 1.0], [2.0, 3.0]] (size=2)\nEmbeddings: [1.0, 2.0, 3.0, 4.0, ...] (size=5)\n"
    )
    assert capsys.readouterr().out == shown


def test_processed_logprobs_are_supported_where_they_equal_the_raw_ones(path: Path) -> None:
    from nanoengine.as_vllm.params import VLLMParams

    options: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    with VLLM(str(path), num_gpu_blocks_override=64, **options) as llm:
        plain = VLLMParams(max_tokens=2, logprobs=0, top_k=-1, seed=3)
        assert llm.generate(["a"], plain, **QUIET)[0].outputs[0].logprobs
        silent = VLLMParams(temperature=0.5, max_tokens=2)
        llm.generate(["a", "b"], [plain, silent], **QUIET)
        for changed in ({"temperature": 0.5}, {"top_k": 4}, {"bad_words": ["x"]}):
            processed = VLLMParams(max_tokens=2, logprobs=0, **changed)
            with pytest.raises(RequestError, match=next(iter(changed))):
                llm.generate(["a", "b"], [plain, processed], **QUIET)
            with pytest.raises(RequestError, match=next(iter(changed))):
                llm.llm_engine.add_request("x", "a", processed)
    with pytest.raises(ConfigError, match="logprobs_mode"):
        VLLM(str(path), logprobs_mode="raw_logits")
