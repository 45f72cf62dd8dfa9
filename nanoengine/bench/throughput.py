"""`nanoengine bench`: measures a workload with an `LLM`.

    items ─► warm-up ─► timed rounds, each with other ids ─► the median round ─► a table, JSON

Load time and warm-up are not part of any throughput; they are reported separately. It uses only
the public `LLM` and the engine's observers, info and counters.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanoengine.bench.workload import WorkItem, WorkOptions, fit, shift_ids
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.observe.metrics import Metrics, StepRecord, percentiles, step_seconds, summarize
from nanoengine.runner.memory import total_cpu_bytes
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.version import versions

if TYPE_CHECKING:
    from nanoengine.llm import LLM

LATENCIES = {"ttft_s": "first token", "itl_s": "next token", "e2e_s": "whole request"}
COUNTERS = (
    "prefill_tokens", "recomputed_tokens", "preemptions", "cache_queried_tokens",
    "cache_hit_tokens", "drafted_tokens", "accepted_tokens", "saved_steps",
)  # fmt: skip
"""Counters of the engine whose increments are reported per round."""


class Round(NamedTuple):
    """One timed run of the whole workload."""

    seconds: float
    outputs: SequenceOf[Any]
    records: SequenceOf[StepRecord]
    counters: dict[str, int]


class Measured(NamedTuple):
    """The report as plain data, and the data that it was computed from."""

    report: dict[str, Any]
    items: list[WorkItem]
    rounds: list[Round]


def measure(
    llm: LLM,
    name: str,
    options: WorkOptions,
    also_run: Callable[[list[WorkItem]], object] | None = None,
) -> Measured:
    """Warms up, runs the rounds, and sums them up.

    Args:
        name: name of the model, for the report.
        also_run: runs the items of each round in another engine, after this one.

    Raises:
        ConfigError: the workload can't be read, or does not fit the model.
    """
    info, temperature = llm.info, options.temperature
    drawn, is_trace = drawn_items(options, llm.config), options.dataset.endswith(".csv")
    items, notes = fit(drawn, info.vocab_size, info.max_model_len, cap=is_trace)
    if options.smoke:
        notes.insert(0, f"smoke scale: {len(items)} requests; not the field's standard workload")
    start = time.perf_counter()
    warm_up(llm, items, temperature)
    warmup_s, metrics, rounds = time.perf_counter() - start, Metrics(), []
    llm.engine.observers.append(metrics)
    for number in range(options.rounds):
        work = shift_ids(items, number, info.vocab_size)
        rounds.append(timed_round(llm, metrics, work, temperature))
        if also_run is not None:
            also_run(work)
    llm.engine.observers.remove(metrics)
    about = {"dataset": options.dataset, "seed": llm.config.seed, "temperature": temperature}
    report = {
        **heading(info.device),
        "notes": notes,
        "workload": about | sizes(items),
        "model": name,
        "engine": asdict(info) | {"warmup_s": warmup_s},
        **summarize_rounds(rounds, items),
    }
    return Measured(report, items, rounds)


def drawn_items(options: WorkOptions, config: EngineConfig) -> list[WorkItem]:
    """The requests of the options; the model's tokenizer encodes texts."""
    tokenizer = functools.cache(lambda: Tokenizer.load(config.tokenizer or config.model))
    return list(options.items(config.seed, lambda text: tokenizer().encode(text)))


# --- rounds ---------------------------------------------------------------------------------------


def warm_up(llm: LLM, items: SequenceOf[WorkItem], temperature: float) -> None:
    """Runs a few short requests, so that compilation and allocation are not timed."""
    generate(llm, warm_up_items(items, llm.info.vocab_size), temperature)


def warm_up_items(items: SequenceOf[WorkItem], vocab_size: int) -> list[WorkItem]:
    """A few short requests with other ids, so that timed prompts have no prefix cache hits."""
    return shift_ids([WorkItem(ids, min(length, 8)) for ids, length in items[:16]], -1, vocab_size)


