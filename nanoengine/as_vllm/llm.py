"""vLLM's LLM: `LLM` with vLLM's arguments in and vLLM's outputs out.

What is computed, when and how is `LLM`'s. Here are other names and forms of it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from typing import Any, Self

from nanoengine.as_vllm.engine_args import asked
from nanoengine.as_vllm.outputs import VLLMBeams, VLLMOutput, beams, request_output
from nanoengine.as_vllm.params import VLLMParams, ours
from nanoengine.errors import RequestError
from nanoengine.llm import LLM
from nanoengine.settings.vllm_names import warn_idle

NEUTRAL = {
    "chat_template_content_format": "auto",
    **dict.fromkeys(("tokenization_kwargs", "mm_processor_kwargs", "trace_headers")),
    **dict.fromkeys(("usage_context", "stat_loggers", "data_parallel_rank")),
    **dict.fromkeys(("reset_running_requests", "reset_connector"), False),
}
"""Options of vLLM's calls that are no options here, and the value that asks for nothing."""


def obeyed(options: dict[str, Any]) -> dict[str, Any]:
    """A call's options without those that ask for nothing.

    Raises:
        RequestError: one asks for something that is not here.
    """
    for name in NEUTRAL.keys() & options.keys():
        if options[name] not in (NEUTRAL[name], None, {}):
            raise RequestError(f"{name}={options[name]!r} can't be obeyed: leave it out")
    return {name: value for name, value in options.items() if name not in NEUTRAL}


class VLLM(LLM):
    """vLLM's LLM."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **asked(options))
        variables = sorted(name for name in os.environ if name.startswith("VLLM_"))
        if variables:
            warn_idle(f"{', '.join(variables)} (nothing reads vLLM's variables)")

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
        prompts = ids if prompts is None else prompts
        found = super().generate(prompts, ours(sampling_params), *args, **obeyed(options))
        failed = [output.error for output in found if output.error]
        if failed:
            message = f"{len(failed)} of {len(found)} requests failed: {failed[0]}"
            warnings.warn(message, stacklevel=2)
        return [request_output(output) for output in found]

    def chat(self, *args: Any, **options: Any) -> list[VLLMOutput]:  # type: ignore[override]
        """As `LLM.chat`."""
        return super().chat(*args, **obeyed(options))  # type: ignore[return-value]

    def beam_search(self, *args: Any, **options: Any) -> list[VLLMBeams]:  # type: ignore[override]
        """As `LLM.beam_search`."""
        tokenizer = self.get_tokenizer()
        return [beams(found, tokenizer) for found in super().beam_search(*args, **options)]

    def get_default_sampling_params(self) -> VLLMParams:  # type: ignore[override]
        """What a call without parameters uses, to be changed."""
        return VLLMParams(**self.info.generation_defaults)

    def reset_prefix_cache(self, **options: Any) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return super().reset_prefix_cache(**obeyed(options))

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks that share the model."""
        return self.config.tensor_parallel_size

    @functools.cached_property
    def llm_engine(self) -> Any:
        """The view of vLLM's engine."""
        from nanoengine.as_vllm.engine import VLLMEngine

        return VLLMEngine(self)

    @property
    def model_config(self) -> Any:
        """The view of vLLM's ModelConfig."""
        return self.llm_engine.model_config
