"""What the runners of all peers share: options, timing, and one JSON line per workload.

A runner is a function `start(options) -> Loaded`, passed to `main`. Loading and warm-up are timed
separately. This module uses the standard library only, and is imported before the peer's libraries,
because it sets the numbers of threads. The `run_*.py` files call it; `compare.py` reads their
lines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Why: a peer's environment has no nanoengine installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.suite.workloads import is_workload, requests_of, warm_up
from nanoengine.bench.workload import WorkItem

QUANTIZATIONS = ("none", "int8", "int4", "default")
"""How weights are stored. none: float32 throughout; default: the peer's default for the checkpoint,
which is stored in bfloat16; any other value is the name of a GGUF file."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a runner; `batch`, `tokens` and `longest` (the tokens of one request) are the
    sizes of the largest workload."""

    model: Path
    converted: Path
    quantization: str
    threads: int
    batch: int
    tokens: int
    longest: int

    def converted_file(self, suffixes: dict[str, str]) -> Path:
        """The converted checkpoint for the requested quantization, or the GGUF file with that
        name."""
        name = self.quantization
        return self.converted / (name if is_gguf(name) else self.model.name + suffixes[name])

    def stored_bits(self, num_parameters: int) -> float:
        """Bits per weight in the requested GGUF file."""
        return 8 * (self.converted / self.quantization).stat().st_size / num_parameters

    def kv_gib(self, element_bytes: int = 4) -> int:
        """GiB for the keys and values of all `tokens`, and the same again for what a peer caches
        from earlier workloads; an integer of at least 4."""
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        sizes = config["num_hidden_layers"], config["num_key_value_heads"], head_dim
        token = math.prod(sizes) * 2 * element_bytes
        return max(4, math.ceil(2 * self.tokens * token / 2**30))


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A peer with its model in memory.

    `generate` returns the requested number of greedy ids per request. Bits are per stored value,
    including scales: weights of the layers, of the head, and cached keys and values. `dtype` is the
    dtype of float products.
    """

    generate: Callable[[list[WorkItem]], list[list[int]]]
    version: str
    dtype: str = "float32"
    body_bits: float = 32
    head_bits: float = 32
    kv_bits: float = 32


def is_gguf(quantization: str) -> bool:
    """Whether the name is a GGUF file's."""
    return quantization.endswith(".gguf")


def main(
    peer: str,
    start: Callable[[Options], Loaded],
    quantizations: Sequence[str],
    *,
    gguf: bool = False,
) -> None:
    """Parses the command line, loads, warms up, and prints one line per workload."""
    parser = argparse.ArgumentParser(description=f"{peer} on workloads of suite/workloads.py")
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--converted", type=Path, default=Path(), help="directory of conversions")
    parser.add_argument("--workload", type=_workload, nargs="+", required=True)
    words = [*quantizations, *(arg for arg in sys.argv if gguf and is_gguf(arg))]
    parser.add_argument("--quantization", choices=words, default="none")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--beside", type=int, nargs="*", default=[], help="processes meant to run")
    args = parser.parse_args()
    for name in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
        os.environ[f"{name}_NUM_THREADS"] = str(args.threads)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    work = {
        name: requests_of(name, vocab_size=vocab_size, seed=args.seed, scale=args.scale)
        for name in args.workload
    }
    started = time.perf_counter()
    loaded = start(
        Options(
            model=args.model.resolve(),
            converted=args.converted.resolve(),
            quantization=args.quantization,
            threads=args.threads,
            batch=max(4, *map(len, work.values())),
            tokens=max(sum(len(p) + n for p, n in requests) for requests in work.values()),
            longest=max(len(p) + n for requests in work.values() for p, n in requests),
        )
    )
    load_s = time.perf_counter() - started
    loaded.generate(warm_up(vocab_size))
    facts = {
        "peer": peer, "quantization": args.quantization, "dtype": loaded.dtype,
        "version": loaded.version, "load_s": round(load_s, 2), "body_bits": loaded.body_bits,
        "head_bits": loaded.head_bits, "kv_bits": loaded.kv_bits,
    }  # fmt: skip
    for name, requests in work.items():
        print(json.dumps(facts | measure(name, requests, loaded.generate, args.beside)), flush=True)


def _workload(name: str) -> str:
    if not is_workload(name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a workload")
    return name


def measure(
    name: str,
    requests: list[WorkItem],
    generate: Callable[[list[WorkItem]], list[list[int]]],
    beside: Sequence[int] = (),
) -> dict[str, Any]:
    """Runs a workload once: seconds, and how many cores other processes used meanwhile; for G, the
    ids.

    The processes `beside` do not count as others. Exits if a request has another number of tokens
    than requested.
    """
    started = time.perf_counter()
    before = time.process_time(), seconds_of(beside), busy_seconds()
    outputs = generate(requests)
    seconds = time.perf_counter() - started
    after = time.process_time(), seconds_of(beside), busy_seconds()
    own, meant, busy = (b - a for a, b in zip(before, after, strict=True))
    expected, got = [count for _, count in requests], [len(ids) for ids in outputs]
    if got != expected:
        sys.exit(f"{name}: output lengths {got}, expected {expected}")
    if name == "G":
        return {"workload": name, "ids": [list(map(int, ids)) for ids in outputs]}
    return {
        "workload": name,
        "requests": len(requests),
        "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": sum(expected),
        "seconds": round(seconds, 4),
        "output_tok_s": float(f"{sum(expected) / seconds:.5g}"),
        "own_cores": round(own / seconds, 2),
        "beside_cores": round(meant / seconds, 2),
        "other_cores": round(max(0.0, busy - own - meant) / seconds, 2),
        "peak_rss_mib": _peak_rss_mib(),
    }


def busy_seconds() -> float:
    """CPU seconds that the whole machine has used, including the hypervisor's share (Linux)."""
    user, nice, system, _idle, _wait, irq, softirq, stolen = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def seconds_of(processes: Sequence[int]) -> float:
    """CPU seconds that these processes have used (Linux)."""
    # Why from the end: the second field is a name, which may contain spaces.
    found = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in processes]
    ticks = (int(field) for stat in found for field in stat.split()[11:13])
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _peak_rss_mib() -> int:
    """This process's peak resident memory, including mapped weights.

    Why not getrusage: its value survives exec, so a child of a large parent starts with the
    parent's.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
