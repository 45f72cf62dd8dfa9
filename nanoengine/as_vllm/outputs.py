"""What vLLM's programs read: its outputs with all their fields, which programs may change.

Made by `as_vllm/llm.py` of the outputs of `LLM`. A field is None where it tells of what nobody can
ask for here: adapters, encoders, transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import NanoEngineError
from nanoengine.features.beam import BeamSearchOutput
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass
class VLLMCompletion:
    """vLLM's CompletionOutput, and `error`: why there is no answer."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    routed_experts: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None
    error: str | None = None

    def finished(self) -> bool:
        """True if it grows no more."""
        return self.finish_reason is not None


@dataclass
class VLLMOutput:
    """vLLM's RequestOutput; `metrics` are seconds from arrival, as nanoengine measures them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[VLLMCompletion]
    finished: bool
    metrics: Any = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


@dataclass
class VLLMBeam:
    """vLLM's BeamSearchSequence: `tokens` and `text` begin with the prompt's."""

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str
    lora_request: None = None
    stop_reason: None = None


@dataclass
class VLLMBeams:
    """vLLM's BeamSearchOutput."""

    sequences: list[VLLMBeam]


def completion(output: CompletionOutput) -> VLLMCompletion:
    """One completion as vLLM has it."""
    names = ("index", "text", "token_ids", "cumulative_logprob", "logprobs")
    names += ("finish_reason", "stop_reason", "error")
    return VLLMCompletion(**{name: getattr(output, name) for name in names})


def request_output(output: RequestOutput, request_id: str | None = None) -> VLLMOutput:
    """An output as vLLM has it, under the caller's name for it."""
    return VLLMOutput(
        request_id=output.request_id if request_id is None else request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=output.prompt_logprobs,
        outputs=list(map(completion, output.outputs)),
        finished=output.finished,
        metrics=output.metrics,
        num_cached_tokens=output.num_cached_tokens,
    )


def beams(output: BeamSearchOutput, tokenizer: Any) -> VLLMBeams:
    """A search as vLLM has it; a search that failed raises.

    Args:
        tokenizer: the one of transformers.
    """
    if output.error is not None:
        raise NanoEngineError(f"beam search of prompt {output.index} failed: {output.error}")
    found = []
    for beam in output.sequences:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        text = tokenizer.decode(tokens)
        found.append(VLLMBeam(tokens, beam.cumulative_logprob, text, beam.finish_reason))
    return VLLMBeams(found)
