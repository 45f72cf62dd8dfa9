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

from nanoengine.as_vllm import TABLES, Absent
from nanoengine.as_vllm.engine_args import asked
from nanoengine.as_vllm.outputs import VLLMBeams, VLLMOutput, beams, request_output
from nanoengine.as_vllm.params import VLLMParams, VLLMPooler, ours
from nanoengine.checkpoint.find import resolve_model
from nanoengine.errors import RequestError
from nanoengine.features.pooled_outputs import PoolingOutput, ScoringRequestOutput
from nanoengine.llm import LLM
from nanoengine.llm_mixins import check_lora
from nanoengine.locking import Call
from nanoengine.outputs import OutputBuilder, OutputKind
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.pooling import PoolingParams
from nanoengine.settings.vllm_names import warn_no_effect

KINDS: dict[str, OutputKind] = {"CUMULATIVE": "cumulative", "DELTA": "delta", "FINAL_ONLY": "final"}

NEUTRAL: dict[str, Any] = TABLES["call options"]
"""Options of vLLM's calls that are not options here, with the values that have no effect."""


def obeyed(options: dict[str, Any]) -> dict[str, Any]:
    """A call's options without those that have no effect.

    Raises:
        RequestError: an option is not supported.
    """
    for name in NEUTRAL.keys() & options.keys():
        if options[name] not in (NEUTRAL[name], None, {}):
            raise RequestError(f"{name}={options[name]!r} can't be obeyed: leave it out")
    return {name: value for name, value in options.items() if name not in NEUTRAL}


def require_nothing(options: dict[str, Any]) -> None:
    """Raises RequestError for unsupported values and unknown options."""
    for name in obeyed(options):
        raise RequestError(f"unknown option {name!r}: leave it out")


def answers_of(overrides: Any) -> tuple[str, str] | None:
    """The answers "no" and "yes" of a language model used as a reranker, if `hf_overrides` contain
    nothing else; `LLM` rejects other overrides."""
    match overrides:
        case {"classifier_from_token": [str(no), str(yes)], **others}:
            kinds = dict(others)
            kinds.pop("architectures", None)
            if kinds in ({"is_original_qwen3_reranker": True}, {"method": "from_2_way_softmax"}):
                return no, yes
    return None


PLAIN, PLAIN_POOLING = SamplingParams(), PoolingParams()

PROCESSING = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "bad_words", "logit_bias", "allowed_token_ids"),
    *("structured_outputs", "logits_processors"),
)
"""Fields, in addition to top_k, that change the logits before sampling."""


def require_raw(params: Any) -> None:
    """Raises RequestError if processed logprobs would differ from the raw ones, because only raw
    logprobs are available."""
    for one in params if isinstance(params, list) else [params]:
        values = [(name, getattr(one, name)) for name in PROCESSING]
        changed = [name for name, value in values if value not in (getattr(PLAIN, name), (), {})]
        changed += ["top_k"] if one.top_k > 0 else []
        if changed and one.logprobs is not None:
            raise RequestError(
                f"logprobs are those of the model's own logits, and with {', '.join(changed)} those"
                " of logprobs_mode='processed_logprobs' are others: leave one of them out"
            )


