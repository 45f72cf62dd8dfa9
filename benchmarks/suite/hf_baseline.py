"""The baseline of `bench.py --compare hf`: transformers with static, left-padded batches.

It is configured as well as static batches allow: requests are sorted by output length so that the
sequences of a batch end together, weights have the engine's dtype, attention is torch's SDPA, and
both use the same threads of the same process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from nanoengine.bench.throughput import Measured, sizes, warm_up_items
from nanoengine.bench.workload import WorkItem
from nanoengine.errors import NanoEngineError

if TYPE_CHECKING:
    from nanoengine.llm import LLM


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
        """Exactly `max_tokens` ids for each item, in order; a batch runs until its longest output
        ends."""
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
    """The same sampling as in the engine: only temperature, no EOS."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=length, pad_token_id=0, **(sampling if temperature else {"do_sample": False})
    )


class Baseline:
    """The baseline, alternating with an engine: called with the work of each round."""

    def __init__(self, llm: LLM, temperature: float, batch_size: int) -> None:
        self._info, self._temperature = llm.info, temperature
        self._model = HFBaseline(
            llm.config.model,
            dummy=llm.config.load_format == "dummy",
            dtype=getattr(torch, llm.info.dtype),
            device=torch.device(llm.info.device),
            batch_size=batch_size,
        )
        self.seconds: list[float] = []

    def __call__(self, items: list[WorkItem]) -> None:
        """One timed run, after a warm-up before the first."""
        if not self.seconds:
            short = warm_up_items(items, self._info.vocab_size)
            self._model.generate(short, self._temperature)
        start = time.perf_counter()
        outputs = self._model.generate(
            items, self._temperature
        )  # Lists, so that the device has finished.
        self.seconds.append(time.perf_counter() - start)
        if [len(output) for output in outputs] != [item.max_tokens for item in items]:
            raise NanoEngineError(
                "the baseline generated other numbers of tokens than the workload requires"
            )

    def compare(self, measured: Measured) -> dict[str, Any]:
        """The baseline's throughput, and the engine's speed relative to it: median and spread."""
        rounds = zip(self.seconds, measured.rounds, strict=True)
        ratios = [slow / fast.seconds for slow, fast in rounds]
        tokens = sizes(measured.items)["output_tokens"]
        return {
            "name": "transformers",
            "batch_size": self._model.batch_size,
            "seconds": self.seconds,
            "output_tokens_per_s": tokens / statistics.median(self.seconds),
            "speedup_median": statistics.median(ratios),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
        }


LINES = """\
transformers    {output_tokens_per_s:,.1f} output tok/s in static batches of {batch_size}
nanoengine is   {speedup_median:.2f} times as fast (median; {speedup_min:.2f} to {speedup_max:.2f})
"""
"""The report's lines about the comparison."""
