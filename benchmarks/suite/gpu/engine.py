"""The whole engine: its tokens, the standard workload, and the parts of a step.

Cases of the GPU report. The model is a shape with random weights, whose config.json is written
here, so nothing is downloaded. Everything also runs on the CPU with a tiny shape, as in the tests.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.suite.engines import open_llm
from benchmarks.suite.gpu.parts import Case, Row
from benchmarks.suite.gpu.timing import (
    Event,
    Seam,
    Seams,
    cuda_event,
    graph_seconds,
    kernel_table,
    kernel_times,
)
from benchmarks.suite.limits import with_limits
from benchmarks.suite.shapes import write_shape
from nanoengine.assets import demo_model_path
from nanoengine.bench.throughput import measure
from nanoengine.bench.workload import WorkOptions
from nanoengine.core.plan import StepTimes
from nanoengine.observe.metrics import Metrics
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams

if TYPE_CHECKING:
    from nanoengine.llm import LLM

SHAPE = "qwen3-0.6b"
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 16384,
}
"""Options of the standard benchmark."""


# --- the standard workload ------------------------------------------------------------------------


def workload_cases(
    options: dict[str, Any],
    rounds: int,
    *,
    shape: str = SHAPE,
    **scale: Any,
) -> Iterator[Case]:
    """Rounds of the standard workload on one engine.

    Args:
        options: options of the engine, in addition to `OPTIONS`.
        scale: options of the benchmark that make the workload smaller.

    Raises:
        ConfigError: an option of the engine is unknown or not supported.
    """
    with shaped(shape, options) as llm:
        work = WorkOptions(**scale)
        for number in range(1, rounds + 1):
            yield Case(f"round {number}", partial(round_row, llm, shape, work))


@contextmanager
def shaped(shape: str, options: dict[str, Any]) -> Iterator[LLM]:
    """An engine of a shape with random weights, without a tokenizer; its config.json is written to
    a new directory.

    Raises:
        ConfigError: an option of the engine is unknown or not supported.
    """
    with tempfile.TemporaryDirectory() as scratch:
        write_shape(shape, Path(scratch))
        settings = {"model": scratch, "skip_tokenizer_init": True, **OPTIONS, **options}
        with open_llm(EngineConfig.from_kwargs(**settings)) as llm:
            yield llm


def round_row(llm: LLM, shape: str, work: WorkOptions) -> Row:
    """One run of the workload, with an empty prefix cache."""
    llm.engine.reset_prefix_cache()
    llm.engine.observers.clear()
    report = with_limits(measure(llm, shape, work), llm)
    numbers = (
        "output_tokens_per_s", "total_tokens_per_s", "prefill", "decode", "steps", "mean_batch",
        "max_batch", "prefill_waste_frac", "step_times_s", "outside_steps_s", "achieved",
    )  # fmt: skip
    engine = ("attention_backend", "dtype", "num_kv_blocks", "block_size", "load_s", "start_s")
    return {
        "seconds": report["seconds"][0],
        **{name: report[name] for name in numbers if name in report},
        "workload": report["workload"],
        "preemptions": report["counters"]["preemptions"],
        "engine": {name: report["engine"][name] for name in engine},
    }


# --- tokens ---------------------------------------------------------------------------------------

PROMPTS = (
    "Once upon a time, there was a little fox",
    "The secret word of Mia: lantern. The home town of Tom: Dover. The pet of Ben: turtle.\n\n"
    "Question: What is the home town of Tom?\nAnswer:",
    "Long ago, a kind bear named",
)
ON_CPU = {"device": "cpu", "attention_backend": "naive", "dtype": "float32"}


def token_cases(*, device: str = "cuda", max_tokens: int = 64) -> Iterator[Case]:
    """Greedy tokens of the demo model on the GPU, compared with plain torch on the CPU: in float32,
    all must be equal, with and without CUDA graphs. In bfloat16, equal ones are counted."""
    expected = demo_tokens(ON_CPU, max_tokens)
    for dtype in ("float32", "bfloat16"):
        for eager in (False, True):
            options = {"device": device, "dtype": dtype, "enforce_eager": eager}
            name = f"{dtype}, {'eager' if eager else 'graphs'}"
            yield Case(name, partial(token_row, options, expected))


def demo_tokens(options: dict[str, Any], max_tokens: int) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with open_llm(EngineConfig(model=str(demo_model_path()), max_num_seqs=4, **options)) as llm:
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def token_row(options: dict[str, Any], expected: list[list[int]]) -> Row:
    """The number of equal tokens of each prompt before the first different one."""
    found = demo_tokens(options, len(expected[0]))
    equal = [
        next((i for i, ids in enumerate(zip(*pair, strict=True)) if ids[0] != ids[1]), len(pair[0]))
        for pair in zip(found, expected, strict=True)
    ]
    row: Row = {"equal": equal, "of": [len(ids) for ids in expected]}
    return row | ({"ok": found == expected} if options["dtype"] == "float32" else {})


# --- the parts of a step --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What is used to measure the parts of a step; the defaults are for a GPU.

    Attributes:
        make_event: creates an event on the GPU's stream.
        synchronize: waits for the GPU.
        activity: what the profiler records.
        timer: returns the median seconds of one call.
    """

    make_event: Callable[[], Event] = cuda_event
    synchronize: Callable[[], None] = torch.cuda.synchronize
    activity: torch.profiler.ProfilerActivity = torch.profiler.ProfilerActivity.CUDA
    timer: Callable[[Callable[[], object]], float] = graph_seconds


