"""`bench.py --sweep` and `--rate`: the same work with other settings, or with another load.

    --sweep NAME=V,V,...   one engine per value, all requests at once: tok/s and the roofline
    --rate R R ...         one engine, requests arrive randomly: latencies
    pool_waste             the simulator with pools of several sizes: recomputed work

`figures.py` draws the results.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from benchmarks.suite.engines import open_llm
from benchmarks.suite.limits import limits, reached
from benchmarks.suite.options import value_of
from nanoengine.bench import throughput
from nanoengine.bench.simulator import make_scheduler, simulate
from nanoengine.bench.throughput import drawn_items, params_of, timed_round, warm_up
from nanoengine.bench.workload import WorkItem, WorkOptions, fit, shift_ids
from nanoengine.core.policies import make_policy
from nanoengine.errors import ConfigError
from nanoengine.observe.metrics import Metrics, percentiles, summarize
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.llm import LLM

POOL_SHARES = (0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0)
"""Sizes of simulated pools, relative to the blocks that all requests need at their ends."""
POLICIES = ("watermark", "predictive")


def parse(text: str) -> tuple[str, list[Any]]:
    """`max_num_seqs=1,2,4` as name and values.

    Raises:
        ConfigError: the text is invalid, or the engine has no option with this name.

        >>> parse("max_num_seqs=1,2"), parse("admission=watermark,predictive")
        (('max_num_seqs', [1, 2]), ('admission', ['watermark', 'predictive']))
    """
    name, _, values = text.partition("=")
    name = name.replace("-", "_")
    if not values or not all(values.split(",")):
        raise ConfigError(f"sweep must be NAME=VALUE,VALUE,..., got {text!r}")
    known = [field.name for field in fields(EngineConfig)]
    if name not in known:
        raise ConfigError(f"sweep: the engine has no option {name!r}; it has {', '.join(known)}")
    return name, [value_of(word) for word in values.split(",")]


def run(
    config: EngineConfig, options: WorkOptions, name_values: tuple[str, list[Any]]
) -> dict[str, Any]:
    """Runs the work once for each value, and returns the report as plain data.

    Raises:
        ConfigError: a value is not one of the option's.
    """
    name, values = name_values
    configs = [replace(config, **{name: value}) for value in values]
    report: dict[str, Any] = {"sweep": name, "points": []}
    for value, changed in zip(values, configs, strict=True):
        with open_llm(changed) as llm:
            info, metrics = llm.info, Metrics()
            drawn = drawn_items(options, config)
            items, notes = fit(drawn, info.vocab_size, info.max_model_len, cap=True)
            warm_up(llm, items, options.temperature)
            llm.engine.observers.append(metrics)
            cost, peaks = limits(changed, info)
            timed = [
                timed_round(llm, metrics, shift_ids(items, n, info.vocab_size), options.temperature)
                for n in range(options.rounds)
            ]
        if not report["points"]:
            report |= {**throughput.heading(info.device), "notes": notes, **throughput.sizes(items)}
        found, median = throughput.summarize_rounds(timed, items), throughput.median_of(timed)
        report["points"].append(
            {
                "value": value,
                **{key: found[key] for key in ("seconds", "output_tokens_per_s", "mean_batch")},
                "roofline": reached(median, cost, peaks)["roofline"],
                "preemptions": found["counters"]["preemptions"],
                "ttft_s": distribution([output.metrics.ttft_s for output in median.outputs]),
                "itl_s": distribution(summarize(median.records).itl_s),
            }
        )
    return report


def distribution(values: SequenceOf[float]) -> list[float]:
    """101 values, the percentiles 0 to 100: enough to draw any number of values."""
    return list(percentiles(values, ranks=tuple(range(101))).values())


# --- arrivals -------------------------------------------------------------------------------------


def run_rates(
    config: EngineConfig, options: WorkOptions, rates: SequenceOf[float]
) -> dict[str, Any]:
    """Runs the work with each arrival rate [requests/s], and returns the report as plain data.

    Raises:
        ConfigError: a rate is not above 0.
    """
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise ConfigError(f"rate must be above 0 requests per second, got {rate}")
    with open_llm(config) as llm:
        info = llm.info
        drawn = drawn_items(options, config)
        items, notes = fit(drawn, info.vocab_size, info.max_model_len, cap=True)
        warm_up(llm, items, options.temperature)
        report = {**throughput.heading(info.device), "notes": notes, **throughput.sizes(items)}
        report["rates"] = [
            _run_rate(llm, shift_ids(items, n, info.vocab_size), rate, options.temperature)
            for n, rate in enumerate(rates)
        ]
    return report


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times of requests [s]: gaps are exponential, so arrivals are a Poisson process.

    >>> [round(second, 2) for second in arrivals(3, 10.0, 0)]
    [0.19, 0.33, 0.38]
    """
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def _run_rate(
    llm: LLM, items: SequenceOf[WorkItem], rate: float, temperature: float
) -> dict[str, Any]:
    """One run with arrivals.

    The latency of a request counts from its scheduled arrival. Why: a request that arrives during a
    long step is only queued after that step.
    """
    engine, metrics = llm.engine, Metrics()
    engine.observers.append(metrics)
    due, requests = arrivals(len(items), rate, llm.config.seed), []
    started = time.perf_counter()
    while len(requests) < len(items) or engine.has_unfinished():
        now = time.perf_counter() - started
        while len(requests) < len(items) and due[len(requests)] <= now:
            item = items[len(requests)]
            name, params = str(len(requests)), params_of(item, temperature)
            requests.append(engine.add_request(name, list(item.prompt_token_ids), params))
        if engine.has_unfinished():
            engine.step()
        else:
            time.sleep(max(0.0, due[len(requests)] - (time.perf_counter() - started)))
    seconds = time.perf_counter() - started
    engine.observers.remove(metrics)
    firsts = [request.sequences[0].first_token_time or 0.0 for request in requests]
    lasts = [request.sequences[0].last_token_time or 0.0 for request in requests]
    return {
        "rate": rate,
        "seconds": seconds,
        "requests_per_s": len(items) / seconds,
        "output_tokens_per_s": sum(item.max_tokens for item in items) / seconds,
        "ttft_s": distribution([t - started - at for t, at in zip(firsts, due, strict=True)]),
        "itl_s": distribution(summarize(metrics.records).itl_s),
        "e2e_s": distribution([t - started - at for t, at in zip(lasts, due, strict=True)]),
    }


