"""vLLM's LLM, LLMEngine and ModelConfig: `LLM` with vLLM's arguments and outputs.

All computation is `LLM`'s; this file converts names and formats. The engine's requests are one call
on the LLM, so any other call ends them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Iterable
from typing import Any, Self

from nanoengine.as_vllm import TABLES, Unsupported
from nanoengine.as_vllm.engine_args import non_default_options
from nanoengine.as_vllm.outputs import VLLMBeams, VLLMOutput, beams, request_output
from nanoengine.as_vllm.params import VLLMParams, VLLMPooler, to_native
from nanoengine.checkpoint.find import resolve_model
from nanoengine.errors import RequestError
from nanoengine.features.pooled_outputs import PoolingOutput, ScoringRequestOutput
from nanoengine.llm import LLM
from nanoengine.llm_mixins import check_lora
from nanoengine.locking import Call
from nanoengine.outputs import OutputBuilder, OutputKind, RequestOutput
from nanoengine.runner.sampling.greedy import edits
from nanoengine.settings.params import DEFAULTS
from nanoengine.settings.pooling import PoolingParams
from nanoengine.settings.vllm_names import warn_no_effect

KINDS: dict[str, OutputKind] = {"CUMULATIVE": "cumulative", "DELTA": "delta", "FINAL_ONLY": "final"}

NO_EFFECT_VALUES: dict[str, Any] = TABLES["call options"]
"""Options of vLLM's calls that are not options here, with the values that have no effect."""


def supported_options(options: dict[str, Any]) -> dict[str, Any]:
    """A call's options without those that have no effect.

    Raises:
        RequestError: an option is not supported.
    """
    for name in NO_EFFECT_VALUES.keys() & options.keys():
        if options[name] not in (NO_EFFECT_VALUES[name], None, {}):
            raise RequestError(f"{name}={options[name]!r} is not supported: remove it")
    return {name: value for name, value in options.items() if name not in NO_EFFECT_VALUES}


def reject_options(options: dict[str, Any]) -> None:
    """Raises RequestError for unsupported values and unknown options."""
    for name in supported_options(options):
        raise RequestError(f"unknown option {name!r}: remove it")


def reranker_answers(overrides: Any) -> tuple[str, str] | None:
    """The answers "no" and "yes" of a language model used as a reranker, if `hf_overrides` contain
    nothing else; `LLM` rejects other overrides."""
    match overrides:
        case {"classifier_from_token": [str(no), str(yes)], **others}:
            kinds = dict(others)
            kinds.pop("architectures", None)
            if kinds in ({"is_original_qwen3_reranker": True}, {"method": "from_2_way_softmax"}):
                return no, yes
    return None


def outputs_of(found: list[RequestOutput]) -> list[VLLMOutput]:
    """vLLM's outputs, after a warning if requests failed."""
    if failed := [output.error for output in found if output.error]:
        message = f"{len(failed)} of {len(found)} requests failed: {failed[0]}"
        warnings.warn(message, stacklevel=3)
    return [request_output(output) for output in found]


PLAIN_POOLING = PoolingParams()


def require_raw(params: Any) -> None:
    """Raises RequestError if processed logprobs would differ from the raw ones, because only raw
    logprobs are available."""
    for p in params if isinstance(params, list) else [params]:
        filters = ("temperature", "top_p", "min_p")
        changed = [n for n in filters if getattr(p, n) != DEFAULTS[n]] + edits(p)
        changed += ["top_k"] if p.top_k > 0 else []
        if changed and p.logprobs is not None:
            raise RequestError(
                "logprobs_mode='processed_logprobs' is not supported for requests with logprobs and"
                f" {', '.join(changed)}: remove one of these options"
            )


