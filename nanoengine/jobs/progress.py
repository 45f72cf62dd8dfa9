"""Progress of a job: a live line on a terminal, log lines elsewhere, and a final summary.

It is an `Observer` of the engine, and writes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from nanoengine.core.engine_stats import EngineStats
from nanoengine.core.plan import StepPlan
from nanoengine.jobs.job import Job
from nanoengine.jobs.work import Counts

BLOCK_WAITS = {"blocks", "policy"}
"""Reasons in `StepPlan.waits`: too few free blocks, or the admission policy predicts too few."""
MORE_BLOCKS_HINT = "enlarge it with --kv-cache-gib or --memory-fraction"
LIVE_INTERVAL_S, LOG_INTERVAL_S = 0.25, 30.0


class Progress:
    """Shows the state of a job in one line, which is rewritten in place on a terminal.

    Args:
        counts: the counters of this process, which change while the job runs.
        stats: returns the engine's statistics.
    """

    def __init__(self, job: Job, counts: Counts, stats: Callable[[], EngineStats]) -> None:
        self._job, self._counts, self._stats = job, counts, stats
        self._is_live = sys.stderr.isatty()
        self._tokens_before = stats().output_tokens
        self._started = self._shown = time.perf_counter()
        self._width = self._num_steps = self._num_block_waits = 0

    def on_step(self, plan: StepPlan | None, result: object, scheduler: object) -> None:
        """Shows the state at intervals. For a step of a replica, `plan` is None."""
        if plan is not None:
            self._num_steps += 1
            waits = any(reason in BLOCK_WAITS for _, reason in plan.waits)
            self._num_block_waits += waits or bool(plan.preempted)
        now = time.perf_counter()
        if now - self._shown >= (LIVE_INTERVAL_S if self._is_live else LOG_INTERVAL_S):
            self._shown = now
            self._show(self.line())

    def line(self) -> str:
        """Rows, speed, time left, and the engine's state."""
        job, counts, stats = self._job, self._counts, self._stats()
        num_tokens = stats.output_tokens - self._tokens_before
        speed = num_tokens / max(time.perf_counter() - self._started, 1e-9)
        total = "" if job.num_rows is None else f"/{job.num_rows:,}"
        parts = [f"{job.num_done + counts.answered + counts.failed:,}{total} rows"]
        parts += [f"{counts.failed:,} failed"] if counts.failed else []
        parts += [f"{job.num_done:,} resumed"] if job.num_done else []
        parts.append(f"{speed:,.0f} output tok/s")
        left_s = self._left_s(num_tokens - counts.output_tokens, speed)
        parts += [f"{_clock_time(left_s)} left"] if left_s is not None else []
        parts.append(f"{stats.num_running} running, {stats.num_waiting} waiting")
        used = stats.active_blocks
        parts.append(f"KV {used / (used + stats.empty_blocks + stats.cached_blocks):.0%}")
        parts.append(f"hits {stats.cache_hit_rate:.0%}")
        return ", ".join(parts)

    def advice(self) -> Iterator[str]:
        """Lines that say why rows failed, and which options could help."""
        counts = self._counts
        for code, (count, first) in sorted(counts.reasons.items(), key=lambda item: -item[1][0]):
            yield f"{count:,} rows failed with {code}, the first at {first}"
        if counts.cut:
            yield f"{counts.cut:,} answers were cut at max_tokens: --max-tokens allows more"
        if counts.empty:
            hint = "" if self._job.options.chat else "; prompts had no chat template"
            yield f"{counts.empty:,} answers are empty: the model stopped at once{hint}"
        if self._num_block_waits:
            share = f"{self._num_block_waits:,} of {self._num_steps:,} steps"
            yield f"rows waited for blocks of the KV cache in {share}: {MORE_BLOCKS_HINT}"

    def _left_s(self, num_running_tokens: int, speed: float) -> float | None:
        """Time left [s], if remaining rows have as many output tokens as finished ones on average.

        Args:
            num_running_tokens: output tokens of running rows so far.
        """
        job, counts = self._job, self._counts
        if job.num_rows is None or not counts.answered or not speed:
            return None
        left = job.num_rows - job.num_done - counts.answered - counts.failed
        tokens = left * counts.output_tokens / counts.answered - num_running_tokens
        return max(tokens, 0.0) / speed

    def _show(self, line: str) -> None:
        if self._is_live:
            line, self._width = "\r" + line.ljust(self._width), len(line)
        else:
            line += "\n"
        print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erases the live line."""
        if self._width:
            print("\r" + " " * self._width, end="\r", file=sys.stderr, flush=True)


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(job: Job, counts: Counts, elapsed_s: float, ended: str) -> dict[str, Any]:
    """The results of a job; `--summary-json` writes them."""
    prompt = counts.prompt_tokens
    return {
        "ended": ended,
        "rows": job.num_rows,
        "resumed": job.num_done,
        "answered": counts.answered,
        "failed": counts.failed,
        "failed_before": job.num_failed,
        "prompt_tokens": prompt,
        "cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "empty_answers": counts.empty,
        "cut_answers": counts.cut,
        "elapsed_s": round(elapsed_s, 3),
        "output_tokens_per_s": round(counts.output_tokens / max(elapsed_s, 1e-9), 1),
        "cache_hit_rate": round(counts.cached_tokens / prompt, 4) if prompt else 0.0,
    }


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as readable text."""
    lines = []
    for name, value in summary.items():
        if value is not None:
            text = value if isinstance(value, str) else f"{value:,}"
            lines.append(f"  {name.replace('_', ' '):<20} {text:>14}")
    return "\n".join(lines)
