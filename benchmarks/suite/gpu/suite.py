"""The parts of the GPU report; run as a module, one part in a process.

    python -m benchmarks.suite.gpu.suite PART SECONDS FILE        appends a line per case to FILE
    python -m benchmarks.suite.gpu.suite PART SECONDS FILE CASE   runs only this case

Started by `gpu_visit.py`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import triton

from benchmarks.suite.gpu import engine, kernels
from benchmarks.suite.gpu.parts import Case, Row, run_cases
from benchmarks.suite.gpu.records import card
from benchmarks.suite.gpu.timing import graph_seconds
from nanoengine.errors import ConfigError
from nanoengine.kernels.launch import require_compiler

AT_WORK = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
SLOWED_BY = "clocks_event_reasons.active"
"""A separate query, because a driver that does not know one field answers none."""


def make_parts(
    device: torch.device, timer: kernels.Timer
) -> dict[str, Callable[[], Iterable[Case]]]:
    """The function that makes the cases of each part."""
    return {
        "stack": stack_cases,
        "tokens": engine.token_cases,
        "peaks": partial(kernels.peak_cases, device, timer),
        "parity": partial(kernels.parity_cases, device),
        "decode attention": partial(kernels.decode_cases, device, timer),
        "standard workload": partial(engine.workload_cases, {}, 3),
        "decode steps": partial(engine.step_cases, {}),
        "standard workload, fp8 KV": partial(engine.workload_cases, {"kv_cache_dtype": "fp8"}, 2),
        "prefill attention": partial(kernels.prefill_cases, device, timer),
    }


def stack_cases() -> Iterator[Case]:
    """What all other parts need: a GPU that torch finds, Triton's compiler, transformers.

    `gpu_visit.py` runs nothing else if the first case is `refused`, and continues in all other
    cases.
    """
    yield Case("GPU", gpu_row)
    yield Case("Triton", triton_row)
    yield Case(
        "transformers", lambda: {"version": importlib.import_module("transformers").__version__}
    )


def gpu_row() -> Row:
    """The GPU as torch sees it.

    Raises:
        ConfigError: torch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} finds no GPU")
    torch.zeros(1, device="cuda").item()
    return {
        "python": sys.version, "torch": torch.__version__, "cuda": torch.version.cuda,
        "card": str(torch.cuda.get_device_properties(0)), "memory": torch.cuda.mem_get_info(),
    }  # fmt: skip


def triton_row() -> Row:
    """Compiles and launches a kernel."""
    require_compiler()
    torch.cuda.synchronize()
    return {"version": triton.__version__}


def gpu_trouble() -> str | None:
    """Why this process can't use its GPU any more; None if it can."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the GPU answers no more ({str(error).splitlines()[0]})"
    return None


def main(name: str, budget_s: str, path: str, only: str | None = None) -> None:
    """Runs one part, or one case of it, and appends its rows at once; tracebacks also go to stderr.
    The last row has the state of the GPU directly after the measurements."""
    cases: Iterable[Case] = make_parts(torch.device("cuda"), graph_seconds)[name]()
    if only is not None:
        cases = (case for case in cases if case.name == only)
    rows = run_cases(
        name, cases, budget_s=float(budget_s), clock=time.monotonic, still_usable=gpu_trouble
    )
    with Path(path).open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(*row.get("traceback", ()), sep="\n", file=sys.stderr, flush=True)
        warm = {"case": "the card after it"} | card(*AT_WORK) | card(SLOWED_BY)
        file.write(json.dumps(warm) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