class VLLM(LLM):
    """vLLM's LLM."""

    def __init__(self, model: str, **options: Any) -> None:
        self._answers = reranker_answers(options.get("hf_overrides"))
        self._pooler, self._task = PLAIN_POOLING, None
        if self._answers:
            del options["hf_overrides"]
        self._wants_processed = options.get("logprobs_mode") == "processed_logprobs"
        if self._wants_processed:
            del options["logprobs_mode"]
        for name in ("pooler_config", "override_pooler_config"):
            pooler = options.pop(name, None)
            if pooler is not None:
                pooler = VLLMPooler(**pooler) if isinstance(pooler, dict) else pooler
                self._pooler, self._task = pooler.to_native(), pooler.task
        if options.get("logits_processors"):
            from nanoengine.as_vllm.processors import wrap_processors

            options["logits_processors"] = wrap_processors(
                options["logits_processors"], options.get("device")
            )
        super().__init__(model, **non_default_options(options))
        variables = sorted(name for name in os.environ if name.startswith("VLLM_"))
        if variables:
            warn_no_effect(f"{', '.join(variables)} (vLLM's environment variables are not read)")

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Creates an LLM from EngineArgs."""
        return cls(**dataclasses.asdict(engine_args))

    def params(self, sampling_params: Any) -> Any:
        """Converts parameters of a call for `LLM.generate`."""
        found = to_native(sampling_params)
        if self._wants_processed:
            require_raw(found or self.default_sampling_params)
        return found

    def _pool(
        self, ask: Any, prompts: Any, pooling_params: Any = None, **options: Any
    ) -> list[Any]:
        if not isinstance(pooling_params, PoolingParams | None):
            message = f"pooling_params must be one PoolingParams for all, got {pooling_params!r}"
            raise RequestError(message)
        fields, cut = dataclasses.asdict(pooling_params or PLAIN_POOLING), {}
        if (options.get("tokenization_kwargs") or {}).keys() == {"truncate_prompt_tokens"}:
            cut = options.pop("tokenization_kwargs")
        fields = {name: value for name, value in fields.items() if value is not None} | cut
        requests = ask(prompts, dataclasses.replace(self._pooler, **fields))
        outputs = super().generate(requests.prompts, requests.params, **supported_options(options))
        return requests.finish(outputs)

    def encode(
        self, prompts: Any, pooling_params: Any = None, *, pooling_task: Any = None, **options: Any
    ) -> list[Any]:
        """The results of `embed` or `classify` as tensors; with token_... tasks, one per token.

        Args:
            pooling_task: None: like `embed`, as in vLLM 0.6.
        """
        import torch

        if pooling_task is None:
            return self.embed(prompts, pooling_params=pooling_params, **options)
        ask = functools.partial(self._pools.encode, pooling_task)
        found = self._pool(ask, prompts, pooling_params, **options)
        return [
            dataclasses.replace(o, outputs=PoolingOutput(data=torch.from_numpy(o.outputs.data)))
            if o.error is None
            else o
            for o in found
        ]

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[ScoringRequestOutput]:
        """Like `LLM.score`, with the answers from `hf_overrides`.

        Raises:
            RequestError: the PoolerConfig has token vectors, which vLLM scores in another way.
        """
        if self._task == "token_embed":
            raise RequestError("score() does not support task='token_embed': remove task")
        return super().score(data_1, data_2, **{"answers": self._answers} | options)

    def generate(  # type: ignore[override]
        self, prompts: Any = None, sampling_params: Any = None, *args: Any, **options: Any
    ) -> list[VLLMOutput]:
        """Like `LLM.generate`, with a warning if a request fails while it runs.

        Args:
            options: also vLLM's; `prompt_token_ids` are prompts in its older versions.
        """
        ids = options.pop("prompt_token_ids", None)
        if (prompts is None) == (ids is None):
            raise RequestError("give either prompts or prompt_token_ids")
        prompts, params = ids if prompts is None else prompts, self.params(sampling_params)
        return outputs_of(super().generate(prompts, params, *args, **supported_options(options)))

    def enqueue(
        self, prompts: Any, sampling_params: Any = None, *args: Any, **options: Any
    ) -> list[str]:
        """Like `LLM.enqueue`."""
        params = self.params(sampling_params)
        return super().enqueue(prompts, params, *args, **supported_options(options))

    def enqueue_chat(self, *args: Any, **options: Any) -> list[str]:
        """Like `LLM.enqueue_chat`."""
        return super().enqueue_chat(*args, **supported_options(options))

    def wait_for_completion(self, *args: Any, **options: Any) -> list[VLLMOutput]:  # type: ignore[override]
        """Like `LLM.wait_for_completion`, with a warning as in `generate`."""
        return outputs_of(super().wait_for_completion(*args, **options))

    def chat(self, *args: Any, **options: Any) -> list[VLLMOutput]:  # type: ignore[override]
        """Like `LLM.chat`."""
        return super().chat(*args, **supported_options(options))  # type: ignore[return-value]

    def beam_search(self, *args: Any, **options: Any) -> list[VLLMBeams]:  # type: ignore[override]
        """Like `LLM.beam_search`."""
        tokenizer = self.get_tokenizer()
        return [beams(found, tokenizer) for found in super().beam_search(*args, **options)]

    def get_default_sampling_params(self) -> VLLMParams:  # type: ignore[override]
        """The parameters of a call without any, as a mutable object."""
        return VLLMParams(**self.info.generation_defaults)

    def reset_prefix_cache(self, **options: Any) -> bool:
        """Like `LLM.reset_prefix_cache`."""
        return super().reset_prefix_cache(**supported_options(options))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of ranks that share the model."""
        return self.config.tensor_parallel_size

    @functools.cached_property
    def llm_engine(self) -> VLLMEngine:
        """An object with the interface of vLLM's engine."""
        return VLLMEngine(self)

    @property
    def model_config(self) -> ModelView:
        """An object with the interface of vLLM's ModelConfig."""
        return self.llm_engine.model_config


