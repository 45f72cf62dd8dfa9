"""What each name of vLLM's offline API means here, where it is not simply the same: one table.

    Alias     another name of a field here
    Idle      accepted, without effect, which a warning says; other values are refused
    Refused   an error that says why; None, False and values that ask for nothing are accepted
    Values    a field here, some of whose values in vLLM have another name here

`translate` applies a table to a user's options, and `checks.checked` calls it only where one of
them is not a field or has a value of a wrong type. So a name in a table must not be a field, and a
value in `Values` must not be of the field's type. A name that is neither in a table nor a field is
refused by `checked`. docs/moving_from_vllm.md shows the tables to users; a test holds the two
together. Source: vLLM's `LLM`, `EngineArgs`, `SamplingParams` and `BeamSearchParams`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nanoengine.settings.checks import plain, shown


class Alias(NamedTuple):
    """Another name of a field here."""

    field: str


class Idle(NamedTuple):
    """Accepted without effect; values for which `accepts` is false are refused."""

    why: str
    accepts: Callable[[Any], bool] = lambda value: True


class Refused(NamedTuple):
    """Not implemented; values that ask for nothing are accepted, as they are obeyed."""

    why: str
    neutral: tuple[Any, ...] = (None, False)


class Values(NamedTuple):
    """A field of that name here: pairs of a value of vLLM's, or how it prints, and ours.

    DROP: our default.

    Attributes:
        reported: the value asks for something that has no effect here.
    """

    pairs: tuple[tuple[Any, Any], ...]
    reported: bool = False


Table = Mapping[str, Alias | Idle | Refused | Values]

DROP = object()


def among(*values: object) -> Callable[[Any], bool]:
    """Tells whether a value is one of these."""
    return lambda value: value in values


def _asks_for_no_media(value: Any) -> bool:
    counts = value.values() if isinstance(value, Mapping) else ()
    return value is None or (isinstance(value, Mapping) and all(count == 0 for count in counts))


LORA = "LoRA adapters are not implemented"
TEXT_ONLY = "prompts are text; images, audio and video are not implemented"
POOLS = "each LLM has generate, embed, score, classify and reward"
POOLING = "give pooling_params=PoolingParams(pooling='mean') to the call"
GRAMMARS = "llguidance compiles every grammar"
BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
DRAFTS = "set speculative: 'ngram', or the path of a draft model"

LLM_OPTIONS: Table = {
    # --- other names
    "num_gpu_blocks_override": Alias("num_kv_blocks"),
    "long_prefill_token_threshold": Alias("long_prefill_threshold"),
    "async_scheduling": Alias("overlap"),
    # --- values
    "dtype": Values(
        (
            ("half", "float16"),
            ("float", "float32"),
            ("torch.float16", "float16"),
            ("torch.bfloat16", "bfloat16"),
            ("torch.float32", "float32"),
        )
    ),
    "quantization": Values((("awq_marlin", "awq"), ("gptq_marlin", "gptq"))),
    "kv_cache_dtype": Values((("fp8_e4m3", "fp8"),)),
    **dict.fromkeys(
        ("enable_prefix_caching", "enable_chunked_prefill", "max_num_seqs"), Values(((None, DROP),))
    ),
    "load_format": Values((("safetensors", "auto"), ("gguf", "auto")), reported=True),
    "seed": Values(((None, DROP),), reported=True),
    # --- without effect
    "disable_log_stats": Idle("nothing is logged while it runs; llm.stats() has the counters"),
    "swap_space": Idle("what is preempted is recomputed; kv_tiers keeps blocks in host memory"),
    "disable_custom_all_reduce": Idle("ranks sum by NCCL, on a CPU by gloo"),
    "distributed_executor_backend": Idle("ranks are processes of this machine"),
    "max_parallel_loading_workers": Idle("each rank reads its part of the weights"),
    "max_seq_len_to_capture": Idle("CUDA graphs serve decodes of every length"),
    "compilation_config": Idle("torch.compile is not used; enforce_eager turns CUDA graphs off"),
    "disable_async_output_proc": Idle("overlap says whether steps overlap"),
    "num_scheduler_steps": Idle("each step is planned; overlap hides the time it takes"),
    "use_v2_block_manager": Idle("there is one"),
    "renderer_num_workers": Idle("prompts are read in the calling thread"),
    "max_logprobs": Idle("logprobs is bounded by the vocabulary"),
    "served_model_name": Idle("nothing is served"),
    "limit_mm_per_prompt": Idle(TEXT_ONLY, _asks_for_no_media),
    "tokenizer_mode": Idle("transformers picks the tokenizer", among("auto", "hf")),
    "config_format": Idle("config.json is read", among("auto", "hf")),
    "model_impl": Idle("models are nanoengine's own", among("auto", "vllm")),
    "generation_config": Idle(
        "the checkpoint's gives the default sampling parameters", among("auto")
    ),
    "task": Idle(POOLS, among("auto", "generate", "embed", "score", "classify", "reward")),
    "runner": Idle(POOLS, among("auto", "generate", "pooling")),
    "convert": Idle(POOLS, among("auto", "none", "embed", "classify", "reward")),
    "scheduling_policy": Idle(
        "lower priorities run first, equal ones as they come", among("fcfs", "priority")
    ),
    "guided_decoding_backend": Idle(GRAMMARS, among(None, *BACKENDS)),
    "structured_outputs_config": Idle(
        GRAMMARS, among(None, {}, *({"backend": name} for name in BACKENDS))
    ),
    "preemption_mode": Idle("what is preempted is recomputed", among(None, "recompute")),
    # --- refused
    "pipeline_parallel_size": Refused("set tensor_parallel_size: ranks share layers", (None, 1)),
    "data_parallel_size": Refused("an LLM is one replica", (None, 1)),
    "enable_expert_parallel": Refused("each rank holds a part of every expert"),
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"), Refused(LORA)),
    "speculative_config": Refused(DRAFTS),
    "reasoning_parser": Refused("answers are not parsed", (None, "")),
    "pooler_config": Refused(POOLING),
    "override_pooler_config": Refused(POOLING),
    "mm_processor_kwargs": Refused(TEXT_ONLY),
    "allowed_local_media_path": Refused(TEXT_ONLY, (None, "")),
    "cpu_offload_gb": Refused("weights stay on the device", (None, 0, 0.0)),
    "kv_cache_memory_bytes": Refused("give kv_cache_gib, in GiB"),
    "kv_transfer_config": Refused("kv_tiers says where KV blocks live on"),
    "logprobs_mode": Refused(
        "logprobs are those of the model's own logits", ("raw_logprobs", None)
    ),
    "hf_overrides": Refused("a model runs as its config.json says: edit a copy of it", (None, {})),
    "rope_scaling": Refused("a model runs as its config.json says: edit a copy of it", (None, {})),
    "rope_theta": Refused("a model runs as its config.json says: edit a copy of it"),
    "override_generation_config": Refused("pass sampling_params to each call", (None, {})),
    "hf_token": Refused("set the variable HF_TOKEN, which the hub's library reads"),
    "hf_config_path": Refused("config.json is read from the checkpoint"),
    "download_dir": Refused("set the variable HF_HOME, which the hub's library reads"),
    "tokenizer_revision": Refused("give tokenizer a directory that holds that revision"),
    "code_revision": Refused("models are nanoengine's own"),
    "enable_sleep_mode": Refused("close an LLM to give its memory back"),
    "disable_sliding_window": Refused("windows are part of the model"),
    "calculate_kv_scales": Refused("fp8 scales are the checkpoint's, or 1"),
    "attention_config": Refused("give attention_backend"),
    "profiler_config": Refused("use torch.profiler around a call"),
}
"""Arguments of vLLM's `LLM`; those not here and not in EngineConfig are unknown."""