def params_of(item: WorkItem, temperature: float, seed: int | None = None) -> SamplingParams:
    """Sampling parameters with which an item generates exactly its number of tokens."""
    shared = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=item.max_tokens, seed=seed, **shared)


def generate(llm: LLM, items: SequenceOf[WorkItem], temperature: float) -> SequenceOf[Any]:
    """Runs the items, and checks that each generates exactly its number of tokens. The index of
    an item is its seed, so that another engine can draw the same tokens."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(item.prompt_token_ids)} for item in items],
        [params_of(item, temperature, seed) for seed, item in enumerate(items)],
        use_tqdm=sys.stderr.isatty(),
    )
    for item, output in zip(items, outputs, strict=True):
        got = len(output.outputs[0].token_ids) if output.outputs else 0
        if got != item.max_tokens:
            raise NanoEngineError(
                f"request {output.request_id} generated {got} tokens instead of {item.max_tokens}"
            )
    return outputs


def timed_round(
    llm: LLM, metrics: Metrics, items: SequenceOf[WorkItem], temperature: float
) -> Round:
    """One run of all items; `metrics` observes the engine."""
    metrics.records.clear()
    before, start = llm.engine.stats(), time.perf_counter()
    outputs = generate(llm, items, temperature)
    seconds, after = time.perf_counter() - start, llm.engine.stats()
    counters = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
    return Round(seconds, outputs, tuple(metrics.records), counters)


# --- numbers --------------------------------------------------------------------------------------


def sizes(items: SequenceOf[WorkItem]) -> dict[str, int]:
    """Requests and tokens of a workload."""
    return {
        "requests": len(items),
        "input_tokens": sum(len(ids) for ids, _ in items),
        "output_tokens": sum(length for _, length in items),
    }


def median_of(rounds: SequenceOf[Round]) -> Round:
    """The round with the median time; for an even number, the slower of the middle two."""
    return sorted(rounds, key=lambda r: r.seconds)[len(rounds) // 2]


def summarize_rounds(rounds: SequenceOf[Round], items: SequenceOf[WorkItem]) -> dict[str, Any]:
    """The numbers of the median round, and the seconds of all rounds."""
    median = median_of(rounds)
    seconds, count, summary = median.seconds, median.counters, summarize(median.records)
    size = sizes(items)
    latencies = {
        "ttft_s": [output.metrics.ttft_s for output in median.outputs],
        "itl_s": summary.itl_s,
        "e2e_s": [output.metrics.e2e_s for output in median.outputs],
    }
    return {
        "seconds": [r.seconds for r in rounds],
        "requests_per_s": len(items) / seconds,
        "output_tokens_per_s": size["output_tokens"] / seconds,
        "total_tokens_per_s": (size["input_tokens"] + size["output_tokens"]) / seconds,
        "prefill": _phase(summary.prefill_tokens, summary.prefill_s),
        "decode": _phase(summary.decode_tokens, summary.decode_s),
        "steps": summary.num_steps,
        "mean_batch": summary.mean_batch,
        "max_batch": summary.max_batch,
        "prefill_waste_frac": ratio(count["recomputed_tokens"], count["prefill_tokens"]),
        "hit_rate": ratio(count["cache_hit_tokens"], count["cache_queried_tokens"]),
        "counters": count,
        "latency": {name: percentiles(values) for name, values in latencies.items()},
        "step_times_s": asdict(summary.times),
        "step_records": step_records(median.records),
        "outside_steps_s": seconds - summary.prefill_s - summary.decode_s,
    }


def step_records(records: SequenceOf[StepRecord]) -> dict[str, list[Any]]:
    """Size and time of each step, as columns, which `nanoengine simulate --step-times` reads."""
    return {
        "tokens": [sum(record.num_scheduled) for record in records],
        "context_tokens": [sum(r.starts) + sum(r.num_scheduled) for r in records],
        "seconds": [round(step_seconds(record.times), 7) for record in records],
    }


def _phase(tokens: int, seconds: float) -> dict[str, float]:
    return {"tokens": tokens, "seconds": seconds, "tokens_per_s": ratio(tokens, seconds)}


def ratio(part: float, whole: float) -> float:
    """A share; 0 if the whole is 0."""
    return part / whole if whole else 0.0


# --- the environment ------------------------------------------------------------------------------


def heading(device: str) -> dict[str, Any]:
    """Date, command, hardware and versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": hardware(torch.device(device)),
        "versions": versions(),
    }


