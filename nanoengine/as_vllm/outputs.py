"""Outputs with all of vLLM's fields; they are mutable, as in vLLM.

Created by `as_vllm/llm.py` from the outputs of `LLM`. Fields of unsupported features (adapters,
encoders, transfers) are None.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from nanoengine.errors import NanoEngineError
from nanoengine.features.beam import BeamSearchOutput
from nanoengine.outputs import RequestOutput


class VLLMCompletion(SimpleNamespace):
    """vLLM's CompletionOutput, with `error`: why there is no answer."""

    routed_experts = lora_request = sampling_mask = None
    spec_decode_metrics = weight_versions = None

    def finished(self) -> bool:
        """True if it is complete."""
        return self.finish_reason is not None


class VLLMOutput(SimpleNamespace):
    """vLLM's RequestOutput; `metrics` are seconds since arrival, as measured by nanoengine."""

    lora_request = encoder_prompt = encoder_prompt_token_ids = None
    kv_transfer_params = ec_transfer_params = None
    num_cache_creation_tokens = prompt_token_id_logprobs = None


class VLLMBeam(SimpleNamespace):
    """vLLM's BeamSearchSequence: `tokens` and `text` include the prompt."""

    lora_request = stop_reason = None


class VLLMBeams(SimpleNamespace):
    """vLLM's BeamSearchOutput: `sequences`."""


def request_output(output: RequestOutput, **changed: Any) -> VLLMOutput:
    """Converts an output to vLLM's format."""
    completions = [VLLMCompletion(**_fields(c)) for c in output.outputs]
    return VLLMOutput(**_fields(output) | {"outputs": completions} | changed)


def beams(output: BeamSearchOutput, tokenizer: Any) -> VLLMBeams:
    """Converts the result of a beam search to vLLM's format.

    Args:
        tokenizer: the transformers tokenizer.

    Raises:
        NanoEngineError: the search has failed.
    """
    if output.error is not None:
        raise NanoEngineError(f"beam search of prompt {output.index} failed: {output.error}")
    found = VLLMBeams(sequences=[])
    for beam in output.sequences:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        text = {"tokens": tokens, "text": tokenizer.decode(tokens)}
        logprob = {"cum_logprob": beam.cumulative_logprob, "finish_reason": beam.finish_reason}
        found.sequences.append(VLLMBeam(**text, **logprob))
    return found


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
