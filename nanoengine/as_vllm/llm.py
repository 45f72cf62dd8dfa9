"""vLLM's LLM and LLMEngine: `LLM` with vLLM's arguments in and vLLM's outputs out.

What is computed, when and how is `LLM`'s. Here are only other names and forms of it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Iterable
from typing import Any, Self

from nanoengine.as_vllm.engine_args import asked
from nanoengine.as_vllm.outputs import VLLMBeams, VLLMOutput, beams, request_output
from nanoengine.as_vllm.params import RequestOutputKind, VLLMParams, ours
from nanoengine.errors import RequestError
from nanoengine.llm import LLM
from nanoengine.llm_calls import check_lora
from nanoengine.outputs import OutputBuilder, OutputKind
from nanoengine.settings.vllm_names import warn_idle
from nanoengine.turns import Call


class VLLM(LLM):
    """vLLM's LLM."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **asked(options))
        variables = sorted(name for name in os.environ if name.startswith("VLLM_"))
        if variables:
            warn_idle(f"{', '.join(variables)} (variables of vLLM's are not read)")

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """An LLM of an EngineArgs."""
        return cls(**dataclasses.asdict(engine_args))

    def generate(  # type: ignore[override]
        self, prompts: Any = None, sampling_params: Any = None, *args: Any, **options: Any
    ) -> list[VLLMOutput]:
        """As `LLM.generate`; a request that fails while it runs is warned of, too.

        Args:
            options: vLLM's too; `prompt_token_ids` are prompts of its older versions.
        """
        ids = options.pop("prompt_token_ids", None)
        if (prompts is None) == (ids is None):
            raise RequestError("give prompts, or prompt_token_ids in their place")
        found = super().generate(
            ids if prompts is None else prompts, ours(sampling_params), *args, **_obeyed(options)
        )
        outputs = list(map(request_output, found))
        failed = [output.error for output in found if output.error]
        if failed:
            warnings.warn(f"{len(failed)} of {len(found)} requests failed: {failed[0]}", 2)
        return outputs

    def chat(  # type: ignore[override]
        self, messages: Any, sampling_params: Any = None, *args: Any, **options: Any
    ) -> list[VLLMOutput]:
        """As `LLM.chat`."""
        return super().chat(messages, sampling_params, *args, **_obeyed(options))

    def beam_search(self, *args: Any, **options: Any) -> list[VLLMBeams]:  # type: ignore[override]
        """As `LLM.beam_search`."""
        tokenizer = self.get_tokenizer()
        return [beams(found, tokenizer) for found in super().beam_search(*args, **options)]

    def get_default_sampling_params(self) -> VLLMParams:  # type: ignore[override]
        """What a call without parameters uses, to be changed."""
        return VLLMParams(**self.info.generation_defaults)

    def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Drops all cached prefixes; refuses (False) while requests run."""
        if reset_running_requests or reset_connector:
            raise RequestError("reset_prefix_cache drops what no request uses, and takes no options")
        return super().reset_prefix_cache()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks that share the model."""
        return self.config.tensor_parallel_size

    @functools.cached_property
    def llm_engine(self) -> VLLMEngine:
        """The view of vLLM's engine."""
        return VLLMEngine(self)

    @property
    def model_config(self) -> ModelView:
        """The view of vLLM's ModelConfig."""
        return self.llm_engine.model_config


class ModelView:
    """What programs read of vLLM's ModelConfig."""

    def __init__(self, llm: VLLM) -> None:
        self.model, self.max_model_len = llm.config.model, llm.info.max_model_len
        self.tokenizer = llm.config.tokenizer or llm.config.model
        self.trust_remote_code = llm.config.trust_remote_code
        self.revision, self.seed = llm.config.revision, llm.config.seed
        self.is_multimodal_model, self.runner_type = False, "generate"
        self._info, self._config = llm.info, llm.config

    @property
    def dtype(self) -> Any:
        """The torch.dtype that the model computes in."""
        import torch

        return getattr(torch, self._info.dtype)

    @functools.cached_property
    def hf_config(self) -> Any:
        """The configuration of transformers."""
        from transformers import AutoConfig

        from nanoengine.checkpoint.find import resolve_model

        directory = resolve_model(self._config)
        return AutoConfig.from_pretrained(directory, trust_remote_code=self.trust_remote_code)

    def get_vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return self._info.vocab_size

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM's model_config.{name} is not offered: see llm.info, llm.config")


