"""What every peer's script shares: the workload, the clock, the bandwidth, the JSON line.

A script loads its engine, runs the whole workload once with other ids to warm up, runs it again
timed, measures the copy bandwidth of the GPU, and prints one JSON line. An engine that can't be
imported is skipped, with the reason in that line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # Why: a peer's environment has no nanoengine installed.

from nanoengine.bench.workload import Scale, WorkItem, random_workload, shift_ids  # noqa: E402

TEMPERATURE = 0.6
LIMITS = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
"""Equal for every engine."""

Generate = Callable[[list[WorkItem]], Sequence[Sequence[int]]]
"""Runs requests; returns the output ids of each, in order."""


class Engine(NamedTuple):
    """A loaded engine: a function that runs requests, and facts for the report."""

    generate: Generate
    notes: dict[str, Any]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options of every script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="directory that make_checkpoint.py wrote")
    parser.add_argument("--label", required=True, help="the name in the table")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024, help="of a prompt and of an output")
    return parser


def workload(requests: int, longest: int) -> list[WorkItem]:
    """The standard workload with 256 and 1,024; smaller values are for trying the scripts."""
    lengths = (min(100, longest), longest)
    return list(random_workload(Scale(requests, lengths, lengths)))


def run(
    args: argparse.Namespace,
    load: Callable[[], Engine],
    *,
    bandwidth: Callable[[], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Loads, warms up, runs timed, and prints the JSON line.

    `bandwidth` returns GB/s; None measures the GPU's.
    """
    line: dict[str, Any] = {"label": args.label, "versions": versions()}
    try:
        started = clock()
        engine = load()
        line |= {"load_s": clock() - started} | engine.notes
        items = workload(args.requests, args.longest)
        vocab_size = json.loads(Path(args.model, "config.json").read_text())["vocab_size"]
        items = shift_ids(items, 0, vocab_size)  # ids below the vocabulary
        engine.generate(shift_ids(items, 1, vocab_size))
        started = clock()
        outputs = engine.generate(items)
        seconds = clock() - started
        expected = [item.max_tokens for item in items]
        if [len(ids) for ids in outputs] != expected:
            raise RuntimeError(f"{sum(map(len, outputs))} output tokens, not {sum(expected)}")
        line |= {
            "input_tokens": sum(len(item.prompt_token_ids) for item in items),
            "output_tokens": sum(expected),
            "seconds": seconds,
            "output_tokens_per_s": sum(expected) / seconds,
            "copy_gbs": (bandwidth or copy_bandwidth)(),
        }
    except ImportError as error:
        line["skipped"] = f"can't be imported: {error}"
    except Exception as error:
        line["failed"] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    print(json.dumps(line), flush=True)
    return line


def copy_bandwidth() -> float:
    """GB/s of copying 1 GiB on the GPU, read and written bytes together; median of 20."""
    import torch

    source = torch.empty(2**29, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    seconds = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(seconds[3:]) / 1e9


def versions() -> dict[str, str]:
    """Versions of the packages that affect the speed, if installed."""
    found = {}
    for name in ("torch", "triton", "vllm", "nano-vllm", "flash-attn", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def finish() -> None:
    """Ends the process at once: threads of some engines would keep it alive."""
    sys.stdout.flush()
    os._exit(0)