class VLLMEngine:
    """vLLM's LLMEngine: each step returns the outputs of requests that have grown."""

    def __init__(self, llm: VLLM) -> None:
        self._llm = llm
        self._call: Call[Any] | None = None
        self._running: dict[str, tuple[str, OutputBuilder, OutputKind]] = {}
        self.model_config = ModelView(llm)

    @classmethod
    def from_engine_args(cls, engine_args: Any, **options: Any) -> Any:
        """Creates an LLM and returns its engine."""
        reject_options(options)
        return VLLM.from_engine_args(engine_args).llm_engine

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: VLLMParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        priority: int = 0,
        **options: Any,
    ) -> str:
        """Queues a request with the caller's id."""
        check_lora(lora_request)
        reject_options(options)
        llm = self._llm
        (read,) = llm.require_reader().read_all([prompt], [llm.params(params)], priority, "raise")
        if self._call is None or llm._calls.latest is not self._call:
            self._call, self._running = llm._calls.begin(), {}
        if any(name == request_id for name, *_ in self._running.values()):
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        kind = KINDS[params.output_kind.name]
        with self._call.locked_engine() as engine:
            builder = llm._queue(engine, read, kind)  # type: ignore[arg-type]
        self._running[builder.request.request_id] = request_id, builder, kind
        return request_id

    def step(self) -> list[VLLMOutput]:
        """Runs a step; returns the outputs of requests that have finished or grown."""
        if self._call is None:
            return []
        with self._call.locked_engine():
            grown = [self._running.pop(key) for key in self._call.step(self._running)]
            for name, builder, kind in self._running.values():
                if kind != "final" and builder.has_grown():
                    grown.append((name, builder, kind))
            return [request_output(b.build(), request_id=name) for name, b, _ in grown]

    def has_unfinished_requests(self) -> bool:
        """True while there is a step to run."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Number of queued and running requests."""
        return len(self._running)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests without further outputs."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        for key in [key for key, (name, *_) in self._running.items() if name in names]:
            self._llm.engine.abort(key)
            del self._running[key]

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self._llm.get_tokenizer()

    def reset_prefix_cache(self, **options: Any) -> bool:
        """Like `LLM.reset_prefix_cache`."""
        return self._llm.reset_prefix_cache(**options)

    @property
    def model_executor(self) -> Any:
        """Provides `driver_worker.model_runner.model.load_weights` only.

        Deleting it frees the memory.
        """
        why = {"why": "llm.engine.executor.model is the model"}
        attributes: dict[str, Any] = {"load_weights": self._llm.load_weights}
        for name in ("model", "model_runner", "driver_worker", "model_executor"):
            attributes = {name: Unsupported(name, (), attributes | why)}
        return attributes["model_executor"]

    @model_executor.deleter
    def model_executor(self) -> None:
        self._llm.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM's llm_engine.{name} is not supported: see llm.engine")


class ModelView:
    """The attributes of vLLM's ModelConfig that programs read."""

    is_multimodal_model, runner_type = False, "generate"

    def __init__(self, llm: VLLM) -> None:
        self._info, self._config = llm.info, llm.config
        self.model, self.max_model_len = llm.config.model, llm.info.max_model_len
        self.tokenizer = llm.config.tokenizer or llm.config.model
        self.trust_remote_code, self.seed = llm.config.trust_remote_code, llm.config.seed

    @property
    def dtype(self) -> Any:
        """The torch.dtype of the computation."""
        import torch

        return getattr(torch, self._info.dtype)

    @functools.cached_property
    def hf_config(self) -> Any:
        """The configuration as loaded by transformers."""
        from transformers import AutoConfig

        trust = self.trust_remote_code
        return AutoConfig.from_pretrained(resolve_model(self._config), trust_remote_code=trust)

    def get_vocab_size(self) -> int:
        """The vocabulary size."""
        return self._info.vocab_size

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM's model_config.{name} is not supported: see llm.info")
