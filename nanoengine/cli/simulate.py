"""`nanoengine simulate`: what a pool and a policy do to a workload, without a model.

Runs the real scheduler and block manager (`observe/simulator.py`) over a workload of the benchmark.
With `--fit`, the steps recorded by `nanoengine bench --json` say how long each step would take.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanoengine.cli import workload
from nanoengine.cli.workload import WorkItem
from nanoengine.errors import ConfigError
from nanoengine.observe.simulator import SimulationReport, TimeModel, make_scheduler, simulate
from nanoengine.observe.trace import Trace
from nanoengine.settings.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArgs:
    """Options of the simulator; those of the scheduler have the names of EngineConfig."""

    num_blocks: int
    """Blocks of the imagined pool, the null block included."""
    block_size: int = 16
    """Tokens a KV block."""
    workload: str = "standard"
    """standard, shared-prefix, or a file: .csv (ContextTokens,GeneratedTokens), .jsonl (ids)."""
    num_requests: int | None = None
    """How many requests, or rows of the file; None: 256, or all rows."""
    prefix_len: int = 512
    """Common prompt tokens of shared-prefix."""
    seed: int = 0
    """Draws lengths and ids."""
    length_cap: int | None = None
    """The scheduler sees this max_tokens and each request stops earlier by itself; None: it sees
    the exact lengths, as in a benchmark that ignores EOS."""
    max_num_seqs: int = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: int = 8192
    """Token budget of a step."""
    long_prefill_threshold: int = 0
    """Most prompt tokens of one sequence a step; 0: only the budget bounds it."""
    enable_prefix_caching: bool = True
    """Reuse equal prefixes."""
    watermark_frac: float = 0.01
    """Share of blocks that admission leaves free."""
    admission: Literal["predictive", "watermark", "hysteresis"] = "predictive"
    """The policy that holds sequences back."""
    preempt_above: float | None = None
    """Hysteresis: pressure at which admission stops; None: 0.95."""
    admit_below: float | None = None
    """Hysteresis: pressure under which it starts again; None: 0.80."""
    fit: Path | None = None
    """Report of `nanoengine bench --json`: its steps give the times."""
    json: bool = False
    """Print JSON."""
    trace: str | None = None
    """Write what each step does to this file; see docs/trace.md."""
    trace_steps: str | None = None
    """Trace the steps from A up to and without B: A:B, either of which may be left out."""

    def __post_init__(self) -> None:
        self.engine_config()
        for name in ("num_requests", "prefix_len", "length_cap"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def engine_config(self) -> EngineConfig:
        """These settings as an engine's: the same names, so the same bounds and the same errors."""
        return EngineConfig(
            model="none",
            num_kv_blocks=self.num_blocks,
            block_size=self.block_size,
            trace=self.trace,
            trace_steps=self.trace_steps,
            **{name: getattr(self, name) for name in SCHEDULER_OPTIONS},
        )


SCHEDULER_OPTIONS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_threshold",
    "enable_prefix_caching",
    "watermark_frac",
    "admission",
    "preempt_above",
    "admit_below",
)


def main(args: SimulateArgs) -> None:
    """Simulates and prints the report.

    Raises:
        ConfigError: the workload or the bench report can't be read.
    """
    from nanoengine.core.policies import make_policy

    items = make_workload(args)
    scheduler = make_scheduler(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        policy=make_policy(args.admission, args.preempt_above, args.admit_below),
        **{name: getattr(args, name) for name in SCHEDULER_OPTIONS[:5]},
    )
    time_model = load_time_model(args.fit) if args.fit else None
    steps = args.engine_config().steps_traced()
    with Trace(args.trace, scheduler, steps=steps) if args.trace else nullcontext() as trace:
        report = simulate(
            items, scheduler, length_cap=args.length_cap, time_model=time_model, trace=trace
        )
    if args.json:
        print(json_module.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(format_report(report))


def make_workload(args: SimulateArgs) -> Iterator[WorkItem]:
    """The requests that the options ask for, made as they are pulled."""
    scale = (args.num_requests or 256, (100, 1024), (100, 1024))
    if args.workload == "standard":
        return workload.random_workload(*scale, seed=args.seed)
    if args.workload == "shared-prefix":
        return workload.shared_prefix_workload(*scale, prefix_len=args.prefix_len, seed=args.seed)
    path, rows = Path(args.workload), args.num_requests or sys.maxsize
    if path.suffix not in (".csv", ".jsonl") or not path.is_file():
        raise ConfigError(
            "workload must be standard, shared-prefix, or an existing .csv or .jsonl file, got"
            f" {args.workload!r}"
        )
    if path.suffix == ".csv":
        return workload.csv_workload(path, rows, args.seed)
    return workload.jsonl_workload(path, rows, (100, 1024), args.seed, _no_text)


def _no_text(text: str) -> Sequence[int]:
    raise ValueError("the simulator has no tokenizer: give prompt_token_ids")


def load_time_model(path: Path) -> TimeModel:
    """Fits the times of a step to the steps of a bench report.

    Raises:
        ConfigError: no report, or one without step records.
    """
    try:
        steps = json_module.loads(path.read_text(encoding="utf-8"))["step_records"]
        return TimeModel.fit(steps["tokens"], steps["context_tokens"], steps["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"fit={str(path)!r} must be a report of `nanoengine bench --json` with step records"
            f" ({type(error).__name__}: {error})"
        ) from error


def format_report(report: SimulationReport) -> str:
    """The report as aligned text."""
    r = report
    rows = [
        ("requests", f"{r.requests:,}, {r.failed:,} of them too large for the pool"),
        ("steps", f"{r.steps:,}, {r.mean_batch:.1f} sequences in the mean, {r.max_batch} at most"),
        ("tokens", f"{r.prefill_tokens:,} prefilled, {r.output_tokens:,} generated"),
        ("preemptions", f"{r.preemptions:,}"),
        ("prefill waste", f"{r.prefill_waste_frac:.1%}: {r.recomputed_tokens:,} tokens again"),
        ("prefix cache", f"{r.hit_rate:.1%} of the tokens looked up"),
        ("blocks", f"{r.mean_blocks:,.0f} in use in the mean, {r.peak_blocks:,} at most, of"
                   f" {r.usable_blocks:,}"),
        ("empty slots", f"{r.mean_waste_slots:,.0f} in the mean, {r.peak_waste_slots:,} at most"),
        ("estimated", "no --fit" if r.estimated_s is None else f"{r.estimated_s:,.2f} s,"
                      f" {r.output_tokens / r.estimated_s:,.1f} output tok/s"),
        ("simulated in", f"{r.wall_s:.2f} s"),
    ]  # fmt: skip
    return "\n".join(f"{label:<15} {text}" for label, text in rows)
