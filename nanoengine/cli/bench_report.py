"""The report of the benchmark: from timed rounds to numbers, and from numbers to text.

Called by `cli/bench.py`; runs nothing itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
import textwrap
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from nanoengine.cli.workload import WorkItem
from nanoengine.observe.cost import ModelCost
from nanoengine.observe.metrics import StepRecord, percentiles, step_seconds, summarize
from nanoengine.observe.peak import Peaks

PACKAGES = ("nanoengine", "torch", "transformers", "numba", "triton", "flash-attn")
LATENCIES = {"ttft_s": "first token", "itl_s": "next token", "e2e_s": "whole request"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One timed run of the whole workload."""

    seconds: float
    outputs: SequenceOf[Any]
    records: SequenceOf[StepRecord]
    counters: dict[str, int]


def summarize_rounds(
    rounds: SequenceOf[Round], items: SequenceOf[WorkItem], cost: ModelCost, peaks: Peaks
) -> dict[str, Any]:
    """The numbers of the median round, and the seconds of all."""
    median = sorted(rounds, key=lambda r: r.seconds)[len(rounds) // 2]  # of two the slower
    summary = summarize(median.records)
    inputs = sum(len(item.prompt_token_ids) for item in items)
    outputs = sum(item.max_tokens for item in items)
    flops, nbytes = cost.run(median.records)
    count = median.counters
    latencies = {
        "ttft_s": [output.metrics.ttft_s for output in median.outputs],
        "itl_s": summary.itl_s,
        "e2e_s": [output.metrics.e2e_s for output in median.outputs],
    }
    return {
        "seconds": [r.seconds for r in rounds],
        "requests_per_s": len(items) / median.seconds,
        "output_tokens_per_s": outputs / median.seconds,
        "total_tokens_per_s": (inputs + outputs) / median.seconds,
        "prefill": _phase(summary.prefill_tokens, summary.prefill_s),
        "decode": _phase(summary.decode_tokens, summary.decode_s),
        "steps": summary.num_steps,
        "mean_batch": summary.mean_batch,
        "max_batch": summary.max_batch,
        "prefill_waste_frac": _ratio(count["recomputed_tokens"], count["prefill_tokens"]),
        "hit_rate": _ratio(count["cache_hit_tokens"], count["cache_queried_tokens"]),
        "counters": count,
        "latency": {name: percentiles(values) for name, values in latencies.items()},
        "step_times_s": asdict(summary.times),
        "step_records": step_records(median.records),
        "outside_steps_s": median.seconds - summary.prefill_s - summary.decode_s,
        "achieved": {
            "gbs": nbytes / median.seconds / 1e9,
            "gflops": flops / median.seconds / 1e9,
            "bandwidth_frac": nbytes / median.seconds / 1e9 / peaks.read_gbs,
            "compute_frac": flops / median.seconds / 1e9 / peaks.gemm_gflops,
        },
        "roofline": least_time(median.records, cost, peaks, outputs),
        "peaks": asdict(peaks),
    }


def latencies(rounds: SequenceOf[Round]) -> dict[str, float]:
    """What a request waits for, as medians over rounds: its first token, and a rare long gap."""
    found = []
    for one in rounds:
        ttft = percentiles([output.metrics.ttft_s for output in one.outputs])
        itl = percentiles(summarize(one.records).itl_s)
        found.append((ttft["p50"], itl.get("p99", 0.0)))
    first, gap = (statistics.median(column) for column in zip(*found, strict=True))
    return {"ttft_p50_s": first, "itl_p99_s": gap}


def least_time(
    records: SequenceOf[StepRecord], cost: ModelCost, peaks: Peaks, output_tokens: int
) -> dict[str, float]:
    """The least time in which the measured peaks allow these very steps: a step takes as long as
    its bytes, or as its products, whichever is longer. Source: the roofline model.

    `memory_frac` is the share of that time in which bytes are what takes it.
    """
    seconds = memory_s = 0.0
    for record in records:
        flops, nbytes = cost.step(record)
        reading, computing = nbytes / 1e9 / peaks.read_gbs, flops / 1e9 / peaks.gemm_gflops
        seconds += max(reading, computing)
        memory_s += reading if reading >= computing else 0.0
    return {
        "seconds": seconds,
        "output_tokens_per_s": _ratio(output_tokens, seconds),
        "memory_frac": _ratio(memory_s, seconds),
    }


def step_records(records: SequenceOf[StepRecord]) -> dict[str, list[Any]]:
    """Size and time of each step, in columns: what `nanoengine simulate --fit` reads."""
    return {
        "tokens": [sum(record.num_scheduled) for record in records],
        "context_tokens": [sum(r.starts) + sum(r.num_scheduled) for r in records],
        "seconds": [round(step_seconds(record.times), 7) for record in records],
    }


def compare(
    rounds: SequenceOf[Round],
    baseline_s: SequenceOf[float],
    items: SequenceOf[WorkItem],
    batch_size: int,
) -> dict[str, Any]:
    """The baseline's throughput, and how many times faster the engine is: median and spread."""
    ratios = [slow / r.seconds for slow, r in zip(baseline_s, rounds, strict=True)]
    outputs = sum(item.max_tokens for item in items)
    return {
        "name": "transformers",
        "batch_size": batch_size,
        "seconds": list(baseline_s),
        "output_tokens_per_s": outputs / statistics.median(baseline_s),
        "speedup_median": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
    }


def _phase(tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": _ratio(tokens, seconds)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; what it has no type for becomes a sorted list or its text."""
    plain = (bool, int, float, str, type(None), dict)
    return {
        name: sorted(v)
        if isinstance(v, (set, frozenset))
        else v
        if isinstance(v, plain)
        else str(v)
        for name, v in values.items()
    }


def heading(device: str) -> dict[str, Any]:
    """Date, command, hardware and versions: where the numbers of a report come from."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": hardware(torch.device(device)),
        "versions": versions(),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """What the run ran on: processor, cores, threads, memory, and the GPU if it is used."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python's version and those of the packages that decide the speed, where installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def format_report(report: dict[str, Any]) -> str:
    """The report as aligned text, at most 100 columns wide."""
    engine, work, machine = report["engine"], report["workload"], report["hardware"]
    prefill, decode, count = report["prefill"], report["decode"], report["counters"]
    achieved, peaks, roofline = report["achieved"], report["peaks"], report["roofline"]
    seconds = sorted(report["seconds"])[len(report["seconds"]) // 2]
    rows = [
        ("model", f"{report['model']}, {engine['num_parameters'] / 1e6:,.1f}M parameters"),
        ("engine", f"{engine['dtype']} on {engine['device']}, attention"
                   f" {engine['attention_backend']}, {engine['num_kv_blocks']:,} KV"
                   f" blocks of {engine['block_size']} tokens"),
        ("hardware", machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"),
        ("workload", f"{work['dataset']}, seed {work['seed']}: {work['requests']} requests, "
                     f"{work['input_tokens']:,} tokens in, {work['output_tokens']:,} out, "
                     f"temperature {work['temperature']}"),
        *(("note", note) for note in report["notes"]),
        ("not counted", f"load {engine['load_s']:.2f} s, start {engine['start_s']:.2f} s, "
                        f"warm-up {engine['warmup_s']:.2f} s"),
        ("", ""),
        ("throughput", f"{report['output_tokens_per_s']:,.1f} output tok/s   "
                       f"{report['total_tokens_per_s']:,.1f} total tok/s   "
                       f"{report['requests_per_s']:,.2f} requests/s"),
        ("seconds", "  ".join(f"{s:.2f}" for s in report["seconds"])
                    + (" (the median round is reported)" if len(report["seconds"]) > 1 else "")),
        ("prefill", _phase_text(prefill)),
        ("decode", _phase_text(decode)),
        ("batch", f"{report['mean_batch']:.1f} sequences a step in the mean, {report['max_batch']}"
                  f" at most, {report['steps']:,} steps"),
        ("prefill waste", f"{report['prefill_waste_frac']:.1%} computed again after"
                          f" {count['preemptions']} preemptions"),
        ("prefix cache", f"{report['hit_rate']:.1%} of {count['cache_queried_tokens']:,} tokens"
                         " looked up"),
        *(_drafts_line(count) if count["drafted_tokens"] else ()),
        ("time", _shares(report["step_times_s"], report["outside_steps_s"])),
        ("bandwidth", f"{achieved['gbs']:,.1f} GB/s, {achieved['bandwidth_frac']:.0%} of"
                      f" {peaks['read_gbs']:,.1f} measured now"),
        ("compute", f"{achieved['gflops']:,.1f} GFLOP/s, {achieved['compute_frac']:.0%} of"
                    f" {peaks['gemm_gflops']:,.1f} measured now in {peaks['dtype']} by"
                    f" {peaks['by']}"),
        ("roofline", f"{roofline['seconds']:,.2f} s, {roofline['seconds'] / seconds:.0%} of the"
                     f" round: the least for these steps, {roofline['memory_frac']:.0%} of it"
                     " reading"),
        ("", ""),
        ("latency [ms]", "".join(f"{rank:>12}" for rank in ("p50", "p90", "p99"))),
        *((label, "".join(f"{1e3 * value:12,.1f}" for value in report["latency"][name].values()))
          for name, label in LATENCIES.items()),
    ]  # fmt: skip
    if "baseline" in report:
        other = report["baseline"]
        rows += [
            ("", ""),
            (other["name"], f"{other['output_tokens_per_s']:,.1f} output tok/s in static batches of"
                            f" {other['batch_size']}; rounds in turn with the engine's"),
            ("nanoengine is", f"{other['speedup_median']:.2f} times as fast (median;"
                              f" {other['speedup_min']:.2f} to {other['speedup_max']:.2f})"),
        ]  # fmt: skip
    return "\n".join(_line(label, text) for label, text in rows)


def _drafts_line(count: dict[str, int]) -> list[tuple[str, str]]:
    drafted, accepted = count["drafted_tokens"], count["accepted_tokens"]
    text = f"{drafted:,} tokens, {accepted / drafted:.1%} of them right: {count['saved_steps']:,}"
    return [("drafts", f"{text} steps of a sequence saved")]


def _line(label: str, text: str) -> str:
    """Label and text in columns; a long text goes on in the next line."""
    first, *rest = textwrap.wrap(text, 84, drop_whitespace=False) if len(text) > 84 else [text]
    return "\n".join([f"{label:<15} {first}".rstrip(), *(" " * 16 + more.strip() for more in rest)])


def _phase_text(phase: dict[str, float]) -> str:
    return (
        f"{phase['tokens']:>11,.0f} tokens {phase['seconds']:>9.2f} s"
        f" {phase['tokens_per_s']:>11,.1f} tok/s"
    )


def _shares(times: dict[str, float], outside_s: float) -> str:
    """Each part's share of the run."""
    parts = {name.removesuffix("_s"): seconds for name, seconds in times.items()}
    parts["other"] = max(outside_s, 0.0)
    total = sum(parts.values()) or 1.0
    return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts.items())
