"""Mistral: Llama with one sliding window for all layers, if `sliding_window` is set."""

from __future__ import annotations

from nanoengine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Computes what Llama does: the windows are in `config.sliding_windows`.

    Source: Jiang et al., Mistral 7B (arXiv 2310.06825).
    """
