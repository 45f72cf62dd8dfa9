"""vLLM's names: what their table in docs/moving_from_vllm.md does not show.

tests/docs/test_moving.py executes each line of that table, and finds missing names.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from nanoengine import BeamSearchParams, SamplingParams
from nanoengine.build import build_engine
from nanoengine.checkpoint.find import resolve_memory
from nanoengine.errors import ConfigError
from nanoengine.settings.checks import check_value
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.pooling import PoolingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.settings.vllm_names import LLM_OPTIONS, NAMES, SAMPLING_PARAMS
from tests.support.engines import checkpoint, random_prompts, run

DEFAULT = EngineConfig(model="m")


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(model="m", **options)


def changed(given: Any, default: Any) -> dict[str, Any]:
    """Returns the fields whose values differ from the defaults."""
    before, after = (dataclasses.asdict(one) for one in (default, given))
    return {name: value for name, value in after.items() if value != before[name]}


@pytest.fixture(autouse=True)
def every_warning_is_an_error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"num_gpu_blocks_override": None}, {}),
        ({"enable_prefix_caching": None, "max_num_seqs": None}, {}),
        ({"pipeline_parallel_size": 1, "enable_lora": False, "cpu_offload_gb": 0.0}, {}),
        ({"speculative_config": None, "hf_overrides": {}, "enable_sleep_mode": np.False_}, {}),
    ],
)
def test_values_without_effect_are_accepted_silently(options, expected):
    assert changed(config(**options), DEFAULT) == expected


def test_options_without_effect_warn_once_at_the_callers_line():
    media = {"image": 0, "video": np.int64(0)}
    for make, message in (
        (lambda: config(swap_space=4, seed=None), r"swap_space \(.*\), seed=None"),
        (lambda: config(limit_mm_per_prompt=media), "limit_mm_per_prompt"),
        (lambda: SamplingParams(skip_clone=True), "skip_clone"),
    ):
        with pytest.warns(UserWarning, match=f"no effect in nanoengine: {message}") as caught:
            assert make() in (DEFAULT, SamplingParams())
        assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": "no"}, "enable_lora='no' is not supported: LoRA"),
        ({"gpu_memory_utilization": 0.5, "memory_fraction": 0.5}, "set one"),
        ({"num_gpu_blocks_override": 9, "num_kv_blocks": 9}, "another name of num_kv_blocks"),
        ({"num_gpu_blocks_override": "9"}, "num_kv_blocks must be an integer or None, got '9'"),
        ({"gpu_memory_utilisation": 0.9}, "did you mean 'gpu_memory_utilization'"),
    ],
)
def test_unsupported_options_raise_with_the_reason(options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_gpu_memory_utilization_has_no_effect_on_a_cpu() -> None:
    given = config(gpu_memory_utilization=0.9)
    on_gpu = resolve_memory(given, torch.device("cuda"))
    assert changed(on_gpu, DEFAULT) == {"memory_fraction": 0.9}
    with pytest.warns(UserWarning, match=r"no effect .*gpu_memory_utilization=0.9 \(there is no"):
        assert resolve_memory(given, torch.device("cpu")) == DEFAULT
    assert resolve_memory(DEFAULT, torch.device("cpu")) is DEFAULT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"seed": -1}, {}),
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"best_of": 1, "use_beam_search": False, "structured_outputs": None}, {}),
    ],
)
def test_vllm_values_of_sampling_params_are_converted(options, expected):
    assert changed(SamplingParams(**options), SamplingParams()) == expected


@pytest.mark.parametrize(
    ("cls", "table"),
    [
        (EngineConfig, LLM_OPTIONS),
        (SamplingParams, SAMPLING_PARAMS),
        (StructuredOutputs, NAMES["StructuredOutputsParams"]),
        (BeamSearchParams, NAMES["BeamSearchParams"]),
        (PoolingParams, NAMES["PoolingParams"]),
    ],
)
def test_listed_names_fail_the_check_of_fields(cls, table):
    """Otherwise the table would not be used, and vLLM's value would be accepted as ours."""
    kinds = get_type_hints(cls)
    for name, meaning in table.items():
        assert (name in kinds) == ("values" in meaning)
        for value, *_ in meaning.get("values", ()):
            with pytest.raises(ValueError, match=name):
                check_value(value, kinds[name], name, ValueError)
        assert meaning.get("alias", "") in kinds.keys() | {""}


# --- effects --------------------------------------------------------------------------------------


def test_logprobs_minus_1_are_those_of_the_whole_vocabulary() -> None:
    options = {"device": "cpu", "attention_backend": "naive", "num_kv_blocks": 64}
    engine = build_engine(EngineConfig(model=checkpoint("qwen3"), **options))
    prompts = random_prompts(1, [5])
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    (request,) = run(engine, prompts, params)
    size = engine.info.vocab_size
    counted = dataclasses.replace(params, logprobs=size, prompt_logprobs=size)
    (same,) = run(engine, prompts, counted)
    found = request.sequences[0].extras.logprobs
    assert found is not None
    assert found == same.sequences[0].extras.logprobs
    assert {entry.token_id for entry in found[1]} == set(range(size))
    assert request.prompt_logprobs == same.prompt_logprobs
    assert len(request.prompt_logprobs) == 4


def test_bfloat16_on_a_cpu_selects_a_backend_that_supports_it() -> None:
    for dtype, backend in (("bfloat16", "cpu"), ("half", "naive"), ("float32", "cpu")):
        config = EngineConfig.from_kwargs(
            model=checkpoint("llama"), device="cpu", dtype=dtype, num_kv_blocks=64
        )
        engine = build_engine(config)
        assert engine.info.attention_backend == backend
        (request,) = run(engine, random_prompts(1, [5]), SamplingParams(max_tokens=3))
        assert request.error is None
        assert len(request.sequences[0].output_token_ids) == 3
