"""Estimated step times on CPUs with more cores than available: `python -m benchmarks.many_cores`.

A cost model, not a measurement. A step is a list of parts, as in the fused layers
(`kernels/cpu_decoder.py`). A part has a number of equal items, each with some bytes and FLOPs:
tiles of a weight or slices of their rows, tasks of attention, rows of a norm. Workers share the
items; an item is not split.

    part = fork and join of W workers
         + the larger of   all bytes / memory bandwidth, the busiest worker's bytes / a core's share
                           FLOPs of the busiest worker / a core's rate
    step = sum of parts + the host's part, which one core does

`--measure` checks the model on this machine with 1 to all of its cores, with values that it
measures: bandwidth and FLOP/s of one core and of all, and the cost of a fork. The machines of the
table are hypothetical; their values are below. Assumed and never measured: a fork takes 60 ns more
per worker (each takes an item and reports its end, on one cache line), twice that between sockets,
and memory of the other socket is read at half the rate.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.suite.shapes import SHAPES

TILE = 32  # outputs of a weight per item, with AVX-512
MIN_PART_ROWS, PIECES = 32, 4  # as in `kernels/cpu_linear.py` and `kernels/pool.py`
SPLIT = 256  # tokens of a context per item of attention
SMALL = 8192  # values that one thread normalizes or gates alone
OF_RATE = 0.85  # share of the peak rate that a product of many rows reaches


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes/s of a core and of a socket's memory, FLOP/s of a core, seconds of a fork without
    workers and per worker; `far`: the relative rate at which another socket's memory is read."""

    cores: int
    core_bytes: float
    socket_bytes: float
    core_flops: float
    sockets: int = 1
    fork_s: float = 1e-6
    worker_s: float = 60e-9
    far: float = 0.5

    def fork(self, workers: int) -> float:
        """Seconds until all workers have started and ended."""
        if workers == 1:
            return 0.0
        return self.fork_s + self.worker_s * workers * self.sockets


MACHINES = {
    "16 cores, 2 channels": Machine(cores=16, core_bytes=30e9, socket_bytes=75e9, core_flops=250e9),
    "16 cores, 8 channels": Machine(
        cores=16, core_bytes=30e9, socket_bytes=280e9, core_flops=250e9
    ),
    "64 cores, 8 channels": Machine(
        cores=64, core_bytes=25e9, socket_bytes=280e9, core_flops=200e9
    ),
    "2 x 64 cores, 2 x 8 channels": Machine(
        cores=128, sockets=2, core_bytes=25e9, socket_bytes=280e9, core_flops=200e9
    ),
}


@dataclass(frozen=True)
class Part:
    """`count` equal items; bytes and FLOPs per item. `placed`: each worker reads from its own
    socket. `shared`: the number of items that read the same bytes."""

    name: str
    count: int
    item_bytes: float
    item_flops: float
    placed: bool = True
    shared: int = 1