LOGPROBS = Values(((True, 1),))

SAMPLING_PARAMS: Table = {
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "spaces_between_special_tokens": Idle("special tokens in a text stand as they decode"),
    "output_kind": Idle(
        "generate() returns finished outputs, and stream(kind=...) says what it yields"
    ),
    "stream_interval": Idle("stream(kind=...) yields after each step"),
    "skip_clone": Idle("parameters are frozen, so none are copied"),
    "best_of": Refused("sample n completions, and choose", (None, 1)),
    "use_beam_search": Refused("call llm.beam_search"),
    "length_penalty": Refused("BeamSearchParams has it", (None, 1, 1.0)),
    "early_stopping": Refused("BeamSearchParams has it"),
    "guided_decoding": Refused("give structured_outputs"),
    "logprob_token_ids": Refused("ask for logprobs=-1 and pick from them"),
    "prompt_logprob_token_ids": Refused("ask for prompt_logprobs=-1 and pick from them"),
    "prompt_logprob_start": Refused("give prompt_logprobs_start"),
    "flat_logprobs": Refused("logprobs come as one dict a token"),
    "truncate_prompt_tokens": Refused("cut the prompt's token ids before the call"),
    "thinking_token_budget": Refused("max_tokens bounds the whole answer"),
    "repetition_detection": Refused("repetition_penalty discourages repetitions"),
    "skip_reading_prefix_cache": Refused("a cache_salt in the prompt keeps it from others'"),
}
"""Fields of vLLM's `SamplingParams`."""

