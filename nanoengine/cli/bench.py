"""`nanoengine bench`: measures the speed of a model on this machine with one workload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanoengine.bench.workload import WorkOptions
from nanoengine.cli.options import DEMO, EngineArgs, engine_options


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArgs(EngineArgs, WorkOptions):
    """Options of the benchmark, and every option of the engine; `seed` seeds both. Benchmarks of
    nanoengine itself (rates, ablations, sweeps) are run by `python bench.py` in its repository.

    examples:
      nanoengine bench --smoke
      nanoengine bench --model Qwen/Qwen3-0.6B --dataset shared-prefix --json report.json
      nanoengine bench --model Qwen/Qwen3-0.6B --num-requests 32 --rounds 3

    Attributes:
        skip_tokenizer_init: Token ids in, token ids out; the text prompts of a JSONL file are
            encoded before the run.
        json: Write all numbers, with date, hardware, versions and command, to this file.
    """

    model: str = DEMO
    skip_tokenizer_init: bool = True
    json: Path | None = None

    def __post_init__(self) -> None:
        EngineArgs.__post_init__(self)
        WorkOptions.__post_init__(self)


def main(args: BenchArgs) -> None:
    """Runs the benchmark and prints its report.

    Raises:
        ConfigError: the options contradict each other, or the workload does not fit the model.
    """
    from nanoengine.bench import throughput
    from nanoengine.llm import LLM

    throughput.require_directory(args.json, "json")
    with LLM(**engine_options(args)) as llm:
        report = throughput.measure(llm, args.model, args).report
    print(throughput.format_report(report))
    if args.json is not None:
        throughput.write(report, args.json)