@dataclasses.dataclass
class Running:
    """A request of `VLLMEngine`."""

    name: str
    builder: OutputBuilder
    kind: OutputKind


class VLLMEngine:
    """vLLM's LLMEngine: requests in, a step at a time, outputs of what has grown."""

    def __init__(self, llm: VLLM) -> None:
        self._llm = llm
        self._call: Call[Any] | None = None
        self._running: dict[str, Running] = {}
        self.model_config = ModelView(llm)

    @classmethod
    def from_engine_args(cls, engine_args: Any, **options: Any) -> VLLMEngine:
        """The engine of a new LLM; `usage_context` and other options must be None."""
        _obeyed(options)
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
        """Queues a request under the caller's name; any other call on the LLM cuts it off."""
        check_lora(lora_request)
        _obeyed(options)
        if any(one.name == request_id for one in self._running.values()):
            raise RequestError(f"request_id {request_id!r} is in use; choose another")
        llm = self._llm
        (read,) = llm.open_reader().read_all([prompt], [ours(params)], priority, "raise")
        if self._call is None or llm._calls.latest is not self._call:
            self._call, self._running = llm._calls.begin(), {}
        asked_kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)
        kind = KINDS[asked_kind.name]
        with self._call.turn() as engine:
            builder = llm._queue(engine, read, kind)  # type: ignore[arg-type]
        self._running[builder.request.request_id] = Running(request_id, builder, kind)
        return request_id

    def step(self) -> list[VLLMOutput]:
        """Runs a step; the outputs of what has ended or grown by it."""
        if self._call is None:
            return []
        with self._call.turn():
            ended = [self._running.pop(name) for name in self._call.step(self._running)]
            grown = [
                one
                for one in self._running.values()
                if one.kind != "final" and one.builder.has_grown()
            ]
            return [request_output(one.builder.build(), one.name) for one in ended + grown]

    def has_unfinished_requests(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Requests that are queued or run."""
        return len(self._running)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; nothing more is heard of them."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        for ours_id in [i for i, one in self._running.items() if one.name in names]:
            self._llm.engine.abort(ours_id)
            del self._running[ours_id]

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self._llm.get_tokenizer()

    def reset_prefix_cache(self, *args: Any, **options: Any) -> bool:
        """As `VLLM.reset_prefix_cache`."""
        return self._llm.reset_prefix_cache(*args, **options)

    @property
    def model_executor(self) -> Executor:
        """Nothing to look into; deleting it gives the memory back."""
        return Executor()

    @model_executor.deleter
    def model_executor(self) -> None:
        self._llm.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vLLM's llm_engine.{name} is not offered: llm.engine is the engine")


KINDS: dict[str, OutputKind] = {"CUMULATIVE": "cumulative", "DELTA": "delta", "FINAL_ONLY": "final"}


class Executor:
    """vLLM's model executor, of which nothing is shown."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"vLLM's model_executor.{name} is not offered: llm.engine.executor.model is the model"
        )


def _obeyed(options: dict[str, Any]) -> dict[str, Any]:
    """A call's options without those of vLLM's that ask for nothing here."""
    neutral = {
        "chat_template_content_format": "auto",
        **dict.fromkeys(("tokenization_kwargs", "mm_processor_kwargs", "usage_context")),
        **dict.fromkeys(("trace_headers", "stat_loggers", "data_parallel_rank")),
    }
    for name in neutral.keys() & options.keys():
        if options[name] not in (neutral[name], None, {}):
            raise RequestError(f"{name}={options[name]!r} can't be obeyed: leave it out")
    return {name: value for name, value in options.items() if name not in neutral}
