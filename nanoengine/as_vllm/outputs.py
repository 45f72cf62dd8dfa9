"""What vLLM's programs read: outputs with all of vLLM's fields, which programs may change.

Made by `as_vllm/llm.py` of the outputs of `LLM`, whose fields they have. The others are None,
because nobody can ask for what they tell of: adapters, encoders, transfers.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from nanoengine.errors import NanoEngineError
from nanoengine.features.beam import BeamSearchOutput
from nanoengine.outputs import RequestOutput


class VLLMCompletion(SimpleNamespace):
    """vLLM's CompletionOutput, and `error`: why there is no answer."""

    routed_experts = lora_request = sampling_mask = None
    spec_decode_metrics = weight_versions = None

    def finished(self) -> bool:
        """True if it grows no more."""
        return self.finish_reason is not None


class VLLMOutput(SimpleNamespace):
    """vLLM's RequestOutput; `metrics` are seconds from arrival, as nanoengine measures them."""

    lora_request = encoder_prompt = encoder_prompt_token_ids = None
    kv_transfer_params = ec_transfer_params = None
    num_cache_creation_tokens = prompt_token_id_logprobs = None


class VLLMBeam(SimpleNamespace):
    """vLLM's BeamSearchSequence: `tokens` and `text` begin with the prompt's."""

    lora_request = stop_reason = None


class VLLMBeams(SimpleNamespace):
    """vLLM's BeamSearchOutput: `sequences`."""


def request_output(output: RequestOutput, **changed: Any) -> VLLMOutput:
    """An output as vLLM has it."""
    completions = [VLLMCompletion(**_fields(one)) for one in output.outputs]
    return VLLMOutput(**_fields(output) | {"outputs": completions} | changed)


def beams(output: BeamSearchOutput, tokenizer: Any) -> VLLMBeams:
    """A search as vLLM has it.

    Args:
        tokenizer: the one of transformers.

    Raises:
        NanoEngineError: the search has failed.
    """
    if output.error is not None:
        raise NanoEngineError(f"beam search of prompt {output.index} failed: {output.error}")
    found = VLLMBeams(sequences=[])
    for beam in output.sequences:
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        ours = {"tokens": tokens, "text": tokenizer.decode(tokens)}
        logprob = {"cum_logprob": beam.cumulative_logprob, "finish_reason": beam.finish_reason}
        found.sequences.append(VLLMBeam(**ours, **logprob))
    return found


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
