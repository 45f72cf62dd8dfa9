"""`python bench.py`: a workload compared with the hardware's limits, or one of the larger
questions.

Only the file of the requested question is imported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from benchmarks.suite import options, shapes
from nanoengine.bench.workload import WorkOptions
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.settings.config import EngineConfig

DEMO = "demo"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status: 2 for an explained error."""
    args, values = options.parse(argv)
    try:
        if args.gpu_report:
            from benchmarks.suite import gpu_visit

            gpu_visit.report(args.out, args.parts)
        else:
            run(args, values)
    except NanoEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Everything but the GPU report.

    Raises:
        ConfigError: the options contradict each other, or the workload does not fit the model.
    """
    from nanoengine.bench import throughput

    name = args.shape or values.get("model", DEMO)
    work = work_options(args, values)
    throughput.require_directory(args.json, "json")
    if args.plot is not None:
        from benchmarks.suite import plot

        plot.require_matplotlib()
    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(args, values, Path(scratch))
        report, text = answer(args, name, work, config)
        if args.plot is not None:
            from benchmarks.suite import sweep

            report["pool"] = sweep.pool_waste(throughput.drawn_items(work, config))
    print(text)
    if args.json is not None:
        throughput.write(report, args.json)
    if args.plot is not None:
        plot.draw([("", report)], args.plot)
    if args.ablate:
        from benchmarks.suite import ablate

        ablate.require_equal_tokens(report)


def work_options(args: argparse.Namespace, values: dict[str, Any]) -> WorkOptions:
    """The work. It is greedy for `--ablate`, which compares tokens; comparisons run three rounds
    unless given."""
    default = {"temperature": 0.0} if args.ablate else {}
    if args.ablate or args.compare:
        default["rounds"] = 3
    names = [one.name for one in fields(WorkOptions) if one.name in values]
    return WorkOptions(**default | {name: values[name] for name in names})


def engine_config(args: argparse.Namespace, values: dict[str, Any], scratch: Path) -> EngineConfig:
    """The engine's options, with the model found; a shape is written into `scratch`."""
    names = {one.name for one in fields(EngineConfig)}
    settings = {"model": DEMO, "skip_tokenizer_init": True}
    config = EngineConfig(**settings | {n: value for n, value in values.items() if n in names})
    question = next((n for n in ("compare", "ablate", "sweep", "rate") if getattr(args, n)), None)
    if config.trace is not None and question and args.compare != "hf":
        raise ConfigError(
            f"--{question} runs several engines, but a trace is for one: remove --trace"
        )
    if args.shape:
        if config.load_format != "dummy" or config.model != DEMO:
            raise ConfigError(
                "--shape has no weights: use it with --load-format dummy and without --model"
            )
        if args.compare == "small":
            raise ConfigError(
                "--compare small needs weights that both engines can load: remove --shape"
            )
        shapes.write_shape(args.shape, scratch)
        config = replace(config, model=str(scratch))
    elif config.model == DEMO:
        from nanoengine.assets import demo_model_path

        config = replace(config, model=str(demo_model_path()))
    if args.compare == "small" and config.device not in ("auto", "cpu"):
        raise ConfigError(f"--compare small compares on a CPU, got device={config.device!r}")
    if args.compare == "hf":
        leave_room(config)
    return config


def leave_room(config: EngineConfig) -> None:
    """Raises ConfigError if the engine would use the memory that a second model needs."""
    sizes = (config.num_kv_blocks, config.kv_cache_gib, config.memory_fraction)
    if config.device != "cpu" and {*sizes, config.gpu_memory_utilization} == {None}:
        import torch

        if torch.cuda.is_available():
            raise ConfigError(
                "--compare loads a second model: reserve memory for it with --memory-fraction,"
                " such as 0.5"
            )


def answer(
    args: argparse.Namespace, name: str, work: WorkOptions, config: EngineConfig
) -> tuple[dict[str, Any], str]:
    """The requested report, as plain data and as text."""
    about = {"model": name, "dataset": work.dataset}
    if args.ablate:
        from benchmarks.suite import ablate

        report = about | ablate.run(config, work)
        return report, ablate.format_report(report)
    if args.sweep:
        from benchmarks.suite import sweep

        report = about | sweep.run(config, work, sweep.parse(args.sweep))
        return report, sweep.format_sweep(report)
    if args.rate:
        from benchmarks.suite import sweep

        report = about | sweep.run_rates(config, work, args.rate)
        return report, sweep.format_rates(report)
    if args.compare == "small":
        from benchmarks.suite import ladder

        report = about | ladder.run(config, work)
        return report, ladder.format_report(report)
    from benchmarks.suite import limits
    from benchmarks.suite.engines import open_llm
    from nanoengine.bench import throughput

    with open_llm(config) as llm:
        also_run = None
        if args.compare == "hf":
            from benchmarks.suite import hf_baseline

            also_run = hf_baseline.Baseline(llm, work.temperature, args.compare_batch_size)
        measured = throughput.measure(llm, name, work, also_run)
        report = limits.with_limits(measured, llm)
    text = limits.format_limits(report)
    if also_run is not None:
        report["baseline"] = also_run.compare(measured)
        text += hf_baseline.LINES.format(**report["baseline"])
    return report, throughput.format_report(report, text)