def step_cases(
    options: dict[str, Any],
    *,
    shape: str = SHAPE,
    batches: SequenceOf[int] = (256, 64, 1),
    prompt_len: int = 512,
    num_steps: int = 30,
    probe: Probe | None = None,
) -> Iterator[Case]:
    """Decode steps of several batches, split by events; the first batch is also profiled."""
    probe = probe or Probe()
    with shaped(shape, options) as llm:
        for batch in batches:
            measure = partial(split_row, llm, batch, prompt_len, num_steps, probe)
            yield Case(f"batch {batch}", measure)
            yield Case(f"head, batch {batch}", partial(head_row, llm, batch, probe.timer))
        measure = partial(profile_row, llm, batches[0], prompt_len, num_steps // 3, probe)
        yield Case(f"kernels, batch {batches[0]}", measure)


def split_row(llm: LLM, batch: int, prompt_len: int, num_steps: int, probe: Probe) -> Row:
    """Milliseconds of a decode step and of its parts.

    `gpu_ms` is the GPU's time between events around each part, and `host_ms` the rest of the step's
    wall time. `engine_ms` are the engine's clocks; if one graph contains the whole step, they
    replace the events, and `head_row` has the head's share.
    """
    metrics = decoding(llm, batch, prompt_len, 2 * num_steps)
    runner: Any = llm.engine.executor
    seams = Seams(
        [
            Seam("forward", getattr(runner, "model", None), "forward"),
            Seam("head", getattr(runner, "model", None), "logits"),
            Seam("sampler", getattr(runner.step_sampler, "sampler", None), "sample"),
        ],
        probe.make_event,
    )
    walls = []
    try:
        context = sum(metrics.records[-1].starts) + batch
        metrics.records.clear()
        with seams:
            for _ in range(num_steps):
                start = time.perf_counter()
                llm.engine.step()
                walls.append(time.perf_counter() - start)
            probe.synchronize()
        times = [record.times for record in metrics.records]
    finally:
        stop(llm)
    wall_ms = 1e3 * statistics.mean(walls)
    names = [f.name for f in fields(StepTimes)]
    engine_ms = {n: 1e3 * statistics.mean(getattr(t, n) for t in times) for n in names}
    parts = {name: total / num_steps for name, total in seams.total_ms().items() if total}
    if "forward" not in parts:  # One graph contains the whole step, so the engine's clock is used.
        parts = {"forward, head, sampler": engine_ms["forward_s"] + engine_ms["sample_s"]}
    return {
        "batch": batch,
        "context_tokens": context + batch * num_steps // 2,
        "steps": num_steps,
        "step_ms": wall_ms,
        "median_step_ms": 1e3 * statistics.median(walls),
        "gpu_ms": parts,
        "host_ms": wall_ms - sum(parts.values()),
        "engine_ms": engine_ms,
    }


@torch.inference_mode()
def head_row(llm: LLM, batch: int, timer: Callable[[Callable[[], object]], float]) -> Row:
    """Milliseconds of the LM head alone, from random hidden states."""
    runner: Any = llm.engine.executor
    shape = (batch, runner.model_config.hidden_size)
    hidden = torch.randn(shape, dtype=runner.dtype, device=runner.device)
    return {"batch": batch, "head_ms": 1e3 * timer(lambda: runner.model.logits(hidden))}


def profile_row(llm: LLM, batch: int, prompt_len: int, num_steps: int, probe: Probe) -> Row:
    """What the GPU ran in some decode steps, from torch's profiler."""
    decoding(llm, batch, prompt_len, 2 * num_steps)
    try:
        with torch.profiler.profile(activities=[probe.activity]) as profile:
            for _ in range(num_steps):
                llm.engine.step()
            probe.synchronize()
    finally:
        stop(llm)
    return {
        "batch": batch,
        "steps": num_steps,
        **kernel_table(kernel_times(profile.key_averages()), num_steps),
    }


def decoding(llm: LLM, batch: int, prompt_len: int, num_steps: int) -> Metrics:
    """Runs `batch` requests until each step decodes all of them, for `num_steps` further steps."""
    engine, metrics, draw = llm.engine, Metrics(), random.Random(0)
    engine.observers[:] = [metrics]
    params = SamplingParams(
        temperature=0.6, max_tokens=num_steps + 64, ignore_eos=True, detokenize=False
    )
    for number in range(batch):
        ids = [draw.randrange(engine.info.vocab_size) for _ in range(prompt_len)]
        engine.add_request(f"{number}", ids, params)
    settled = 0
    while settled < 5:
        if not engine.has_unfinished():
            raise RuntimeError(f"no step decoded all {batch} sequences of {prompt_len} tokens")
        engine.step()
        counts = metrics.records[-1].num_scheduled if metrics.records else []
        settled = settled + 1 if len(counts) == batch and max(counts) == 1 else 0
    return metrics


def stop(llm: LLM) -> None:
    """Aborts all requests, and resets the prefix cache."""
    llm.engine.abort_all()
    llm.engine.reset_prefix_cache()
    llm.engine.observers.clear()
