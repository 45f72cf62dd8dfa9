"""Which of vLLM's modules and names there are, and what each means here: tables alone.

Read by `Finder` and `Stand`. vLLM has moved names between modules, so each module gives all of
them: a program for any of its versions finds what it imports. Source: vLLM 0.33 and before.
"""

from __future__ import annotations

from typing import Any

from nanoengine.settings.vllm_names import GENERATES, LORA, TEXT_ONLY

VERSION = "0.33.0"
"""Of the API that is meant: `vllm.__version__`, and what importlib.metadata tells."""

MODULES = frozenset(
    """
    vllm vllm.beam_search vllm.config vllm.distributed vllm.distributed.parallel_state vllm.engine
    vllm.engine.arg_utils vllm.engine.async_llm_engine vllm.engine.llm_engine vllm.entrypoints
    vllm.entrypoints.chat_utils vllm.entrypoints.llm vllm.envs vllm.inputs vllm.inputs.data
    vllm.logger vllm.logprobs vllm.lora vllm.lora.request vllm.model_executor
    vllm.model_executor.guided_decoding vllm.model_executor.models
    vllm.model_executor.parallel_utils vllm.model_executor.parallel_utils.parallel_state
    vllm.multimodal vllm.outputs vllm.platforms vllm.pooling_params vllm.renderers
    vllm.renderers.hf vllm.sampling_params vllm.sequence vllm.tokenizers vllm.transformers_utils
    vllm.transformers_utils.tokenizer vllm.usage vllm.usage.usage_lib vllm.utils
    vllm.utils.argparse_utils vllm.v1 vllm.v1.engine vllm.v1.engine.async_llm
    vllm.v1.engine.llm_engine vllm.v1.sample vllm.v1.sample.logits_processor vllm.version
    nanovllm nanovllm.llm nanovllm.sampling_params
    """.split()
)


def _table(text: str) -> dict[str, str]:
    """Lines of a module and its names, as name -> "module:name"."""
    found = {}
    for line in text.split("\n"):
        module, *names = line.split() or [""]
        for name in names:
            name, _, ours = name.partition("=")
            found[name] = f"nanoengine.{module}:{ours or name}"
    return found


HERE = _table(
    """
    as_vllm.llm LLM=VLLM LLMEngine=VLLMEngine
    as_vllm.params SamplingParams=VLLMParams RequestOutputKind
    as_vllm.params StructuredOutputsParams=VLLMForm GuidedDecodingParams=VLLMForm
    as_vllm.outputs CompletionOutput=VLLMCompletion RequestOutput=VLLMOutput
    as_vllm.outputs BeamSearchSequence=VLLMBeam BeamSearchOutput=VLLMBeams
    as_vllm.engine_args EngineArgs FlexibleArgumentParser
    as_vllm.functions get_tokenizer cached_get_tokenizer=get_tokenizer init_logger random_uuid
    as_vllm.functions resolve_chat_template resolve_hf_chat_template=resolve_chat_template
    as_vllm.functions destroy_model_parallel=destroy destroy_distributed_environment=destroy
    as_vllm.functions cleanup_dist_env_and_memory=destroy current_platform
    features.beam BeamSearchParams
    outputs Logprob
    text.prompt_forms TextPrompt TokensPrompt
    """
)

NANO = _table("as_vllm.nano LLM=NanoLLM SamplingParams=NanoParams")
"""Of nano-vLLM."""

PLAIN: dict[str, Any] = {
    "__version__": VERSION,
    "VLLM_VERSION": VERSION,
    "__version_tuple__": tuple(map(int, VERSION.split("."))),
    "PromptType": Any,
    "SampleLogprobs": list[dict[int, Any]],
    "PromptLogprobs": list[dict[int, Any] | None],
    "AnyTokenizer": Any,
    "TokenizerLike": Any,
}

SERVES = "nothing is served; LLM, or LLMEngine with its step(), runs requests in this process"
RANKS = "tensor_parallel_size of LLM gives ranks, and no process group is shown"
CONFIGS = "the keyword arguments of LLM are the configuration"

ABSENT: dict[str, str] = {
    **dict.fromkeys("LoRARequest LoRAConfig".split(), LORA),
    **dict.fromkeys(
        "PoolingParams PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput"
        " ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput"
        " PoolerConfig".split(),
        GENERATES,
    ),
    **dict.fromkeys("AsyncLLMEngine AsyncEngineArgs AsyncLLM UsageContext".split(), SERVES),
    **dict.fromkeys("MULTIMODAL_REGISTRY MultiModalDataDict EmbedsPrompt".split(), TEXT_ONLY),
    **dict.fromkeys(
        "get_world_group get_tp_group get_pp_group init_distributed_environment"
        " initialize_model_parallel initialize_ray_cluster get_tensor_model_parallel_rank"
        " get_tensor_model_parallel_world_size".split(),
        RANKS,
    ),
    **dict.fromkeys(
        "VllmConfig ModelConfig CompilationConfig KVTransferConfig KVEventsConfig"
        " StructuredOutputsConfig".split(),
        CONFIGS,
    ),
    "ModelRegistry": "models are nanoengine's own",
    **dict.fromkeys(
        "LogitsProcessor AdapterLogitsProcessor RequestLogitsProcessor BatchUpdate"
        " MoveDirectionality".split(),
        "logits_processors of SamplingParams takes functions",
    ),
    "RepetitionDetectionParams": "repetition_penalty discourages repetitions",
}
"""Names that may be imported and named in annotations, and raise when they are used."""
