"""The parts of the GPU report, in order; run as a module, one part in a process of its own.

    python -m benchmarks.suite.gpu.suite PART SECONDS FILE        appends a JSON line a case to FILE

Started by `gpu_report.py`. The order is that of worth: what the numbers stand on first, then
the headline, then what explains it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from benchmarks.suite.gpu import engine, kernels
from benchmarks.suite.gpu.parts import Case, Part, run_cases
from benchmarks.suite.gpu.records import card
from benchmarks.suite.gpu.timing import graph_seconds

TOTAL_S = 440.0
"""Seconds of a whole report; less than the sum of budgets, which few parts use up."""

AT_WORK = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
SLOWED_BY = "clocks_event_reasons.active"
"""Asked alone: a driver that does not know it answers nothing at all."""


def make_parts(device: torch.device, timer: kernels.Timer) -> list[Part]:
    """All parts."""

    def part(name: str, budget_s: float, cases: Callable[[], Iterable[Case]]) -> Part:
        return Part(name=name, budget_s=budget_s, cases=cases)

    ablation = [
        part(
            f"ablation: {step.name}",
            45,
            partial(
                engine.workload_cases,
                engine.ablation_options(index),
                2,
                without=engine.ablation_without(index),
            ),
        )
        for index, step in enumerate(engine.ABLATION)
    ]
    return [
        part("peaks", 30, partial(kernels.peak_cases, device, timer)),
        part("parity", 60, partial(kernels.parity_cases, device)),
        part("decode attention", 60, partial(kernels.decode_cases, device, timer)),
        part("standard workload", 70, partial(engine.workload_cases, {}, 3)),
        part("decode steps", 60, partial(engine.step_cases, {})),
        *ablation,
        part("prefill attention", 40, partial(kernels.prefill_cases, device, timer)),
    ]


def gpu_trouble() -> str | None:
    """Why this process can use its GPU no more; None if it can."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the GPU answers no more ({str(error).splitlines()[0]})"
    return None


def main(name: str, budget_s: str, path: str) -> None:
    """Runs one part and appends its rows as they come; last the card, still warm."""
    parts = {p.name: p for p in make_parts(torch.device("cuda"), graph_seconds)}
    rows = run_cases(
        parts[name], budget_s=float(budget_s), clock=time.monotonic, still_usable=gpu_trouble
    )
    with Path(path).open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
        warm = {"case": "the card after it"} | card(*AT_WORK) | card(SLOWED_BY)
        file.write(json.dumps(warm) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
