"""`bench.py --ablate`: the gain of each feature that can be switched off, one at a time.

    base ──── the engine with the given options ───────────┐ alternating rounds of the same work
    other ─── the same with one feature switched ──────────┘ ──► ratio of their times, tokens equal?

Most switches are options of the engine. A few features have no option, because there is no reason
to run without them; they are removed from a created engine (`alter` of a `Switch`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchmarks.suite.engines import config_options, open_llm
from nanoengine.bench import throughput
from nanoengine.bench.throughput import Round, timed_round, warm_up
from nanoengine.bench.workload import WorkItem, WorkOptions, fit, shift_ids
from nanoengine.core.plan import StepPlan
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.observe.metrics import Metrics, percentiles, summarize
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.core.engine_stats import EngineInfo
    from nanoengine.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One feature, and its replacement.

    Attributes:
        name: the feature.
        to: what it is switched to.
        options: options of the engine that switch it.
        alter: removes it from a created engine; returns why the engine lacks it, or "".
        same_tokens: whether greedy tokens in float32 stay the same.
    """

    name: str
    to: str
    options: dict[str, Any] = field(default_factory=dict)
    alter: Callable[[LLM], str] | None = None
    same_tokens: bool = True


class PhasesApart(Scheduler):
    """Computes prompts or decodes in a step, never both; prompts go first.

    As in engines without mixed steps: each new prompt delays all decodes.
    """

    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence]) -> int:
        prompts = [seq for seq in self.running if seq.num_tokens - seq.num_computed_tokens > 1]
        budget = self.max_num_batched_tokens
        for seq in prompts:
            budget -= self._schedule_next(plan, scheduled, seq, budget)
        if not prompts:
            self.admit(plan, scheduled, budget)
            if not scheduled:
                super()._schedule_running(plan, scheduled)
            return 0
        return budget if not plan.preempted else 0


def phases_apart(llm: LLM) -> str:
    """Gives an engine this scheduler instead of its own."""
    old = llm.engine.scheduler
    llm.engine.scheduler = PhasesApart(
        old.block_manager,
        max_num_seqs=old.max_num_seqs,
        max_num_batched_tokens=old.max_num_batched_tokens,
        chunked_prefill=old.chunked_prefill,
        long_prefill_threshold=old.long_prefill_threshold,
        policy=old.policy,
    )
    return ""


def unfuse(llm: LLM) -> str:
    """Runs the parts of each layer separately: `DecoderLayer` instead of `FusedLayers`."""
    decoder = llm.engine.executor.model.model  # type: ignore[attr-defined]
    if decoder.executed_layers == list(decoder.layers):
        return "no layer of this model is fused here"
    decoder.executed_layers = list(decoder.layers)
    return ""


def drop_screen(llm: LLM) -> str:
    """Computes all logits of greedy tokens: the head loses its int8 copy."""
    head = llm.engine.executor.model.lm_head.method  # type: ignore[attr-defined]
    if getattr(head, "values", None) is None:
        return "this head has no int8 bound: it is smaller than 16 MiB, or not in float32 on a CPU"
    vars(head)["values"] = None  # Why vars: `pin` has copied the buffers of modules into it.
    return ""


