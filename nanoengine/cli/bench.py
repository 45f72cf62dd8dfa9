"""The offline throughput benchmark: `python bench.py`, or `nanoengine bench`.

Builds a workload (`cli/workload.py`), runs it through an `LLM`, and prints what was reached beside
what the hardware could do. Load time and a warm-up are left out of every throughput and reported
apart. Knows only the public `LLM` and the engine's observers, info and counters. Other questions
have files of their own:

    --compare small   what each room of the large engine buys             ladder.py
    --ablate          what each thing buys that can be switched off       ablate.py
    --sweep, --rate   what another value, or another load, does           sweep.py
    --plot            the same as figures                                 plot.py, figures.py
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nanoengine.cli import ablate, bench_report, ladder, plot, sweep, workload
from nanoengine.cli.bench_report import Round
from nanoengine.cli.options import EngineArgs
from nanoengine.cli.rounds import config_options, limits, timed_round, warm_up, warm_up_items
from nanoengine.cli.workload import WorkItem
from nanoengine.errors import ConfigError, NanoEngineError
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.cli.hf_baseline import HFBaseline
    from nanoengine.llm import LLM


class Scale(NamedTuple):
    """How many requests, and the shortest and longest random prompt and output."""

    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]


STANDARD = Scale(256, (100, 1024), (100, 1024))
SMOKE = Scale(32, (12, 128), (12, 128))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArgs(EngineArgs):
    """Options of the benchmark, and every option of the engine; `seed` seeds both.

    examples:
      nanoengine bench --smoke
      nanoengine bench --model Qwen/Qwen3-0.6B --dataset shared-prefix --json report.json
      nanoengine bench --shape qwen3-0.6b --load-format dummy --num-requests 32 --rounds 3
    """

    model: str = "demo"
    """Directory of a checkpoint, a hub id, or demo: the small model that comes with the package."""
    skip_tokenizer_init: bool = True
    """Token ids in, token ids out; the text prompts of a JSONL file are encoded before the run."""
    shape: Literal["tiny", "small", "qwen3-0.6b"] | None = None
    """A standard Qwen3 shape in the place of a model; needs `--load-format dummy`."""
    dataset: str = "random"
    """random, shared-prefix, or a file: .jsonl (prompts), .csv (ContextTokens,GeneratedTokens)."""
    smoke: bool = False
    """A scale for small machines: 32 requests, lengths 12-128 (standard: 256, and 100-1024)."""
    num_requests: int | None = None
    """How many requests, or how many rows of the file; None: 256, or 32 with `--smoke`."""
    input_len: tuple[int, int] | None = None
    """Shortest and longest random prompt [tokens]; after the common part with shared-prefix."""
    output_len: tuple[int, int] | None = None
    """Shortest and longest output [tokens]."""
    prefix_len: int = 512
    """Common prompt tokens of shared-prefix."""
    temperature: float | None = None
    """0 is greedy; None: 0.6, or 0 with `--ablate`, which compares the tokens."""
    rounds: int | None = None
    """Timed rounds, each with new ids; the median is reported. None: 1, or 3 with `--compare` and
    `--ablate`."""
    compare: Literal["hf", "small"] | None = None
    """hf: run transformers on the same work, round by round in turn, and print the ratio. small:
    run nanoengine/small beside the large engine, and print what each room of it buys."""
    compare_batch_size: int = 32
    """Sequences in a batch of the baseline."""
    ablate: bool = False
    """Switch one thing off at a time, round by round in turn with the engine as it is."""
    sweep: str | None = None
    """NAME=VALUE,VALUE,...: an option of the engine, and the values that it takes in turn."""
    rate: tuple[float, ...] = ()
    """Let requests arrive by chance, so many a second in the mean, instead of all at once; several
    rates run one after the other."""
    json: Path | None = None
    """Write all numbers, with date, hardware, versions and command, to this file."""
    plot: Path | None = None
    """Draw the numbers into this directory, as SVG and PNG; needs nanoengine[plot]."""

    def __post_init__(self) -> None:
        asked = [name for name in ("compare", "ablate", "sweep", "rate") if getattr(self, name)]
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join('--' + name for name in asked)}: give one of them")
        if self.trace is not None and asked and self.compare != "hf":
            raise ConfigError(
                f"--{asked[0]} runs several engines, and a trace is of one: leave it out"
            )
        if self.temperature is None:
            object.__setattr__(self, "temperature", 0.0 if self.ablate else 0.6)
        EngineArgs.__post_init__(self)


def main(args: BenchArgs) -> None:
    """Runs the benchmark and prints its report.

    Raises:
        ConfigError: the options contradict each other, or the workload does not fit the model.
    """
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"json={str(args.json)!r} lies in a directory that does not exist")
    if args.plot is not None:
        plot.require_matplotlib()
    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(args, Path(scratch))
        report, text = _ask(args, config)
        if args.plot:
            report["pool"] = sweep.pool_waste(make_workload(args, config.model))
    print(text)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot.draw([("", report)], args.plot)
    if args.ablate:
        ablate.require_equal_tokens(report)


def _ask(args: BenchArgs, config: EngineConfig) -> tuple[dict[str, Any], str]:
    """The report that the options ask for, as plain data and as text."""
    from nanoengine.llm import LLM

    if args.compare == "small":
        report = _climb(args, config)
        return report, ladder.format_report(report)
    if args.ablate or args.sweep or args.rate:
        work = make_workload(args, config.model)
        if args.ablate:
            report = ablate.run(config, work, _temperature(args), args.rounds or 3)
            text = ablate.format_report(report)
        elif args.sweep:
            values = sweep.parse(args.sweep)
            report = sweep.run(config, work, values, _temperature(args), args.rounds or 1)
            text = sweep.format_sweep(report)
        else:
            report = sweep.run_rates(config, work, args.rate, _temperature(args), args.seed)
            text = sweep.format_rates(report)
        return {"model": args.shape or args.model, "dataset": args.dataset, **report}, text
    with LLM(**config_options(config)) as llm:
        report = run(args, config, llm)
    return report, bench_report.format_report(report)


def _climb(args: BenchArgs, config: EngineConfig) -> dict[str, Any]:
    """The report of `--compare small`."""
    if args.shape:
        raise ConfigError("--compare small needs weights that both engines read: leave out --shape")
    if args.device not in ("auto", "cpu"):
        raise ConfigError(f"--compare small compares on a CPU, got device={args.device!r}")
    found = ladder.run(
        config.model,
        make_workload(args, config.model),
        max_num_seqs=args.max_num_seqs,
        temperature=_temperature(args),
        rounds=args.rounds or 3,
    )
    return {"model": args.model, **found}


def engine_config(args: BenchArgs, scratch: Path) -> EngineConfig:
    """The engine's part of the options, with the model found; a shape is written into `scratch`."""
    model = args.model
    if args.shape:
        if args.load_format != "dummy" or args.model != "demo":
            raise ConfigError("--shape has no weights: use it with --load-format dummy, no --model")
        workload.write_shape(args.shape, scratch)
        model = str(scratch)
    elif args.model == "demo":
        from nanoengine.assets import demo_model_path

        model = str(demo_model_path())
    options = {f.name: getattr(args, f.name) for f in fields(EngineConfig)}
    config = EngineConfig(**{**options, "model": model})
    sizes = (config.num_kv_blocks, config.kv_cache_gib, config.memory_fraction)
    is_sized = any(size is not None for size in (*sizes, config.gpu_memory_utilization))
    if args.compare and config.device != "cpu" and not is_sized:
        import torch

        if torch.cuda.is_available():
            raise ConfigError(
                "--compare loads a second model: leave it memory with --memory-fraction (say 0.5)"
            )
    return config