def product(
    name: str, rows: int, inputs: int, outputs: int, element: float, workers: int, tile: int = TILE
) -> Part:
    """The product of all rows with one weight; rows are split as in `cpu_linear.row_parts`."""
    tiles, cuts = -(-outputs // tile), 1
    while tiles * cuts < PIECES * workers and rows >= (cuts + 1) * MIN_PART_ROWS:
        cuts += 1
    flops = 2.0 * rows * inputs * tile / cuts
    return Part(name, tiles * cuts, inputs * tile * element, flops, shared=cuts)


def by_rows(name: str, rows: int, size: int) -> Part:
    """A norm or a gate: one item if it is small."""
    count = rows if rows * size > SMALL else 1
    return Part(name, count, 0.0, 8.0 * rows * size / count)


def layer_parts(
    shape: dict[str, Any],
    rows: int,
    context: int,
    element: float,
    kv_element: float,
    workers: int,
) -> list[Part]:
    """The parts of one layer, for decodes with this context each."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads, dim = (
        shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    tasks = rows * kv_heads * max(1, round(context / SPLIT))
    keys = rows * kv_heads * context / tasks  # of a task
    attend = 4.0 * keys * dim * heads / kv_heads
    return [
        by_rows("norm", rows, hidden),
        product("qkv", rows, hidden, (heads + 2 * kv_heads) * dim, element, workers),
        by_rows("rotate", rows, (heads + 2 * kv_heads) * dim),
        Part("attend", tasks, 2 * keys * dim * kv_element, attend, placed=False),
        product("o", rows, heads * dim, hidden, element, workers),
        by_rows("norm", rows, hidden),
        product("gate_up", rows, hidden, 2 * inner, element, workers, 2 * TILE),
        by_rows("gate", rows, inner),
        product("down", rows, inner, hidden, element, workers),
    ]


def head_part(shape: dict[str, Any], rows: int, element: float, workers: int) -> Part:
    """The LM head; if few greedy rows use its int8 bound, one byte per weight is read."""
    screened = rows <= 8 and element > 1
    element = 1 if screened else element
    return product("head", rows, shape["hidden_size"], shape["vocab_size"], element, workers)


def seconds(part: Part, machine: Machine, workers: int) -> float:
    """Seconds of one part."""
    active = min(part.count, workers)
    if active == 1:
        workers = 1
    max_items = math.ceil(part.count / workers) if part.count > 1 else 1
    memory = machine.socket_bytes * machine.sockets
    if machine.sockets > 1 and not part.placed:
        memory *= (1 + machine.far) / 2
    each = (
        part.item_bytes / part.shared
    )  # bytes that a core reads for one item: slices of a tile are adjacent
    read = max(part.count * each / memory, max_items * each / machine.core_bytes)
    computed = max_items * part.item_flops / (machine.core_flops * OF_RATE)
    return machine.fork(workers) + max(read, computed)


def step_seconds(
    shape: dict[str, Any],
    machine: Machine,
    rows: int,
    context: int,
    *,
    element: float = 4,
    kv_element: float = 4,
    host_s: float = 0.0,
    workers: int | None = None,
) -> dict[str, float]:
    """Seconds of a step by part; "forks" is the sum of all forks, "host" runs on one core."""
    workers = workers or machine.cores
    found = {"host": host_s, "forks": 0.0}
    layers = layer_parts(shape, rows, context, element, kv_element, workers)
    for part, times in [(part, shape["num_hidden_layers"]) for part in layers] + [
        (head_part(shape, rows, element, workers), 1)
    ]:
        fork = machine.fork(workers if part.count > 1 else 1)
        found["forks"] += times * fork
        found[part.name] = found.get(part.name, 0.0) + times * (
            seconds(part, machine, workers) - fork
        )
    return found


def host_seconds(rows: int) -> float:
    """The host's part of a decode step: 0.2 ms, and 4 us per row."""
    return 2e-4 + 4e-6 * rows


def table() -> Iterator[str]:
    """Tokens per second of each machine, and the shares of the time."""
    for name, element in (("small", 4), ("qwen3-0.6b", 2), ("llama3-8b", 2)):
        shape = SHAPES[name]
        for where, machine in MACHINES.items():
            for rows in (1, 32, 256):
                found = step_seconds(
                    shape, machine, rows, 512, element=element, kv_element=element,
                    host_s=host_seconds(rows),
                )  # fmt: skip
                whole = sum(found.values())
                idle = idle_share(shape, machine, rows, element)
                parts = sorted(found.items(), key=lambda part: -part[1])[:4]
                shares = ", ".join(f"{part} {100 * s / whole:.0f} %" for part, s in parts)
                yield (
                    f"{name:11} {where:29} {rows:4} rows {rows / whole:9,.0f} tok/s"
                    f"  {1e3 * whole:7.2f} ms  idle {100 * idle:2.0f} %: {shares}"
                )


def idle_share(shape: dict[str, Any], machine: Machine, rows: int, element: float) -> float:
    """The share of the products' time in which cores wait, because items are not split."""
    whole = even = 0.0
    for part in layer_parts(shape, rows, 512, element, element, machine.cores):
        if part.name in ("qkv", "o", "gate_up", "down"):
            fork = machine.fork(machine.cores)
            whole += seconds(part, machine, machine.cores) - fork
            fine = replace(
                part, count=part.count * 1024, item_bytes=part.item_bytes / 1024,
                item_flops=part.item_flops / 1024,
            )  # fmt: skip
            even += seconds(fine, machine, machine.cores) - fork
    return 1 - even / whole


# --- the check on this machine ----------------------------------------------------------------


def measured_machine(threads: int) -> Machine:
    """What this number of threads reads and computes on this machine, and the cost of their
    fork."""
    import torch

    from benchmarks.suite.peak import measure_cpu_peaks

    torch.set_num_threads(threads)
    peaks = measure_cpu_peaks(["float32"])
    pool_s = empty_jobs(threads) if threads > 1 else 0.0
    return Machine(
        cores=threads,
        core_bytes=1e9 * peaks.read_gbs / threads,
        socket_bytes=1e9 * peaks.read_gbs,
        core_flops=1e9 * peaks.gflops["float32"] / threads,
        fork_s=pool_s,
        worker_s=0.0,
    )


def empty_jobs(workers: int, times: int = 2000) -> float:
    """Seconds of a job whose pieces do nothing."""
    import numpy as np

    from nanoengine.kernels.pool import touch

    page = np.zeros(4 * workers, np.uint8)  # at most one page: workers only start and end
    touch(page, workers)
    began = time.perf_counter()
    for _ in range(times):
        touch(page, workers)
    of_python = time.perf_counter()
    for _ in range(times):
        touch(page, 1)
    ended = time.perf_counter()
    return max(0.0, (of_python - began - (ended - of_python)) / times)


def check(shape_name: str, rows: list[int]) -> Iterator[str]:
    """Compares the model with real steps, with one core and with all."""
    import os
    import tempfile
    from pathlib import Path

    import torch

    from benchmarks.suite.shapes import write_shape
    from nanoengine import LLM, SamplingParams

    shape, context = SHAPES[shape_name], 96
    with tempfile.TemporaryDirectory() as folder:
        write_shape(shape_name, Path(folder))
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            machine = measured_machine(threads)
            yield (
                f"{threads} threads: {machine.socket_bytes / 1e9:.0f} GB/s,"
                f" {threads * machine.core_flops / 1e9:.0f} GFLOP/s,"
                f" a fork {1e6 * machine.fork(threads):.1f} us"
            )
            torch.set_num_threads(threads)
            options: dict[str, Any] = {
                "max_model_len": 1024,
                "max_num_seqs": max(rows),
                "kv_cache_gib": 2.0,
            }
            options |= {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "float32"}
            with LLM(folder, **options) as llm:
                for count in rows:
                    found = step_seconds(shape, machine, count, context, host_s=host_seconds(count))
                    model, real = sum(found.values()), median_step(llm, count, SamplingParams)
                    yield (
                        f"  {count:4} rows: model {1e3 * model:7.2f} ms, measured"
                        f" {1e3 * real:7.2f} ms: {model / real:.2f}"
                    )


def median_step(llm: Any, rows: int, params: Any) -> float:
    """Seconds of a decode of this many sequences, with 80 to 112 tokens each."""
    engine, times = llm.engine, []
    for i in range(rows):
        prompt = [5 + i, *range(400, 479)]
        engine.add_request(
            f"{rows}-{i}", prompt, params(temperature=0, max_tokens=32, ignore_eos=True)
        )
    while engine.has_unfinished():
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def main() -> None:
    """Prints the table, or the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="check the model on this machine")
    parser.add_argument("--shape", default="small", help="what --measure runs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    args = parser.parse_args()
    for line in check(args.shape, args.rows) if args.measure else table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