# --- pools ----------------------------------------------------------------------------------------


def pool_waste(items: SequenceOf[WorkItem], block_size: int = 16) -> list[dict[str, Any]]:
    """Recomputed work with pools of several sizes, from the simulator."""
    needed = [-(-(len(item.prompt_token_ids) + item.max_tokens) // block_size) for item in items]
    sizes = sorted({max(1 + int(sum(needed) * share), 2 + max(needed)) for share in POOL_SHARES})
    found = []
    for policy, num_blocks in itertools.product(POLICIES, sizes):
        scheduler = make_scheduler(
            num_blocks=num_blocks, block_size=block_size, policy=make_policy(policy)
        )
        report = simulate(items, scheduler)
        found.append(
            {
                "policy": policy,
                "tokens": (num_blocks - 1) * block_size,
                "share": (num_blocks - 1) / sum(needed),
                "prefill_waste_frac": report.prefill_waste_frac,
                "preemptions": report.preemptions,
                "steps": report.steps,
            }
        )
    return found


# --- text -----------------------------------------------------------------------------------------


def format_sweep(report: dict[str, Any]) -> str:
    """The report of a sweep as text; its table is Markdown."""
    rows = [
        *_head(report),
        f"| {report['sweep']} | sequences per step | output tok/s | roofline [tok/s] | share |"
        " TTFT p50 [ms] | ITL p50 | ITL p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in report["points"]:
        speed, roofline = point["output_tokens_per_s"], point["roofline"]["output_tokens_per_s"]
        ttft, itl = point["ttft_s"], point["itl_s"]
        rows.append(
            f"| {point['value']} | {point['mean_batch']:.1f} | {speed:,.0f} | {roofline:,.0f} |"
            f" {speed / roofline:.0%} | {_ms(ttft, 50)} | {_ms(itl, 50)} | {_ms(itl, 99)} |"
        )
    return "\n".join(rows)


def format_rates(report: dict[str, Any]) -> str:
    """The report of `--rate` as text; its table is Markdown."""
    rows = [
        *_head(report),
        "| requests/s | done | output tok/s | TTFT p50 [ms] | TTFT p99 | ITL p50 | ITL p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in report["rates"]:
        ttft, itl = point["ttft_s"], point["itl_s"]
        rows.append(
            f"| {point['rate']:g} | {point['requests_per_s']:.1f} |"
            f" {point['output_tokens_per_s']:,.0f} | {_ms(ttft, 50)} | {_ms(ttft, 99)} |"
            f" {_ms(itl, 50)} | {_ms(itl, 99)} |"
        )
    return "\n".join(rows)


def _head(report: dict[str, Any]) -> list[str]:
    return [
        f"{report['requests']} requests, {report['input_tokens']:,} tokens in,"
        f" {report['output_tokens']:,} out",
        *(f"note: {note}" for note in report["notes"]),
        "",
    ]


def _ms(values: SequenceOf[float], rank: int) -> str:
    """A percentile of a distribution in milliseconds; empty if there are no values."""
    return f"{1e3 * values[rank]:,.1f}" if values else ""
