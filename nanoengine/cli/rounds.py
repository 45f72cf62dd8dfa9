"""Timed rounds of a workload through an `LLM`: what every form of the benchmark is made of.

Called by `cli/bench.py`, `ablate.py` and `sweep.py`. Knows only the public `LLM` and the engine's
observers and counters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from nanoengine.cli import workload
from nanoengine.cli.bench_report import Round
from nanoengine.cli.workload import WorkItem
from nanoengine.errors import NanoEngineError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams

if TYPE_CHECKING:
    from nanoengine.core.engine_stats import EngineInfo
    from nanoengine.llm import LLM
    from nanoengine.observe.cost import ModelCost
    from nanoengine.observe.metrics import Metrics
    from nanoengine.observe.peak import Peaks
    from nanoengine.outputs import RequestOutput

COUNTERS = (
    "prefill_tokens",
    "recomputed_tokens",
    "preemptions",
    "cache_queried_tokens",
    "cache_hit_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "saved_steps",
)
"""Running totals of the engine that a round is charged for."""


def params_of(item: WorkItem, temperature: float, seed: int | None = None) -> SamplingParams:
    """Sampling parameters that give an item exactly its number of tokens."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=item.max_tokens,
        ignore_eos=True,
        detokenize=False,
        seed=seed,
    )


def warm_up(llm: LLM, items: SequenceOf[WorkItem], vocab_size: int, temperature: float) -> None:
    """Runs a few short requests, so that no timed round compiles or allocates."""
    generate(llm, warm_up_items(items, vocab_size), temperature)


def warm_up_items(items: SequenceOf[WorkItem], vocab_size: int) -> list[WorkItem]:
    """A few short requests with ids of their own, so that no timed prompt finds their prefixes."""
    short = [replace(item, max_tokens=min(item.max_tokens, 8)) for item in items[:16]]
    return workload.shifted(short, -1, vocab_size)


def generate(
    llm: LLM, items: SequenceOf[WorkItem], temperature: float, *, seeded: bool = False
) -> SequenceOf[RequestOutput]:
    """Runs the items; each must give exactly its number of tokens.

    Args:
        seeded: give each item its number as seed, so that another engine draws the same tokens.
    """
    outputs = llm.generate(
        [{"prompt_token_ids": list(item.prompt_token_ids)} for item in items],
        [params_of(item, temperature, i if seeded else None) for i, item in enumerate(items)],
        use_tqdm=sys.stderr.isatty(),
    )
    for item, output in zip(items, outputs, strict=True):
        got = len(output.outputs[0].token_ids) if output.outputs else 0
        if got != item.max_tokens:
            raise NanoEngineError(
                f"request {output.request_id} gave {got} tokens in the place of {item.max_tokens}"
            )
    return outputs


def timed_round(
    llm: LLM,
    metrics: Metrics,
    items: SequenceOf[WorkItem],
    temperature: float,
    *,
    seeded: bool = False,
) -> Round:
    """One run of all items; `metrics` observes the engine."""
    metrics.records.clear()
    before = llm.engine.stats()
    start = time.perf_counter()
    outputs = generate(llm, items, temperature, seeded=seeded)
    seconds = time.perf_counter() - start
    after = llm.engine.stats()
    return Round(
        seconds=seconds,
        outputs=outputs,
        records=tuple(metrics.records),
        counters={name: getattr(after, name) - getattr(before, name) for name in COUNTERS},
    )


def config_options(config: EngineConfig) -> dict[str, Any]:
    """A config as the keywords of `LLM`."""
    return {field.name: getattr(config, field.name) for field in fields(EngineConfig)}


def limits(config: EngineConfig, info: EngineInfo) -> tuple[ModelCost, Peaks]:
    """What the model's steps must cost, and what this device was measured to reach, now."""
    import torch

    from nanoengine.observe.peak import measure_peaks

    device, dtype = torch.device(info.device), getattr(torch, info.dtype)
    whole = (info.quantization or "").endswith("int8 activations") and device.type == "cpu"
    peaks = measure_peaks(device, dtype, products="int8" if whole else None)
    weight_bytes = info.weight_bits / 8 if info.weight_bits else dtype.itemsize
    return model_cost(config, dtype.itemsize, weight_bytes), peaks


def model_cost(
    config: EngineConfig, element_bytes: int, weight_bytes: float | None = None
) -> ModelCost:
    """FLOPs and bytes of the model, from its config.json."""
    from transformers import AutoConfig

    from nanoengine.observe.cost import ModelCost

    loaded = AutoConfig.from_pretrained(config.model, revision=config.revision)
    return ModelCost.from_config(loaded.get_text_config().to_dict(), element_bytes, weight_bytes)