def make_workload(args: BenchArgs, model: str) -> list[WorkItem]:
    """The requests that the options ask for, not yet fitted to a model."""
    scale = _scale(args)
    if args.dataset == "random":
        return list(workload.random_workload(*scale, seed=args.seed))
    if args.dataset == "shared-prefix":
        items = workload.shared_prefix_workload(*scale, prefix_len=args.prefix_len, seed=args.seed)
        return list(items)
    path = Path(args.dataset)
    if path.suffix not in (".jsonl", ".csv") or not path.is_file():
        raise ConfigError(
            "dataset must be random, shared-prefix, or an existing .jsonl or .csv file,"
            f" got {args.dataset!r}"
        )
    if path.suffix == ".csv":
        return list(workload.csv_workload(path, scale.num_requests, args.seed))
    encode = _encoder(args, model)
    return list(
        workload.jsonl_workload(path, scale.num_requests, scale.output_len, args.seed, encode)
    )


def _scale(args: BenchArgs) -> Scale:
    """The chosen scale; options that are given win over `--smoke` and the standard."""
    for name in ("num_requests", "rounds", "prefix_len", "compare_batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    for name in ("input_len", "output_len"):
        low, high = getattr(args, name) or (1, 1)
        if not 1 <= low <= high:
            raise ConfigError(f"{name} must be a range of positive lengths, got {low} {high}")
    default = SMOKE if args.smoke else STANDARD
    return Scale(
        args.num_requests or default.num_requests,
        args.input_len or default.input_len,
        args.output_len or default.output_len,
    )


def _encoder(args: BenchArgs, model: str) -> Callable[[str], list[int]]:
    """Text to ids, with a tokenizer that is loaded when the first text comes."""

    @functools.cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(args.tokenizer or model)

    return lambda text: list(tokenizer().encode(text))


def run(args: BenchArgs, config: EngineConfig, llm: LLM) -> dict[str, Any]:
    """Warms up, measures the hardware, runs the rounds, and returns the report as plain data."""
    info = llm.engine.info
    drawn = make_workload(args, config.model)
    is_trace = args.dataset.endswith(".csv")
    items, notes = workload.fit(drawn, info.vocab_size, info.max_model_len, cap=is_trace)
    if args.smoke:
        notes.insert(0, f"smoke scale: {len(items)} requests; not the field's standard workload")
    start = time.perf_counter()
    warm_up(llm, items, info.vocab_size, _temperature(args))
    warmup_s = time.perf_counter() - start
    cost, peaks = limits(config, info)
    rounds, baseline_s = _run_rounds(args, config, llm, items)
    report = {
        **bench_report.heading(info.device),
        "notes": notes,
        "workload": {
            "dataset": args.dataset,
            "seed": args.seed,
            "temperature": args.temperature,
            "requests": len(items),
            "input_tokens": sum(len(item.prompt_token_ids) for item in items),
            "output_tokens": sum(item.max_tokens for item in items),
        },
        "model": args.shape or args.model,
        "engine": {**bench_report.plain(asdict(info)), "warmup_s": warmup_s},
        **bench_report.summarize_rounds(rounds, items, cost, peaks),
    }
    if baseline_s:
        size = args.compare_batch_size
        report["baseline"] = bench_report.compare(rounds, baseline_s, items, size)
    return report


def _temperature(args: BenchArgs) -> float:
    assert args.temperature is not None, "set when it was made"
    return args.temperature


def _run_rounds(
    args: BenchArgs, config: EngineConfig, llm: LLM, items: list[WorkItem]
) -> tuple[list[Round], list[float]]:
    """The timed rounds, and the seconds of the baseline's, if one is compared: A B A B."""
    from nanoengine.observe.metrics import Metrics

    info, temperature = llm.engine.info, _temperature(args)
    metrics, baseline = Metrics(), None
    llm.engine.observers.append(metrics)
    if args.compare:
        import torch

        from nanoengine.cli.hf_baseline import HFBaseline

        baseline = HFBaseline(
            config.model,
            dummy=config.load_format == "dummy",
            dtype=getattr(torch, info.dtype),
            device=torch.device(info.device),
            batch_size=args.compare_batch_size,
        )
        baseline.generate(warm_up_items(items, info.vocab_size), temperature)
    rounds, baseline_s = [], []
    for number in range(args.rounds or (3 if args.compare else 1)):
        work = workload.shifted(items, number, info.vocab_size)
        rounds.append(timed_round(llm, metrics, work, temperature))
        if baseline:
            baseline_s.append(_timed_baseline(baseline, work, temperature))
    return rounds, baseline_s


def _timed_baseline(baseline: HFBaseline, items: list[WorkItem], temperature: float) -> float:
    start = time.perf_counter()
    outputs = baseline.generate(items, temperature)  # Lists on the host: the device has finished.
    seconds = time.perf_counter() - start
    if [len(output) for output in outputs] != [item.max_tokens for item in items]:
        raise NanoEngineError("the baseline gave other token counts than the workload asks for")
    return seconds
