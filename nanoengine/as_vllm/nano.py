"""nano-vLLM's LLM and SamplingParams: outputs are dicts with a text and its token ids."""

from __future__ import annotations

from typing import Any

from nanoengine.as_vllm.params import VLLMParams, to_native
from nanoengine.errors import NanoEngineError
from nanoengine.llm import LLM

NAMES = {"kvcache_block_size": "block_size", "num_kvcache_blocks": "num_kv_blocks"}
"""Arguments of nano-vLLM whose names differ."""


class NanoParams(VLLMParams):
    """nano-vLLM's SamplingParams, with max_tokens=64 by default."""

    def __init__(self, temperature: float = 1.0, max_tokens: int = 64, ignore_eos: bool = False):
        super().__init__(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos)


class NanoLLM(LLM):
    """nano-vLLM's LLM."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **{NAMES.get(name, name): v for name, v in options.items()})

    def generate(  # type: ignore[override]
        self, prompts: Any, sampling_params: Any, use_tqdm: bool = True
    ) -> list[dict[str, Any]]:
        """Completes prompts; texts contain special tokens, as in nano-vLLM.

        Raises:
            NanoEngineError: a request has failed; these outputs can't contain errors.
        """
        outputs, decode = [], self.get_tokenizer().decode
        for output in super().generate(prompts, to_native(sampling_params), use_tqdm):
            if output.error:
                raise NanoEngineError(f"prompt {output.index} failed: {output.error}")
            ids = output.outputs[0].token_ids
            outputs.append({"text": decode(ids), "token_ids": ids})
        return outputs