def switches(config: EngineConfig, info: EngineInfo) -> Iterator[Switch]:
    """The switches of this engine, in the order of the report."""
    yield Switch(name="prefix cache", to="off", options={"enable_prefix_caching": False})
    yield Switch(name="chunked prefill", to="off", options={"enable_chunked_prefill": False})
    yield Switch(name="mixed steps", to="prompts apart", alter=phases_apart)
    yield Switch(name="batching", to="one at a time", options={"max_num_seqs": 1})
    yield Switch(name="admission", to="watermark", options={"admission": "watermark"})
    for size in (info.block_size // 4, info.block_size * 4):
        if size >= 8:
            options: dict[str, Any] = {"block_size": size}
            if config.num_kv_blocks is not None:  # otherwise its size is already given in bytes
                tokens = (config.num_kv_blocks - 1) * info.block_size
                options["num_kv_blocks"] = 1 + tokens // size
            yield Switch(name="block size", to=f"{size} tokens", options=options)
    if info.device == "cpu":
        yield Switch(name="fused layer", to="part by part", alter=unfuse)
        yield Switch(name="screened head", to="all logits", alter=drop_screen)
    else:
        yield Switch(name="graphs", to="off", options={"enforce_eager": True})
        yield Switch(name="overlap", to="off", options={"overlap": False})
        fp8 = {"kv_cache_dtype": "fp8"}
        yield Switch(name="KV cache", to="fp8", options=fp8, same_tokens=False)
    yield Switch(name="attention backend", to="naive", options={"attention_backend": "naive"})
    for kind in ("int8", "int4"):
        quantized = {"quantization": kind}
        yield Switch(name="quantization", to=kind, options=quantized, same_tokens=False)


def run(config: EngineConfig, options: WorkOptions) -> dict[str, Any]:
    """Runs each switch alternating with the base, and returns the report as plain data.

    Why pairs: only one other engine is open at a time, so a large model needs twice its memory, not
    twelve times; and each ratio compares rounds that ran directly after each other.
    """
    temperature, rounds = options.temperature, options.rounds
    with open_llm(config) as llm:
        info = llm.info
    drawn = throughput.drawn_items(options, config)
    items, notes = fit(drawn, info.vocab_size, info.max_model_len, cap=True)
    base = _base(config, info, items)
    report: dict[str, Any] = {
        **throughput.heading(info.device),
        "notes": notes,
        "base": config_options(base),
        **throughput.sizes(items),
        "dtype": base.dtype if base.dtype != "auto" else info.dtype,
        "greedy": temperature == 0,
        "switches": [],
    }
    with open_llm(base) as one:
        warm_up(one, items, temperature)
        for number, switch in enumerate(switches(base, info)):
            result: dict[str, Any] = {"name": switch.name, "to": switch.to}
            report["switches"].append(result)
            is_there = [getattr(base, name) == value for name, value in switch.options.items()]
            if is_there and all(is_there):
                result["skipped"] = "so it is in the base"
                continue
            try:
                other = open_llm(replace(base, **switch.options))
            except ConfigError as error:
                result["skipped"] = f"refused: {error}"
                continue
            with other:
                why = switch.alter(other) if switch.alter else ""
                if why:
                    result["skipped"] = why
                    continue
                warm_up(other, items, temperature)
                pairs = _pairs(one, other, items, number * rounds, rounds, temperature)
            result |= _compare(switch, pairs)
    return report


def _base(config: EngineConfig, info: EngineInfo, items: SequenceOf[WorkItem]) -> EngineConfig:
    """The engine that all others are compared with.

    In float32 on a CPU, so that tokens can be compared. Its token budget fits the longest request,
    which is necessary without chunked prefill. Unless its size is given, its pool has half of the
    blocks that all requests need at their ends, so that admission has an effect.
    """
    longest = max(len(item.prompt_token_ids) + item.max_tokens for item in items)
    options: dict[str, Any] = {"max_model_len": longest, "block_size": info.block_size}
    device_type = info.device.partition(":")[0]
    options["max_num_batched_tokens"] = max(
        replace(config, enable_chunked_prefill=True).step_budget(device_type), longest
    )
    if config.dtype == "auto" and device_type == "cpu":
        options["dtype"] = "float32"
    sizes = (config.num_kv_blocks, config.kv_cache_gib, config.memory_fraction)
    if sizes == (None, None, None):
        needed = [
            -(-(len(item.prompt_token_ids) + item.max_tokens) // info.block_size) for item in items
        ]
        options["num_kv_blocks"] = 1 + max(sum(needed) // 2, 2 * max(needed))
    return replace(config, **options)


def _pairs(
    one: LLM,
    other: LLM,
    items: SequenceOf[WorkItem],
    first: int,
    rounds: int,
    temperature: float,
) -> list[tuple[Round, Round]]:
    """Alternating rounds of both engines, each pair with new ids."""
    metrics, pairs = Metrics(), []
    for llm in (one, other):
        llm.engine.observers.append(metrics)
    for number in range(first, first + rounds):
        work = shift_ids(items, number, one.info.vocab_size)
        before, after = (timed_round(llm, metrics, work, temperature) for llm in (one, other))
        pairs.append((before, after))
    one.engine.observers.remove(metrics)
    return pairs


def _compare(switch: Switch, pairs: list[tuple[Round, Round]]) -> dict[str, Any]:
    """The effect of a switch: times of both, latencies, and the number of requests with other
    tokens."""
    bases, others = zip(*pairs, strict=True)
    different = sum(
        a.outputs[0].token_ids != b.outputs[0].token_ids
        for before, after in pairs
        for a, b in zip(before.outputs, after.outputs, strict=True)
    )
    return {
        "base_seconds": [r.seconds for r in bases],
        "seconds": [r.seconds for r in others],
        "base_latency": latencies(bases),
        "latency": latencies(others),
        "preemptions": statistics.median(r.counters["preemptions"] for r in others),
        "same_tokens": switch.same_tokens,
        "different_requests": different,
        "compared_requests": sum(len(before.outputs) for before, _ in pairs),
    }


def latencies(rounds: SequenceOf[Round]) -> dict[str, float]:
    """Latencies as medians over rounds: TTFT, and a high percentile of ITL."""
    found = []
    for one in rounds:
        ttft = percentiles([output.metrics.ttft_s for output in one.outputs])
        itl = percentiles(summarize(one.records).itl_s)
        found.append((ttft["p50"], itl.get("p99", 0.0)))
    first, gap = (statistics.median(column) for column in zip(*found, strict=True))
    return {"ttft_p50_s": first, "itl_p99_s": gap}


def require_equal_tokens(report: dict[str, Any]) -> None:
    """Checks that switches which promise equal tokens have them: greedy tokens in float32.

    Raises:
        NanoEngineError: tokens differ; the report has already been printed.
    """
    if not report["greedy"] or report["dtype"] != "float32":
        return
    broken = [
        f"{s['name']}: {s['to']}"
        for s in report["switches"]
        if s.get("same_tokens") and s["different_requests"]
    ]
    if broken:
        raise NanoEngineError(f"tokens that differ from the base's, but must be equal: {broken}")


def format_report(report: dict[str, Any]) -> str:
    """The report as text; its table is Markdown."""
    shown = [s for s in report["switches"] if "seconds" in s]
    tokens = report["output_tokens"]
    base_s = [seconds for s in shown for seconds in s["base_seconds"]]
    first = {
        name: statistics.median(s["base_latency"][name] for s in shown)
        for name in ("ttft_p50_s", "itl_p99_s")
    }
    rows = [
        f"{report['requests']} requests, {report['input_tokens']:,} tokens in, {tokens:,} out,"
        f" {report['dtype']}, a pool of {report['base']['num_kv_blocks']} blocks of"
        f" {report['base']['block_size']}",
        *(f"note: {note}" for note in report["notes"]),
        "",
        "| switched | to | output tok/s | relative speed | TTFT p50 [ms] | ITL p99 [ms] | tokens |",
        "|---|---|---|---|---|---|---|",
        f"| nothing | | {tokens / statistics.median(base_s):,.0f} | |"
        f" {1e3 * first['ttft_p50_s']:,.0f} | {1e3 * first['itl_p99_s']:,.1f} | |",
    ]
    for s in report["switches"]:
        if "skipped" in s:
            rows.append(f"| {s['name']} | {s['to']} | | | | | {s['skipped']} |")
            continue
        ratios = ratios_of(s)
        rows.append(
            f"| {s['name']} | {s['to']} | {tokens / statistics.median(s['seconds']):,.0f} |"
            f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            f" {1e3 * s['latency']['ttft_p50_s']:,.0f} | {1e3 * s['latency']['itl_p99_s']:,.1f} |"
            f" {_tokens(s)} |"
        )
    return "\n".join(rows)


def ratios_of(switch: dict[str, Any]) -> list[float]:
    """The speed of the other relative to the base, per round; 1 is equal."""
    pairs = zip(switch["base_seconds"], switch["seconds"], strict=True)
    return [base / other for base, other in pairs]


def _tokens(switch: dict[str, Any]) -> str:
    number, all_of = switch["different_requests"], switch["compared_requests"]
    if not number:
        return "equal"
    promised = "" if switch["same_tokens"] else ", which is allowed"
    return f"differ in {number} of {all_of}{promised}"
