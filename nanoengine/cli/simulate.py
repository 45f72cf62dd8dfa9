"""`nanoengine simulate`: how a pool and a policy affect a workload, without a model.

With `--step-times`, times are estimated from the steps that `nanoengine bench --json` recorded.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from nanoengine.bench.simulator import format_report, load_time_model, make_scheduler, simulate
from nanoengine.bench.workload import STANDARD, make_workload
from nanoengine.cli.options import subset
from nanoengine.core.policies import make_policy
from nanoengine.errors import ConfigError
from nanoengine.observe.trace import Trace
from nanoengine.settings.checks import require_positive
from nanoengine.settings.config import EngineConfig

SIZES = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArgs:
    """Options of the simulator; options of the scheduler have the names of EngineConfig.

    Attributes:
        num_blocks: Number of KV blocks in the simulated pool, including the null block.
        block_size: Tokens per KV block.
        workload: standard, shared-prefix, or a file: .csv (ContextTokens,GeneratedTokens), .jsonl
            (ids).
        num_requests: Number of requests, or of rows of the file; None: 256, or all rows.
        prefix_len: Length of the common prefix of shared-prefix [tokens].
        seed: Seed of lengths and ids.
        max_tokens: Give each request this max_tokens; it stops earlier, at its own length, as if by
            EOS. By default, max_tokens is its length, as in a benchmark that ignores EOS.
        max_num_seqs: Maximum number of sequences that run at once.
        max_num_batched_tokens: Token budget per step.
        admission: The admission policy.
        step_times: Estimate times from the steps in this report of `nanoengine bench --json`.
        json: Print JSON.
        trace: Write the inputs of the scheduler to this file; see docs/trace.md.
    """

    num_blocks: int
    block_size: int = 16
    workload: str = "standard"
    num_requests: int | None = None
    prefix_len: int = 512
    seed: int = 0
    max_tokens: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    admission: Literal["predictive", "watermark"] = "predictive"
    step_times: Path | None = None
    json: bool = False
    trace: str | None = None

    def __post_init__(self) -> None:
        require_positive(self, ConfigError, "num_requests", "prefix_len", "max_tokens")
        # Why EngineConfig: it checks its options, with the same errors.
        EngineConfig(model="-", num_kv_blocks=self.num_blocks, **subset(EngineConfig, self))


def main(args: SimulateArgs) -> None:
    """Simulates and prints the report.

    Raises:
        ConfigError: the workload or the bench report can't be read.
    """
    rows = args.num_requests or (sys.maxsize if Path(args.workload).suffix else 256)
    scale = STANDARD._replace(num_requests=rows)
    items = make_workload(args.workload, scale, args.prefix_len, args.seed, _no_text)
    sizes = {name: getattr(args, name) for name in SIZES}
    scheduler = make_scheduler(policy=make_policy(args.admission), **sizes)
    model = load_time_model(args.step_times) if args.step_times else None
    with Trace(args.trace, scheduler) if args.trace else nullcontext() as trace:
        report = simulate(
            items, scheduler, length_cap=args.max_tokens, time_model=model, trace=trace
        )
    result = asdict(report) | {"prefill_waste_frac": report.prefill_waste_frac}
    print(json_module.dumps(result, indent=2) if args.json else format_report(report))


def _no_text(text: str) -> Sequence[int]:
    raise ValueError("the simulator has no tokenizer: give prompt_token_ids")