def hardware(device: torch.device) -> dict[str, Any]:
    """The hardware: processor, cores, threads, memory, and the GPU if it is used."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    found: dict[str, Any] = {
        "cpu": name[1] if name else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(total_cpu_bytes() / 2**30, 1),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "gpu_memory_gib": round(gpu.total_memory / 2**30, 1)}
    return found


def require_directory(path: Path | None, option: str) -> None:
    """Raises ConfigError before a run if its report can't be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}={str(path)!r} is in a directory that does not exist")


def write(report: dict[str, Any], path: Path) -> None:
    """Writes a report as JSON; sets become sorted lists, other unknown types strings."""
    plain: Callable[[Any], Any] = lambda v: sorted(v) if isinstance(v, (set, frozenset)) else str(v)  # noqa: E731
    path.write_text(json.dumps(report, indent=2, default=plain) + "\n", encoding="utf-8")


# --- text -----------------------------------------------------------------------------------------

TABLE = """\
model           {model}, {num_parameters:,} parameters
engine          {dtype} on {device}, attention {attention_backend}
KV cache        {num_kv_blocks:,} blocks of {block_size} tokens
hardware        {machine}
workload        {dataset}, seed {seed}, temperature {temperature}
requests        {requests}: {input_tokens:,} tokens in, {output_tokens:,} out
{notes}not counted     load {load_s:.2f} s, start {start_s:.2f} s, warm-up {warmup_s:.2f} s

throughput      {output_tokens_per_s:,.1f} output tok/s   {total_tokens_per_s:,.1f} total tok/s
seconds         {seconds} (the median round is reported)
prefill         {prefill}
decode          {decode}
batch           {mean_batch:.1f} sequences per step on average, {max_batch} at most, {steps:,} steps
prefill waste   {prefill_waste_frac:.1%} recomputed after {preemptions} preemptions
prefix cache    {hit_rate:.1%} of {cache_queried_tokens:,} tokens looked up
{drafts}time            {time}
{more}
latency [ms]             p50         p90         p99
{latency}"""
DRAFTS = """\
drafts          {drafted_tokens:,} tokens, {accepted:.1%} accepted: {saved_steps:,} steps saved
"""
PHASE = "{tokens:>11,} tokens {seconds:>9.2f} s {tokens_per_s:>11,.1f} tok/s"


def format_report(report: dict[str, Any], more: str = "") -> str:
    """The report as aligned text, at most 100 columns wide; `more` has additional lines."""
    machine, count = report["hardware"], report["counters"]
    times = report["step_times_s"] | {"other_s": max(report["outside_steps_s"], 0.0)}
    total = sum(times.values()) or 1.0
    shares = [f"{name.removesuffix('_s')} {seconds / total:.1%}" for name, seconds in times.items()]
    latency = {what: report["latency"][name].values() for name, what in LATENCIES.items()}
    facts = report["engine"] | report["workload"] | count | report
    facts |= {
        "more": more,
        "machine": machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads",
        "notes": "".join(f"note            {note}\n" for note in report["notes"]),
        "seconds": "  ".join(f"{seconds:.2f}" for seconds in report["seconds"]),
        "prefill": PHASE.format(**report["prefill"]),
        "decode": PHASE.format(**report["decode"]),
        "accepted": ratio(count["accepted_tokens"], count["drafted_tokens"]),
        "time": textwrap.fill(", ".join(shares), 84, subsequent_indent=" " * 16),
        "latency": "\n".join(
            f"{what:<16}" + "".join(f"{1e3 * seconds:12,.1f}" for seconds in found)
            for what, found in latency.items()
        ),
    }
    return TABLE.format(**facts, drafts=DRAFTS.format(**facts) if count["drafted_tokens"] else "")
