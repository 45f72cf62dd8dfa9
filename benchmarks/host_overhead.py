"""What a step costs outside the model: `python benchmarks/host_overhead.py`.

The real scheduler, block manager and batch builder plan and prepare decode steps on the CPU; an
executor that computes nothing returns tokens. A GPU would wait for this time. The output is the
median microseconds per step by number of running sequences: wall time, and for the whole step also
CPU time, which other processes disturb less. The cost of a trace is the difference in CPU time of
steps with and without a trace, in two engines that alternate; steps that fill blocks are included.
With `--shape small` a model with random weights runs, and the cost is reported as a share of its
step.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from no_model import BLOCK_SIZE, VOCAB_SIZE, Answered, NoExecutor, make_engine

from nanoengine.build import build_engine
from nanoengine.core.plan import StepPlan, StepTimes
from nanoengine.engine import LLMEngine
from nanoengine.observe.metrics import Metrics
from nanoengine.observe.trace import trace_engine
from nanoengine.runner.input_batch import InputBatch
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.suite.shapes import SHAPES, write_shape

PROMPT_LEN = 128
IN_TURN = 32  # twice per block, so that every round has equally many steps that fill blocks


class PreparingExecutor(NoExecutor):
    """Builds the tensors of each step, as the model runner does, and samples token 1 everywhere."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.rows = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_groups=1,
            device=torch.device("cpu"),
        )

    def launch(self, plan: StepPlan) -> Answered:
        """Prepares the plan; the forward pass takes no time."""
        start = time.perf_counter()
        self.rows.update(plan)
        _, lines = self.rows.make_batch(plan)
        prepare_s = time.perf_counter() - start
        token_ids = np.ones(len(lines.rows), np.int64)
        self.rows.store_sampled(lines, torch.from_numpy(token_ids))
        self.rows.write_host(lines, token_ids)
        answered = super().launch(plan)
        answered.result().times = StepTimes(prepare_s=prepare_s)
        return answered


def build(num_seqs: int, num_steps: int, trace: Path | None = None) -> LLMEngine:
    """An engine that runs all sequences, which are already queued; `trace` is the file of its
    trace."""
    max_model_len = PROMPT_LEN + num_steps + 2
    engine = make_engine(
        PreparingExecutor(num_seqs, max_model_len),
        num_blocks=2 * num_seqs * (max_model_len // BLOCK_SIZE + 1),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * PROMPT_LEN,
        max_model_len=max_model_len,
    )
    if trace is not None:
        trace_engine(engine, trace)
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)
    for number, prompt in enumerate(draw.integers(0, VOCAB_SIZE, (num_seqs, PROMPT_LEN)).tolist()):
        engine.add_request(str(number), prompt, params)
    return engine


def measure(num_seqs: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of the parts of a decode step."""
    engine = build(num_seqs, num_steps)
    metrics = Metrics()
    engine.observers.append(metrics)
    engine.step()  # all prompts
    prefill = metrics.records.pop().times
    totals = []
    for _ in range(num_steps - 1):
        start = time.process_time()
        engine.step()
        totals.append(1e6 * (time.process_time() - start))
    parts = {
        name: statistics.median(1e6 * getattr(r.times, f"{name}_s") for r in metrics.records)
        for name in ("schedule", "prepare", "commit")
    }
    admit_s = prefill.schedule_s + prefill.prepare_s + prefill.commit_s
    total = statistics.median(totals)
    return {**parts, "step, CPU time": total, "admission, a sequence": 1e6 * admit_s / num_seqs}


def trace_cost(
    make: Callable[[Path | None], LLMEngine], rounds: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Microseconds per step without and with a trace: medians over rounds.

    Two equal engines alternate after 32 steps, so that other load on the machine affects both: the
    plain one, the traced one twice, the plain one.
    """
    plain, traced = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as directory:
        engines = make(None), make(Path(directory) / "run.trace.gz")
        for engine in engines:
            engine.step()  # all prompts
        for _ in range(rounds):
            plain.append(_mean_step(engines[0], clock))
            traced += [_mean_step(engines[1], clock) for _ in range(2)]
            plain.append(_mean_step(engines[0], clock))
        for engine in engines:
            engine.close()
    return _median_of_pairs(plain), _median_of_pairs(traced)


def _mean_step(engine: LLMEngine, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(IN_TURN):
        engine.step()
    return 1e6 * (clock() - started) / IN_TURN


def _median_of_pairs(values: list[float]) -> float:
    return statistics.median(map(statistics.mean, zip(values[::2], values[1::2], strict=True)))


def measure_trace(num_seqs: int, rounds: int) -> dict[str, float]:
    """The cost of a trace per step, with an executor that computes nothing."""
    make = functools.partial(build, num_seqs, 2 * rounds * IN_TURN + 2)
    without, traced = trace_cost(make, rounds, time.process_time)
    return {"trace, CPU time": traced - without}


def run_shape(shape: str, num_seqs: int, rounds: int) -> None:
    """Prints the cost of a trace per decode step of a model, in wall time."""
    num_tokens = 2 * rounds * IN_TURN + 2
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)

    def make(trace: Path | None) -> LLMEngine:
        config = EngineConfig(
            model=directory, load_format="dummy", max_num_seqs=num_seqs, kv_cache_gib=3,
            skip_tokenizer_init=True, max_model_len=16 + num_tokens, max_num_batched_tokens=4096,
            trace=None if trace is None else str(trace),
        )  # fmt: skip
        engine = build_engine(config)
        for number in range(num_seqs):
            engine.add_request(str(number), [5 + number + i for i in range(16)], params)
        return engine

    with tempfile.TemporaryDirectory() as directory:
        write_shape(shape, Path(directory))
        without, traced = trace_cost(make, rounds, time.perf_counter)
    print(
        f"shape {shape}, {num_seqs} sequences: {without:,.0f} us per decode step, {traced:,.0f} us"
        f" with a trace: {traced / without:.4f}"
    )


def main() -> None:
    """Prints a table: parts of a step by number of running sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1_024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--rounds", type=int, default=4, help="of traced and untraced steps, alternating"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), help="run this model instead")
    args = parser.parse_args()
    if args.shape is not None:
        for count in args.sequences:
            run_shape(args.shape, count, args.rounds)
        return
    columns = [
        {**measure(count, args.steps), **measure_trace(count, args.rounds)}
        for count in args.sequences
    ]
    counts = "".join(f"{count:>10,}" for count in args.sequences)
    print(f"{'median us':<24}{counts}   running sequences")
    for name in columns[0]:
        print(f"{name:<24}" + "".join(f"{column[name]:>10.1f}" for column in columns))


if __name__ == "__main__":
    main()
