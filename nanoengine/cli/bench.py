"""The offline throughput benchmark: `python bench.py`, or `nanoengine bench`.

Builds a workload (`cli/workload.py`), runs it through an `LLM`, and prints what was reached beside
what the hardware could do. Load time and a warm-up are left out of every throughput and reported
apart. Knows only the public `LLM` and the engine's observers, info and counters.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from nanoengine.cli import bench_report, ladder, workload
from nanoengine.cli.bench_report import Round
from nanoengine.cli.options import EngineArgs
from nanoengine.cli.workload import WorkItem
from nanoengine.config import EngineConfig
from nanoengine.errors import ConfigError, NanoEngineError

if TYPE_CHECKING:
    from nanoengine.cli.hf_baseline import HFBaseline
    from nanoengine.llm import LLM
    from nanoengine.observe.cost import ModelCost
    from nanoengine.observe.metrics import Metrics
    from nanoengine.outputs import RequestOutput


class Scale(NamedTuple):
    """How many requests, and the shortest and longest random prompt and output."""

    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]


STANDARD = Scale(256, (100, 1024), (100, 1024))
SMOKE = Scale(32, (12, 128), (12, 128))
COUNTERS = (
    "prefill_tokens",
    "recomputed_tokens",
    "preemptions",
    "cache_queried_tokens",
    "cache_hit_tokens",
)
"""Running totals of the engine that a round is charged for."""


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
    temperature: float = 0.6
    """0 is greedy."""
    rounds: int | None = None
    """Timed rounds, each with new ids; the median is reported. None: 1, or 3 with `--compare`."""
    compare: Literal["hf", "small"] | None = None
    """hf: run transformers on the same work, round by round in turn, and print the ratio. small:
    run nanoengine/small beside the large engine, and print what each room of it buys."""
    compare_batch_size: int = 32
    """Sequences in a batch of the baseline."""
    json: Path | None = None
    """Write all numbers, with date, hardware, versions and command, to this file."""


def main(args: BenchArgs) -> None:
    """Runs the benchmark and prints its report.

    Raises:
        ConfigError: the options contradict each other, or the workload does not fit the model.
    """
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"json={str(args.json)!r} lies in a directory that does not exist")
    from nanoengine.llm import LLM

    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(args, Path(scratch))
        if args.compare == "small":
            return _show(args, _climb(args, config), ladder.format_report)
        options = {f.name: getattr(config, f.name) for f in fields(EngineConfig)}
        with LLM(**options) as llm:
            report = run(args, config, llm)
    return _show(args, report, bench_report.format_report)


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
        temperature=args.temperature,
        rounds=args.rounds or 3,
    )
    return {"model": args.model, **found}


def _show(
    args: BenchArgs, report: dict[str, Any], format_report: Callable[[dict[str, Any]], str]
) -> None:
    print(format_report(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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
    import torch

    from nanoengine.observe.peak import measure_peaks

    info = llm.engine.info
    drawn = make_workload(args, config.model)
    is_trace = args.dataset.endswith(".csv")
    items, notes = workload.fit(drawn, info.vocab_size, info.max_model_len, cap=is_trace)
    if args.smoke:
        notes.insert(0, f"smoke scale: {len(items)} requests; not the field's standard workload")
    start = time.perf_counter()
    _generate(llm, _warm_up(items, info.vocab_size), args.temperature)
    warmup_s = time.perf_counter() - start
    device, dtype = torch.device(info.device), getattr(torch, info.dtype)
    whole = (info.quantization or "").endswith("int8 activations") and device.type == "cpu"
    peaks = measure_peaks(device, dtype, products="int8" if whole else None)
    rounds, baseline_s = _run_rounds(args, config, llm, items)
    weight_bytes = info.weight_bits / 8 if info.weight_bits else dtype.itemsize
    cost = model_cost(config, dtype.itemsize, weight_bytes)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hardware": bench_report.hardware(device),
        "versions": bench_report.versions(),
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


def _warm_up(items: SequenceOf[WorkItem], vocab_size: int) -> list[WorkItem]:
    """A few short requests with ids of their own, so that no timed prompt finds their prefixes."""
    short = [replace(item, max_tokens=min(item.max_tokens, 8)) for item in items[:16]]
    return workload.shifted(short, -1, vocab_size)


def _run_rounds(
    args: BenchArgs, config: EngineConfig, llm: LLM, items: list[WorkItem]
) -> tuple[list[Round], list[float]]:
    """The timed rounds, and the seconds of the baseline's, if one is compared: A B A B."""
    import torch

    from nanoengine.observe.metrics import Metrics

    info = llm.engine.info
    metrics, baseline = Metrics(), None
    llm.engine.observers.append(metrics)
    if args.compare:
        from nanoengine.cli.hf_baseline import HFBaseline

        baseline = HFBaseline(
            config.model,
            dummy=config.load_format == "dummy",
            dtype=getattr(torch, info.dtype),
            device=torch.device(info.device),
            batch_size=args.compare_batch_size,
        )
        baseline.generate(_warm_up(items, info.vocab_size), args.temperature)
    rounds, baseline_s = [], []
    for number in range(args.rounds or (3 if args.compare else 1)):
        work = workload.shifted(items, number, info.vocab_size)
        rounds.append(_timed_round(llm, metrics, work, args.temperature))
        if baseline:
            baseline_s.append(_timed_baseline(baseline, work, args.temperature))
    return rounds, baseline_s


def _generate(
    llm: LLM, items: SequenceOf[WorkItem], temperature: float
) -> SequenceOf[RequestOutput]:
    """Runs the items; each must give exactly its number of tokens."""
    from nanoengine.sampling_params import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": list(item.prompt_token_ids)} for item in items],
        [
            SamplingParams(
                temperature=temperature, max_tokens=i.max_tokens, ignore_eos=True, detokenize=False
            )
            for i in items
        ],
        use_tqdm=sys.stderr.isatty(),
    )
    for item, output in zip(items, outputs, strict=True):
        got = len(output.outputs[0].token_ids) if output.outputs else 0
        if got != item.max_tokens:
            raise NanoEngineError(
                f"request {output.request_id} gave {got} tokens in the place of {item.max_tokens}"
            )
    return outputs


def _timed_round(llm: LLM, metrics: Metrics, items: list[WorkItem], temperature: float) -> Round:
    metrics.records.clear()
    before = llm.engine.stats()
    start = time.perf_counter()
    outputs = _generate(llm, items, temperature)
    seconds = time.perf_counter() - start
    after = llm.engine.stats()
    return Round(
        seconds=seconds,
        outputs=outputs,
        records=tuple(metrics.records),
        counters={name: getattr(after, name) - getattr(before, name) for name in COUNTERS},
    )


def _timed_baseline(baseline: HFBaseline, items: list[WorkItem], temperature: float) -> float:
    start = time.perf_counter()
    outputs = baseline.generate(items, temperature)  # Lists on the host: the device has finished.
    seconds = time.perf_counter() - start
    if [len(output) for output in outputs] != [item.max_tokens for item in items]:
        raise NanoEngineError("the baseline gave other token counts than the workload asks for")
    return seconds


def model_cost(
    config: EngineConfig, element_bytes: int, weight_bytes: float | None = None
) -> ModelCost:
    """FLOPs and bytes of the model, from its config.json."""
    from transformers import AutoConfig

    from nanoengine.observe.cost import ModelCost

    loaded = AutoConfig.from_pretrained(config.model, revision=config.revision)
    return ModelCost.from_config(loaded.get_text_config().to_dict(), element_bytes, weight_bytes)
