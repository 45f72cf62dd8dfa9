"""A run compared with the limits of the hardware: the lines that `bench.py` adds to the report.

Bytes and FLOPs of each step follow from the model's sizes (`cost.py`); the peak rates of the device
are measured in the same run (`peak.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.suite import peak
from benchmarks.suite.cost import ModelCost
from benchmarks.suite.peak import Peaks
from nanoengine.bench.throughput import Measured, Round, median_of, ratio
from nanoengine.build import resolve_model
from nanoengine.checkpoint.config import load_model_config
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.observe.metrics import StepRecord
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.llm import LLM

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip


def with_limits(measured: Measured, llm: LLM) -> dict[str, Any]:
    """The report, and the limits of its median round; without the latter if the measurement of the
    peaks runs out of memory, for example on a small GPU with a large KV cache."""
    try:
        cost, peaks = limits(llm.config, llm.info)
    except torch.OutOfMemoryError:
        return measured.report
    return measured.report | reached(median_of(measured.rounds), cost, peaks)


def limits(config: EngineConfig, info: EngineInfo) -> tuple[ModelCost, Peaks]:
    """The cost of the model's steps, and the peaks of this device, measured now."""
    device, dtype = torch.device(info.device), getattr(torch, info.dtype)
    whole = (info.quantization or "").endswith("int8 activations") and device.type == "cpu"
    peaks = peak.measure_peaks(device, dtype, products="int8" if whole else None)
    weight_bytes = info.weight_bits / 8 if info.weight_bits else dtype.itemsize
    return model_cost(config, dtype.itemsize, weight_bytes), peaks


def model_cost(
    config: EngineConfig, element_bytes: int, weight_bytes: float | None = None
) -> ModelCost:
    """FLOPs and bytes of the model, from its config.json."""
    model = load_model_config(resolve_model(config))
    sizes: dict[str, Any] = {name: getattr(model, name) for name in SIZES}
    if model.moe is not None:
        sizes |= {
            "num_experts": model.moe.num_experts,
            "num_experts_per_tok": model.moe.num_experts_per_tok,
            "moe_intermediate_size": model.moe.intermediate_size,
        }
    cost = ModelCost.from_config(sizes, element_bytes, weight_bytes)
    return replace(cost, windows=model.sliding_windows)


def reached(measured: Round, cost: ModelCost, peaks: Peaks) -> dict[str, Any]:
    """Bytes and FLOPs per second of a round, as shares of the peaks, and its roofline."""
    flops, nbytes = cost.run(measured.records)
    gbs, gflops = nbytes / measured.seconds / 1e9, flops / measured.seconds / 1e9
    tokens = sum(len(output.outputs[0].token_ids) for output in measured.outputs)
    return {
        "achieved": {
            "gbs": gbs,
            "gflops": gflops,
            "bandwidth_frac": gbs / peaks.read_gbs,
            "compute_frac": gflops / peaks.gemm_gflops,
        },
        "roofline": least_time(measured.records, cost, peaks, tokens),
        "peaks": asdict(peaks),
    }


def least_time(
    records: SequenceOf[StepRecord], cost: ModelCost, peaks: Peaks, output_tokens: int
) -> dict[str, float]:
    """The shortest time that the measured peaks allow for these steps: a step takes the time of its
    bytes or of its products, whichever is longer. Source: the roofline model.

    `memory_frac` is the share of that time in steps limited by bytes.
    """
    seconds = memory_s = 0.0
    for record in records:
        flops, nbytes = cost.step(record)
        reading, computing = nbytes / 1e9 / peaks.read_gbs, flops / 1e9 / peaks.gemm_gflops
        seconds += max(reading, computing)
        memory_s += reading if reading >= computing else 0.0
    return {
        "seconds": seconds,
        "output_tokens_per_s": ratio(output_tokens, seconds),
        "memory_frac": ratio(memory_s, seconds),
    }


LINES = """\
bandwidth       {gbs:,.1f} GB/s, {bandwidth_frac:.0%} of {read_gbs:,.1f} measured now
compute         {gflops:,.1f} GFLOP/s, {compute_frac:.0%} of {gemm_gflops:,.1f} measured now in
                {dtype} by {by}
roofline        {seconds:,.2f} s, {share:.0%} of the round: the minimum for these steps,
                {memory_frac:.0%} of it reading
"""


def format_limits(report: dict[str, Any]) -> str:
    """The lines of the report."""
    if "peaks" not in report:
        return "limits          not measured: too little free memory\n"
    seconds = sorted(report["seconds"])[len(report["seconds"]) // 2]
    share = report["roofline"]["seconds"] / seconds
    return LINES.format(**report["achieved"], **report["peaks"], **report["roofline"], share=share)
