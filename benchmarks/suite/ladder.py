"""`bench.py --compare small`: the gain of each package of the large engine, in steps called rungs.

    small            nanoengine/small/ unchanged, in plain torch
    + runner         its scheduler with the large ModelRunner: input batch, one sampler
    + scheduler      the large engine, without kernels, which admits all sequences that fit now
    + kernels        linear layers, norms and attention by the CPU kernels
    + admission      the default: predictive admission
    + int8           weights in int8, which may change the tokens

All rungs run the same work, alternating, with the same limits and in float32. The pool has half of
the blocks that the requests need at their ends, so that admission has an effect.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanoengine.bench import throughput, workload
from nanoengine.bench.workload import WorkItem, WorkOptions
from nanoengine.errors import NanoEngineError
from nanoengine.llm import LLM
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.small.block_manager import BlockManager
from nanoengine.small.engine import LLMEngine as SmallEngine
from nanoengine.small.runner import ModelRunner as SmallRunner
from nanoengine.small.scheduler import Scheduler as SmallScheduler

if TYPE_CHECKING:
    from nanoengine.core.interfaces import Executor

BLOCK_SIZE = 16
PLAIN = {"attention_backend": "naive", "admission": "watermark"}
Generate = Callable[[SequenceOf[WorkItem], float], list[int]]
"""Runs items with a temperature; returns the number of tokens of each."""


def run(config: EngineConfig, options: WorkOptions) -> dict[str, Any]:
    """Runs the rungs in alternating rounds and returns the report as plain data.

    Args:
        config: a checkpoint that the small engine supports; otherwise only `seed` and
            `max_num_seqs` are used.
    """
    model, drawn = config.model, throughput.drawn_items(options, config)
    with LLM(model, skip_tokenizer_init=True, device="cpu", kv_cache_gib=0.1) as llm:
        vocab_size, max_model_len = llm.info.vocab_size, llm.info.max_model_len
    items, notes = workload.fit(drawn, vocab_size, max_model_len, cap=True)
    needed = [-(-(len(i.prompt_token_ids) + i.max_tokens) // BLOCK_SIZE) for i in items]
    limits = {
        "num_kv_blocks": 1 + max(sum(needed) // 2, *needed),
        "max_num_seqs": min(config.max_num_seqs, len(items)),
        "max_num_batched_tokens": 1024,
    }
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        rungs = {
            "small": stack.enter_context(_small(model, limits, max_model_len, runner=None)),
            "+ runner": stack.enter_context(_small(model, limits, max_model_len, runner=PLAIN)),
            "+ scheduler": stack.enter_context(_large(model, limits, **PLAIN)),
            "+ kernels": stack.enter_context(_large(model, limits, admission="watermark")),
            "+ admission": stack.enter_context(_large(model, limits)),
            "+ int8": stack.enter_context(_large(model, limits, quantization="int8")),
        }
        for number in range(-1, options.rounds):  # the first warms up
            work = workload.shift_ids(items, number, vocab_size)
            for name, generate in rungs.items():
                start = time.perf_counter()
                got = generate(work, options.temperature)
                seconds_taken = time.perf_counter() - start
                if got != [item.max_tokens for item in work]:
                    raise NanoEngineError(
                        f"{name}: other numbers of tokens than the workload requires"
                    )
                if number >= 0:
                    seconds.setdefault(name, []).append(seconds_taken)
    return {
        **throughput.heading("cpu"),
        "notes": notes,
        "limits": limits,
        **throughput.sizes(items),
        "seconds": seconds,
    }


@contextmanager
def _small(
    model: str, limits: dict[str, int], max_model_len: int, *, runner: dict[str, Any] | None
) -> Iterator[Generate]:
    """The small engine, with its own runner or with the large one."""
    with ExitStack() as stack:
        executor: Executor
        if runner is None:
            num_blocks, device = limits["num_kv_blocks"], torch.device("cpu")
            executor = SmallRunner(Path(model), num_blocks, BLOCK_SIZE, device, torch.float32)
            executor.start()
            stack.callback(executor.shutdown)
        else:
            executor = stack.enter_context(_open(model, limits, **runner)).engine.executor
        scheduler = SmallScheduler(
            BlockManager(limits["num_kv_blocks"], BLOCK_SIZE),
            limits["max_num_seqs"],
            limits["max_num_batched_tokens"],
        )
        engine = SmallEngine(executor, scheduler, max_model_len)

        def generate(items: SequenceOf[WorkItem], temperature: float) -> list[int]:
            sequences = [
                sequence
                for item in items
                for sequence in engine.add_requests(
                    [item.prompt_token_ids], _params(item, temperature)
                )
            ]
            engine.run()
            return [len(sequence.output_token_ids) for sequence in sequences]

        yield generate


@contextmanager
def _large(model: str, limits: dict[str, int], **options: Any) -> Iterator[Generate]:
    """The large engine."""
    with _open(model, limits, **options) as llm:

        def generate(items: SequenceOf[WorkItem], temperature: float) -> list[int]:
            outputs = llm.generate(
                [list(item.prompt_token_ids) for item in items],
                [_params(item, temperature) for item in items],
                use_tqdm=False,
            )
            return [len(output.outputs[0].token_ids) for output in outputs]

        yield generate


def _open(model: str, limits: dict[str, int], **options: Any) -> LLM:
    options = {"skip_tokenizer_init": True, "block_size": BLOCK_SIZE, **limits, **options}
    return LLM(model, device="cpu", dtype="float32", **options)


def _params(item: WorkItem, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=item.max_tokens, ignore_eos=True)


def format_report(report: dict[str, Any]) -> str:
    """The report as text; its table is Markdown."""
    tokens = report["output_tokens"]
    speeds = {name: tokens / statistics.median(s) for name, s in report["seconds"].items()}
    first = before = speeds["small"]
    rows = [
        f"{report['requests']} requests, {report['input_tokens']:,} tokens in, {tokens:,} out, "
        f"{report['limits']['num_kv_blocks']:,} blocks of {BLOCK_SIZE}",
        "",
        "| rung | output tok/s | over the rung before | over small |",
        "|---|---|---|---|",
    ]
    for name, speed in speeds.items():
        rows.append(f"| {name} | {speed:,.0f} | {speed / before:.2f} | {speed / first:.1f} |")
        before = speed
    return "\n".join(rows)
