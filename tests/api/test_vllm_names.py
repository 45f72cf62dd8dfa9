"""Names of vLLM's: each is translated, reported or refused as the one table says."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from nanoengine import BeamSearchParams, SamplingParams
from nanoengine.build import build_engine
from nanoengine.checkpoint.find import share_of_memory
from nanoengine.errors import ConfigError, RequestError
from nanoengine.settings import vllm_names
from nanoengine.settings.checks import check_value
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.pooling import POOLING_PARAMS, PoolingParams
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.settings.vllm_names import Alias, Idle, Refused, Values
from tests.support.engines import checkpoint, random_prompts, run

DEFAULT = EngineConfig(model="m")


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(model="m", **options)


def changed(given: Any, default: Any) -> dict[str, Any]:
    """The fields in which a value differs from the default one."""
    before, after = (dataclasses.asdict(one) for one in (default, given))
    return {name: value for name, value in after.items() if value != before[name]}


@pytest.fixture(autouse=True)
def every_warning_is_an_error() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"num_gpu_blocks_override": 64}, {"num_kv_blocks": 64}),
        ({"num_gpu_blocks_override": None}, {}),
        ({"long_prefill_token_threshold": 64}, {"long_prefill_threshold": 64}),
        ({"async_scheduling": True}, {"overlap": True}),
        ({"quantization": "awq_marlin"}, {"quantization": "awq"}),
        ({"quantization": "gptq"}, {"quantization": "gptq"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"enable_prefix_caching": None, "max_num_seqs": None}, {}),
        ({"pipeline_parallel_size": 1, "enable_lora": False, "cpu_offload_gb": 0.0}, {}),
        ({"speculative_config": None, "hf_overrides": {}, "enable_sleep_mode": np.False_}, {}),
    ],
)
def test_other_names_and_values_are_taken_without_a_word(
    options: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert changed(config(**options), DEFAULT) == ours


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"disable_log_stats": True}, r"disable_log_stats \(.*llm.stats\(\)"),
        ({"swap_space": 4}, r"swap_space \(.*kv_tiers"),
        ({"disable_custom_all_reduce": True}, "disable_custom_all_reduce"),
        ({"limit_mm_per_prompt": {"image": 0, "video": np.int64(0)}}, "limit_mm_per_prompt"),
        ({"load_format": "safetensors"}, "load_format='safetensors'"),
        ({"load_format": "gguf"}, "load_format='gguf'"),
        ({"tokenizer_mode": "auto"}, "tokenizer_mode"),
        ({"max_seq_len_to_capture": 8192}, "max_seq_len_to_capture"),
        ({"generation_config": "auto"}, "generation_config"),
        ({"seed": None}, "seed=None"),
        ({"swap_space": 4, "seed": None}, r"swap_space .*, seed=None"),
    ],
)
def test_what_has_no_effect_is_accepted_and_reported_once(
    options: dict[str, Any], named: str
) -> None:
    with pytest.warns(UserWarning, match=f"no effect in nanoengine: {named}") as caught:
        assert config(**options) == DEFAULT
    assert [one.filename for one in caught] == [__file__], "it points at the caller's line"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": {"image": 1}}, r"limit_mm_per_prompt=\{'image': 1\} .*text"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode='slow' can't be obeyed"),
        ({"generation_config": "vllm"}, "generation_config='vllm' can't be obeyed"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size=2 can't be obeyed: set",
        ),
        ({"enable_lora": True}, "enable_lora=True can't be obeyed: LoRA"),
        ({"enable_lora": "no"}, "enable_lora='no' can't be obeyed: LoRA"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 can't be obeyed: weights stay"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"load_format": "pt"}, "load_format must be one of auto, dummy, got 'pt'"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"gpu_memory_utilization": 0.5, "memory_fraction": 0.5}, "set one"),
        ({"num_gpu_blocks_override": 9, "num_kv_blocks": 9}, "another name of num_kv_blocks"),
        ({"num_gpu_blocks_override": "9"}, "num_kv_blocks must be an integer or None, got '9'"),
        ({"gpu_memory_utilisation": 0.9}, "did you mean 'gpu_memory_utilization'"),
        ({"max_model_length": 9}, "did you mean 'max_model_len'"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_with_the_reason(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_a_share_of_a_gpu_means_nothing_on_a_cpu() -> None:
    given = config(gpu_memory_utilization=0.9)
    on_gpu = share_of_memory(given, torch.device("cuda"))
    assert changed(on_gpu, DEFAULT) == {"memory_fraction": 0.9}
    with pytest.warns(UserWarning, match=r"no effect .*gpu_memory_utilization=0.9 \(there is no"):
        assert share_of_memory(given, torch.device("cpu")) == DEFAULT
    assert share_of_memory(DEFAULT, torch.device("cpu")) is DEFAULT


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"seed": -1}, {}),
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"logprobs": -1}, {"logprobs": -1}),
        ({"best_of": 1, "use_beam_search": False, "structured_outputs": None}, {}),
    ],
)
def test_values_of_sampling_params(options: dict[str, Any], ours: dict[str, Any]) -> None:
    assert changed(SamplingParams(**options), SamplingParams()) == ours


@pytest.mark.parametrize(
    ("cls", "table"),
    [
        (EngineConfig, vllm_names.LLM_OPTIONS),
        (SamplingParams, vllm_names.SAMPLING_PARAMS),
        (StructuredOutputs, vllm_names.STRUCTURED_OUTPUTS),
        (BeamSearchParams, vllm_names.BEAM_SEARCH_PARAMS),
        (PoolingParams, POOLING_PARAMS),
    ],
)
def test_what_a_table_names_fails_the_check_of_fields(cls: type, table: vllm_names.Table) -> None:
    """Otherwise the table would not be asked, and vLLM's value would be taken as ours."""
    kinds = get_type_hints(cls)
    for name, meaning in table.items():
        if isinstance(meaning, Values):
            for value, _ in meaning.pairs:
                with pytest.raises(ValueError, match=name):
                    check_value(value, kinds[name], name, ValueError)
        else:
            assert name not in kinds


