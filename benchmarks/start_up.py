"""How long it takes to start: imports, the first token, and loading a checkpoint.

    python benchmarks/start_up.py --model CHECKPOINT --json FILE

Each value is the median over rounds of fresh processes, which alternate. Wall seconds are the
user's waiting time; CPU seconds are also valid on a busy machine. A load is compared with a plain
read of the same files, both with an empty page cache, and its peak memory with the weights' size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

IMPORTS = {
    "python": "pass",
    "import nanoengine": "import nanoengine",
    "import torch": "import torch",
    "from nanoengine import LLM": "from nanoengine import LLM",
}

FIRST_TOKEN = """
from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path
with LLM(demo_model_path(), block_size=16) as llm:
    llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)
"""
"""The same as example.py until its first token."""

LOAD = """
import json, sys
from pathlib import Path
from nanoengine import LLM
import nanoengine.build  # with torch and numba

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

before = memory("VmRSS")
llm = LLM(sys.argv[1], dtype="float32", device="cpu", skip_tokenizer_init=True, num_kv_blocks=16)
print(json.dumps({
    "load_s": llm.info.load_s, "weight_bytes": llm.info.weight_bytes,
    "peak_bytes": memory("VmHWM") - before, "kept_bytes": memory("VmRSS") - before,
}))
"""
"""Loads a checkpoint and prints the memory that it needed in addition to the libraries."""


def run(code: str, *arguments: str) -> tuple[dict[str, float], str]:
    """Wall and CPU seconds of a fresh process, and its output."""
    before, started = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    wall, after = time.perf_counter() - started, os.times()
    cpu = after.children_user + after.children_system
    return {
        "wall_s": wall,
        "cpu_s": cpu - before.children_user - before.children_system,
    }, done.stdout


def forget(files: list[Path]) -> None:
    """Drops the files from the page cache, so that the next read waits for the disk."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read_s(files: list[Path]) -> float:
    """Seconds to read the files from start to end into one buffer."""
    forget(files)
    buffer = bytearray(16 << 20)
    started = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - started


def load_round(model: Path) -> dict[str, float]:
    """A plain read and a load, and their ratio."""
    files = sorted(model.glob("*.safetensors"))
    read_s = plain_read_s(files)
    forget(files)
    loaded, printed = run(LOAD, str(model))
    found = json.loads(printed)
    stored = sum(file.stat().st_size for file in files)
    return {
        "load_s": found["load_s"],
        "load_gbs": stored / found["load_s"] / 1e9,
        "plain_read_gbs": stored / read_s / 1e9,
        "share_of_plain_read": read_s / found["load_s"],
        "weight_gb": found["weight_bytes"] / 1e9,
        "peak_of_weights": found["peak_bytes"] / found["weight_bytes"],
        "kept_of_weights": found["kept_bytes"] / found["weight_bytes"],
        "process_wall_s": loaded["wall_s"],
        "process_cpu_s": loaded["cpu_s"],
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of every value."""
    return {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}


def main() -> None:
    """Runs the rounds, prints one line per value, and writes the report if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint to load; none: no load is timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    args = parser.parse_args()
    if args.model and not any(args.model.glob("*.safetensors")):
        parser.error(f"--model: {args.model} holds no safetensors files")
    run(FIRST_TOKEN)  # Why: the very first run compiles kernels, which are then cached on disk.
    times: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for name, code in {**IMPORTS, "example's first token": FIRST_TOKEN}.items():
            times.setdefault(name, []).append(run(code)[0])
        if args.model:
            times.setdefault(f"load {args.model.name}", []).append(load_round(args.model))
    figures: dict[str, Any] = {name: medians(rounds) for name, rounds in times.items()}
    for name, figure in figures.items():
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in figure.items())}")
    if args.json:
        import torch

        from nanoengine.bench.throughput import hardware
        from nanoengine.version import versions

        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(torch.device("cpu")),
            "versions": versions(),
            "rounds": args.rounds,
            "figures": figures,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