class VLLM(LLM):
    """vLLM's LLM."""

    def __init__(self, model: str, **options: Any) -> None:
        self._answers = answers_of(options.get("hf_overrides"))
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
                self._pooler, self._task = pooler.ours(), pooler.task
        if options.get("logits_processors"):
            from nanoengine.as_vllm.processors import stages

            options["logits_processors"] = stages(
                options["logits_processors"], options.get("device")
            )
        super().__init__(model, **asked(options))
        variables = sorted(name for name in os.environ if name.startswith("VLLM_"))
        if variables:
            warn_no_effect(f"{', '.join(variables)} (nothing reads vLLM's variables)")

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Creates an LLM from EngineArgs."""
        return cls(**dataclasses.asdict(engine_args))

    def params(self, given: Any) -> Any:
        """Converts parameters of a call for `LLM.generate`."""
        found = ours(given)
        if self._wants_processed:
            require_raw(found or self.default_sampling_params)
        return found

    def _pool(
        self, ask: Any, prompts: Any, pooling_params: Any = None, **options: Any
    ) -> list[Any]:
        if not isinstance(pooling_params, PoolingParams | None):
            told = f"pooling_params must be one PoolingParams for all, got {pooling_params!r}"
            raise RequestError(told)
        given, cut = dataclasses.asdict(pooling_params or PLAIN_POOLING), {}
        if (options.get("tokenization_kwargs") or {}).keys() == {"truncate_prompt_tokens"}:
            cut = options.pop("tokenization_kwargs")
        given = {name: value for name, value in given.items() if value is not None} | cut
        asked = ask(prompts, dataclasses.replace(self._pooler, **given))
        return asked.finish(super().generate(asked.prompts, asked.params, **obeyed(options)))

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
            dataclasses.replace(one, outputs=PoolingOutput(data=torch.from_numpy(one.outputs.data)))
            if one.error is None
            else one
            for one in found
        ]

    def score(self, data_1: Any, data_2: Any, **options: Any) -> list[ScoringRequestOutput]:
        """Like `LLM.score`, with the answers from `hf_overrides`.

        Raises:
            RequestError: the PoolerConfig has token vectors, which vLLM scores in another way.
        """
        if self._task == "token_embed":
            raise RequestError("a score of tokens' vectors is not implemented: leave out task")
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
            raise RequestError("give prompts, or prompt_token_ids in their place")
        prompts, params = ids if prompts is None else prompts, self.params(sampling_params)
        found = super().generate(prompts, params, *args, **obeyed(options))
        failed = [output.error for output in found if output.error]
        if failed:
            message = f"{len(failed)} of {len(found)} requests failed: {failed[0]}"
            warnings.warn(message, stacklevel=2)
        return [request_output(output) for output in found]

    def chat(self, *args: Any, **options: Any) -> list[VLLMOutput]:  # type: ignore[override]
        """Like `LLM.chat`."""
        return super().chat(*args, **obeyed(options))  # type: ignore[return-value]

    def beam_search(self, *args: Any, **options: Any) -> list[VLLMBeams]:  # type: ignore[override]
        """Like `LLM.beam_search`."""
        tokenizer = self.get_tokenizer()
        return [beams(found, tokenizer) for found in super().beam_search(*args, **options)]

    def get_default_sampling_params(self) -> VLLMParams:  # type: ignore[override]
        """The parameters of a call without any, as a mutable object."""
        return VLLMParams(**self.info.generation_defaults)

    def reset_prefix_cache(self, **options: Any) -> bool:
        """Like `LLM.reset_prefix_cache`."""
        return super().reset_prefix_cache(**obeyed(options))

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
        require_nothing(options)
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
        require_nothing(options)
        llm = self._llm
        (read,) = llm.require_reader().read_all([prompt], [llm.params(params)], priority, "raise")
        if self._call is None or llm._calls.latest is not self._call:
            self._call, self._running = llm._calls.begin(), {}
        if any(name == request_id for name, *_ in self._running.values()):
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        kind = KINDS[params.output_kind.name]
        with self._call.held_engine() as engine:
            builder = llm._queue(engine, read, kind)  # type: ignore[arg-type]
        self._running[builder.request.request_id] = request_id, builder, kind
        return request_id

    def step(self) -> list[VLLMOutput]:
        """Runs a step; returns the outputs of requests that have finished or grown."""
        if self._call is None:
            return []
        with self._call.held_engine():
            shown = [self._running.pop(one) for one in self._call.step(self._running)]
            for name, builder, kind in self._running.values():
                if kind != "final" and builder.has_grown():
                    shown.append((name, builder, kind))
            return [request_output(one.build(), request_id=name) for name, one, _ in shown]

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
        view, inner = Absent("model", (), {"load_weights": self._llm.load_weights, **why}), "model"
        for outer in ("model_runner", "driver_worker", "model_executor"):
            view, inner = Absent(outer, (), {inner: view, **why}), outer
        return view

    @model_executor.deleter
    def model_executor(self) -> None:
        self._llm.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nanoengine does not offer vLLM's llm_engine.{name}: see llm.engine")


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
        raise AttributeError(f"nanoengine does not offer vLLM's model_config.{name}: see llm.info")