STRUCTURED_OUTPUTS: Table = {
    "disable_any_whitespace": Idle("JSON is compact unless whitespace=True"),
    "disable_fallback": Idle("nothing falls back: what can't be compiled is an error"),
    "disable_additional_properties": Refused('write "additionalProperties": false in the schema'),
    "whitespace_pattern": Refused("whitespace=True allows blanks and newlines"),
    "structural_tag": Refused("give a grammar"),
}
"""Fields of vLLM's `StructuredOutputsParams`."""

BEAM_SEARCH_PARAMS: Table = {
    "include_stop_str_in_output": Refused(
        "a beam ends in EOS alone, which token_ids have and text has not"
    ),
}
"""Fields of vLLM's `BeamSearchParams`."""

LLM_METHODS: Mapping[str, str] = {
    "encode": "embed, classify, score and reward each say what they give",
    "llm_engine": "llm.engine is the engine, llm.info what was found at its start",
    "model_config": "llm.info has the model's facts",
    "from_engine_args": "give the arguments to LLM",
    "set_tokenizer": "give tokenizer to LLM",
    "get_metrics": "llm.stats() has the counters",
    "sleep": "close an LLM to give its memory back",
    "wake_up": "make a new LLM",
    "start_profile": "use torch.profiler around a call",
    "stop_profile": "use torch.profiler around a call",
    "collective_rpc": "llm.load_weights takes new weights; ranks call nothing else",
    "apply_model": "llm.engine.executor.model is the model",
    "enqueue": "llm.stream takes prompts as they come",
    "wait_for_completion": "llm.stream yields outputs as they finish",
    "preprocess_chat": "llm.tokenizer.render_chat gives the text of a conversation",
    "reset_mm_cache": TEXT_ONLY,
    "get_world_size": "it is the tensor_parallel_size that was given",
}
"""Attributes of vLLM's `LLM` that this one lacks, and why or what to write instead."""


def translate(options: dict[str, Any], table: Table, error: type[Exception]) -> dict[str, Any]:
    """A user's options with our names and values; says in one warning what has no effect.

    Raises:
        error: an option that is refused, or given together with its alias.
    """
    if options.keys().isdisjoint(table):
        return options
    found: dict[str, Any] = {}
    idle: list[str] = []
    for name, value in options.items():
        meaning, value = table.get(name), plain(value)
        match meaning:
            case None:
                found[name] = value
            case Alias(field):
                if field in options:
                    raise error(f"{name} is another name of {field}: give one of them")
                found[field] = value
            case Values(pairs, reported):
                same = (to for one, to in pairs if _equal(one, value) or one == shown(value))
                ours = next(same, value)
                if ours is not DROP:
                    found[name] = ours
                if reported and ours is not value:
                    idle.append(f"{name}={shown(value)}")
            case Idle(why, accepts):
                if not accepts(value):
                    raise error(f"{name}={shown(value)} can't be obeyed: {why}")
                idle.append(f"{name} ({why})")
            case Refused(why, neutral):
                if not any(_equal(one, value) for one in neutral):
                    raise error(f"{name}={shown(value)} can't be obeyed: {why}")
    if idle:
        warn_idle(", ".join(idle))
    return found


def warn_idle(what: str) -> None:
    """Warns of options without effect, at the first line outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("nanoengine."):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"no effect in nanoengine: {what}", stacklevel=level)


def _equal(one: object, value: object) -> bool:
    return type(one) is type(value) and one == value
