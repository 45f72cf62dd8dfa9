"""`python bench.py --gpu-report`: what this GPU does with nanoengine.

One command for a short visit to a GPU: it measures the card, the kernels, the engine and its
options in under 8 minutes (`gpu/`), prints tables, and writes JSON after each part, so that a run
that is cut off keeps what it has. Each part runs in a process of its own: a crash or a hang costs
that part alone.

It runs with torch, triton, transformers, safetensors, xxhash and numpy alone: a machine with a GPU
may have no registry of packages.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.gpu.parts import Row, drive
from benchmarks.suite.gpu.records import ROOT, card, commit, write
from nanoengine.bench.throughput import hardware, require_directory
from nanoengine.errors import ConfigError
from nanoengine.version import versions

OF_THE_CARD = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")

GRACE_S = 15.0
"""A part's process is ended so many seconds after its budget; until then it may finish a case."""


def main(path: Path, only: list[str] | None = None) -> None:
    """Measures, prints tables, writes JSON to `path`, anew after each part.

    Args:
        only: names of parts; None: all.

    Raises:
        ConfigError: there is no CUDA GPU, no such part, or the file can't be written.
    """
    require_directory(path, "out")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"the GPU report measures an NVIDIA GPU, and torch {torch.__version__} finds none here"
        )
    from benchmarks.suite.gpu.suite import TOTAL_S, make_parts
    from benchmarks.suite.gpu.summary import format_report, summarize
    from benchmarks.suite.gpu.timing import graph_seconds

    parts = make_parts(torch.device("cuda"), graph_seconds)
    names = [part.name for part in parts]
    if unknown := sorted(set(only or ()) - set(names)):
        raise ConfigError(f"--parts are of {names}, got {unknown}")
    parts = [part for part in parts if not only or part.name in only]
    head, started = heading(torch.device("cuda")), time.monotonic()

    def save(results: dict[str, Any]) -> None:
        name, result = list(results.items())[-1]
        outcome = result.get("skipped") or result.get("failed") or f"{result['seconds']:.0f} s"
        print(f"{name}: {outcome}", flush=True)
        took = {"seconds": round(time.monotonic() - started, 1), "parts_planned": len(parts)}
        write(path, head | took | summarize(results))

    results = drive(parts, launch, total_s=TOTAL_S, clock=time.monotonic, save=save)
    print(format_report(head | summarize(results)))
    print(f"written to {path}")


def heading(device: torch.device) -> dict[str, Any]:
    """Date, command, commit, hardware with driver and clocks, versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": hardware(device) | card(*OF_THE_CARD),
        "versions": versions(),
    }


SUITE = (sys.executable, "-m", "benchmarks.suite.gpu.suite")


def launch(
    name: str, budget_s: float, command: tuple[str, ...] = SUITE
) -> tuple[list[Row], str | None]:
    """Runs a part in a process of its own; its rows, and why it ended early, if it did."""
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    with tempfile.TemporaryDirectory() as scratch:
        found, complaints = Path(scratch) / "rows", Path(scratch) / "errors"
        found.touch()
        with complaints.open("w") as errors:
            process = subprocess.Popen(
                [*command, name, str(budget_s), str(found)],
                stdout=subprocess.DEVNULL, stderr=errors, env=env,
            )  # fmt: skip
            broken = _wait(process, budget_s + GRACE_S)
        if broken is None and process.returncode:
            last = complaints.read_text(errors="replace").strip().splitlines()[-1:]
            broken = f"its process ended with status {process.returncode}: {''.join(last)}"
        return _rows(found.read_text(encoding="utf-8")), broken


def _wait(process: subprocess.Popen[Any], limit_s: float) -> str | None:
    """Waits for a process, ends it after `limit_s`, and says so."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"its process was ended after {limit_s:.0f} s, in the middle of a case"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return None


def _rows(text: str) -> list[Row]:
    """The whole lines; a process that was ended may have left half of one."""
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