@pytest.mark.parametrize("name", ["spaces_between_special_tokens", "output_kind", "skip_clone"])
def test_sampling_params_without_effect_are_reported(name: str) -> None:
    with pytest.warns(UserWarning, match=f"no effect in nanoengine: {name}") as caught:
        assert SamplingParams(**{name: True}) == SamplingParams()
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(best_of=3), "best_of=3 can't be obeyed: sample n"),  # type: ignore[call-arg]
        (lambda: SamplingParams(guided_decoding={}), "guided_decoding={} can't be obeyed"),  # type: ignore[call-arg]
        (lambda: SamplingParams(use_beam_search=True), r"call llm.beam_search"),  # type: ignore[call-arg]
        (
            lambda: BeamSearchParams(2, 4, include_stop_str_in_output=True),  # type: ignore[call-arg]
            "include_stop_str_in_output=True can't be obeyed",
        ),
    ],
)
def test_sampling_params_that_cannot_be_obeyed_are_refused(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make()


def test_beam_search_params_by_position_in_vllms_order() -> None:
    assert BeamSearchParams(2, 4, True, 0.0, 0.5, include_stop_str_in_output=False) == (  # type: ignore[call-arg]
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True, length_penalty=0.5)
    )


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        (vllm_names.LLM_OPTIONS, EngineConfig),
        (vllm_names.SAMPLING_PARAMS, SamplingParams),
        (vllm_names.BEAM_SEARCH_PARAMS, BeamSearchParams),
    ],
)
def test_a_table_names_what_is_no_field_and_values_of_what_is(
    table: vllm_names.Table, settings: Any
) -> None:
    fields = {field.name for field in dataclasses.fields(settings)}
    for name, meaning in table.items():
        match meaning:
            case Alias(field):
                assert field in fields
                assert name not in fields
            case Values():
                assert name in fields
            case Idle(why) | Refused(why):
                assert name not in fields
                assert len(why) > 5


# --- what they do ---------------------------------------------------------------------------------


def test_logprobs_of_minus_one_are_those_of_the_whole_vocabulary() -> None:
    options = {"device": "cpu", "attention_backend": "naive", "num_kv_blocks": 64}
    engine = build_engine(EngineConfig(model=checkpoint("qwen3"), **options))  # type: ignore[arg-type]
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
    assert request.prompt_logprobs is not None
    assert len(request.prompt_logprobs) == 4


def test_bfloat16_on_a_cpu_picks_a_backend_that_works() -> None:
    for dtype, backend in (("bfloat16", "cpu"), ("half", "naive"), ("float32", "cpu")):
        config = EngineConfig.from_kwargs(
            model=checkpoint("llama"), device="cpu", dtype=dtype, num_kv_blocks=64
        )
        engine = build_engine(config)
        assert engine.info.attention_backend == backend
        (request,) = run(engine, random_prompts(1, [5]), SamplingParams(max_tokens=3))
        assert request.error is None
        assert len(request.sequences[0].output_token_ids) == 3
