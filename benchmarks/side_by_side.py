"""What the comparing benchmarks share: variants of one job, which alternate, and their ratios.

Each variant is run once per round, A B A B, so that other load on the machine affects all of them
equally; the first round, in which kernels compile, is not counted. Reported are the median seconds
of each, wall and CPU time (which other processes disturb less), and the ratio to the first variant
per round: its median, minimum and maximum.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoengine.assets import demo_model_path
from nanoengine.bench.throughput import hardware
from nanoengine.version import versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.suite.shapes import SHAPES, write_shape


class Clock:
    """Wall and CPU seconds since it was created."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Both, with their names in reports."""
        return {
            "wall": time.perf_counter() - self._wall,
            "CPU time": time.process_time() - self._cpu,
        }


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of one variant: its times in seconds, its output, and counts that explain the
    times."""

    seconds: dict[str, float]
    tokens: list[list[int]]
    counts: dict[str, float] = field(default_factory=dict)


def compare(name: str, variants: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, Any]:
    """Runs all variants, alternating; compares their times with the first one.

    `same_outputs` is the share of outputs, over all rounds, that were equal in all variants.
    """
    runs: dict[str, list[Run]] = {variant: [] for variant in variants}
    for number in range(rounds + 1):
        for variant, run in variants.items():
            done = run()
            if number:
                runs[variant].append(done)
    basis, *others = variants
    equal = [
        all(tokens == first for tokens in rest)
        for each in zip(*runs.values(), strict=True)
        for first, *rest in zip(*(run.tokens for run in each), strict=True)
    ]
    found: dict[str, Any] = {
        "name": name,
        "rounds": rounds,
        "same_outputs": sum(equal) / len(equal),
        "counts": {variant: each[-1].counts for variant, each in runs.items()},
    }
    for what in runs[basis][0].seconds:
        times = {variant: [run.seconds[what] for run in each] for variant, each in runs.items()}
        ratios = {
            variant: [t / b for t, b in zip(times[variant], times[basis], strict=True)]
            for variant in others
        }
        found[what] = {
            "median_s": {variant: statistics.median(values) for variant, values in times.items()},
            "ratio": {variant: _spread(values) for variant, values in ratios.items()},
        }
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def show(found: dict[str, Any]) -> None:
    """Prints one comparison."""
    basis = next(iter(found["counts"]))
    same = f"{found['same_outputs']:.0%} of the outputs the same"
    print(f"{found['name']}  ({found['rounds']} rounds; {same})")
    for what, times in found.items():
        if not isinstance(times, dict) or "median_s" not in times:
            continue
        for variant, seconds in times["median_s"].items():
            line = f"  {what:<12} {variant:<22} {seconds:9.3f} s"
            if variant != basis:
                r = times["ratio"][variant]
                line += f"   {r['median']:.2f} times {basis} ({r['min']:.2f} to {r['max']:.2f})"
            print(line)
    for variant, counts in found["counts"].items():
        print(f"  {variant}: " + ", ".join(f"{value:,} {key}" for key, value in counts.items()))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The common options."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument(
        "--model", default="demo", help=f"demo, a shape ({', '.join(SHAPES)}) or a directory"
    )
    options.add_argument("--attention-backend", default="auto")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, help="write the figures to this file")
    return options


@contextmanager
def model_options(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Keywords of `LLM` for `--model`; a shape gets random weights."""
    options = {"skip_tokenizer_init": True, "attention_backend": args.attention_backend}
    with TemporaryDirectory() as scratch:
        if args.model in SHAPES:
            write_shape(args.model, Path(scratch))
            options |= {"model": scratch, "load_format": "dummy"}
        else:
            model = str(demo_model_path()) if args.model == "demo" else args.model
            options |= {"model": model}
        yield options


def report(args: argparse.Namespace, comparisons: list[dict[str, Any]]) -> None:
    """Prints all comparisons, and writes them to `--json`."""
    for found in comparisons:
        show(found)
    record(args, comparisons)


def record(args: argparse.Namespace, comparisons: list[dict[str, Any]]) -> None:
    """Writes the results to `--json`, if it is given, with date, hardware and versions."""
    import torch

    if args.json:
        whole = {
            "date": datetime.date.today().isoformat(),
            "model": Path(args.model).name,
            "options": {k: v for k, v in vars(args).items() if k not in ("model", "json")},
            "hardware": hardware(torch.device("cpu")),
            "versions": versions(),
            "comparisons": comparisons,
        }
        args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
