"""The baseline of `bench --compare hf`: transformers with static, left-padded batches.

Called by `cli/bench.py`. Configured as well as it can be without changing what it is: requests are
sorted by output length so that the sequences of a batch end together, weights have the engine's
dtype, attention is torch's SDPA, and both sides use the same threads of the same process.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from nanoengine.cli.workload import WorkItem


class HFBaseline:
    """A transformers model that generates a workload in batches of `batch_size`."""

    def __init__(
        self, model: str, *, dummy: bool, dtype: torch.dtype, device: torch.device, batch_size: int
    ) -> None:
        self.batch_size = batch_size
        self.device = device
        options = {"dtype": dtype, "attn_implementation": "sdpa"}
        if dummy:
            loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), **options)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(model, **options)
        self.model = loaded.to(device).eval()

    @torch.inference_mode()
    def generate(self, items: SequenceOf[WorkItem], temperature: float) -> list[list[int]]:
        """Exactly `max_tokens` ids for each item, in order; a batch runs to its longest output."""
        outputs: list[list[int]] = [[] for _ in items]
        order = sorted(range(len(items)), key=lambda index: -items[index].max_tokens)
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            width = max(len(items[index].prompt_token_ids) for index in batch)
            length = items[batch[0]].max_tokens
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, index in enumerate(batch):
                prompt = items[index].prompt_token_ids
                ids[row, width - len(prompt) :] = torch.tensor(prompt)
                mask[row, width - len(prompt) :] = 1
            generated = self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=_settings(temperature, length),
            )[:, width:].tolist()
            for row, index in enumerate(batch):
                outputs[index] = generated[row][: items[index].max_tokens]
        return outputs


def _settings(temperature: float, length: int) -> GenerationConfig:
    """Sampling as the engine does it here: temperature alone, no end-of-sequence token."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=length, pad_token_id=0, **(sampling if temperature else {"do_sample": False})
    )
