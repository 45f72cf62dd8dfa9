"""Progress of a job: a live line on a terminal, log lines elsewhere, and a final summary.

It is an `Observer` of the engine, and writes to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from nanoengine.core.engine_stats import EngineStats
from nanoengine.core.plan import StepPlan
from nanoengine.jobs.job import Job
from nanoengine.jobs.manifest import START_OVER_HINT
from nanoengine.jobs.record_log import as_output_lost
from nanoengine.jobs.work import Counts
from nanoengine.settings.checks import counted

BLOCK_WAITS = {"blocks", "policy"}
"""Reasons in `StepPlan.waits`: too few free blocks, or the admission policy predicts too few."""
CUT = "cut at max_tokens or the end of the context: see --max-tokens and --max-model-len"
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
        self._width = 0

    def on_step(self, plan: StepPlan | None, result: object, scheduler: object) -> None:
        """Shows the state at intervals. For a step of a replica, `plan` is None."""
        if plan is not None:
            self._counts.steps += 1
            waits = any(reason in BLOCK_WAITS for _, reason in plan.waits)
            self._counts.block_waits += waits or bool(plan.preempted)
        now = time.perf_counter()
        if now - self._shown >= (LIVE_INTERVAL_S if self._is_live else LOG_INTERVAL_S):
            self._shown = now
            self._show(self.line())

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, also of rows that are not done."""
        return self._stats().output_tokens - self._tokens_before

    def line(self) -> str:
        """Rows, speed, time left, and the engine's state."""
        job, counts, stats, num_tokens = self._job, self._counts, self._stats(), self.num_tokens
        elapsed_s = time.perf_counter() - self._started
        speed = num_tokens / max(elapsed_s, 1e-9)
        total = "" if job.num_rows is None else f"/{job.num_rows:,}"
        parts = [f"{job.num_done + counts.answered + counts.failed:,}{total} rows"]
        parts += [f"{counts.failed:,} failed"] if counts.failed else []
        parts += [f"{job.num_done:,} resumed"] if job.num_done else []
        parts.append(f"{speed:,.0f} output tok/s")
        if job.num_rows is not None:
            num_left = job.num_rows - job.num_done - counts.answered - counts.failed
            rows = counts.answered, stats.num_running, num_left
            left_s = time_left_s(elapsed_s, *rows, num_tokens, num_tokens - counts.output_tokens)
            parts += [f"{_clock_time(left_s)} left"] if left_s is not None else []
        parts.append(f"{stats.num_running} running, {stats.num_waiting} waiting")
        used = stats.active_blocks
        parts.append(f"KV {used / (used + stats.empty_blocks + stats.cached_blocks):.0%}")
        parts.append(f"hits {stats.cache_hit_rate:.0%}")
        return ", ".join(parts)

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


def time_left_s(
    elapsed_s: float, answered: int, running: int, left: int, tokens: int, running_tokens: int
) -> float | None:
    """Estimated time until all rows are done [s]; None before the first answer, and at the end.

    Running rows are assumed to have half of their tokens. Why not the average of answered rows:
    short answers end first, so it is too low until most rows are done.

    Args:
        left: rows that are not done, including the running ones.
        tokens: output tokens so far; `running_tokens` of them belong to running rows.
    """
    if not answered or not left or not tokens:
        return None
    running = min(running, left)  # Why: a row may have several sequences.
    average = (tokens + running_tokens) / (answered + running)
    return max(elapsed_s * (running_tokens + (left - running) * average) / tokens, 1.0)


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def report(job: Job, counts: Counts, ended: str, loading_s: float, run_s: float = 0.0) -> None:
    """Prints how a job ended; writes all numbers to `--summary-json`.

    Args:
        loading_s: time until rows started [s].
        run_s: time since then [s].
    """
    facts = {
        "ended": ended,
        "rows": job.num_rows,
        "resumed": job.num_done,
        "failed_before": job.num_failed,
        **asdict(counts),
        "loading_s": round(loading_s, 3),
        "elapsed_s": round(run_s, 3),
        "output_tokens_per_s": round(counts.output_tokens / max(run_s, 1e-9), 1),
        "cache_hit_rate": round(counts.cached_tokens / max(counts.prompt_tokens, 1), 4),
    }
    print(*_summary(job, counts, facts), sep="\n", file=sys.stderr)
    path = job.options.summary_json
    if path is not None:
        with as_output_lost(path):
            path.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _summary(job: Job, counts: Counts, facts: dict[str, Any]) -> Iterator[str]:
    """The lines of the summary that a user reads."""
    num_done = job.num_done + counts.answered + counts.failed
    earlier = counted(job.num_done, "row") + f", {job.num_failed:,} failed" * bool(job.num_failed)
    if job.num_done and job.num_done == job.num_rows:
        yield f"complete: earlier runs finished all {earlier}; see {job.places}"
        retry = "--retry-errors runs failed rows again; " * bool(job.num_failed)
        yield f"{retry}to run all rows again, {START_OVER_HINT}"
        return
    total = "" if job.num_rows is None else f"{num_done:,} of "
    yield f"{facts['ended']}: {total}{counted(job.num_rows or num_done, 'row')} in {job.places}"
    if job.num_done:
        yield f"earlier runs finished {earlier}"
    yield f"{counted(counts.answered, 'row')} answered"
    if counts.cut_answers:
        yield f"{counted(counts.cut_answers, 'answer')} {CUT}"
    if counts.empty_answers:
        hint = "" if job.options.chat else "; prompts had no chat template"
        yield f"{counted(counts.empty_answers, 'empty answer')}: the model stopped at once{hint}"
    for code, (count, first) in sorted(counts.reasons.items(), key=lambda item: -item[1][0]):
        yield f"{counted(count, 'row')} failed with {code}, the first at {first}"
    tokens = counted(counts.output_tokens, "output token")
    yield f"{tokens}, {facts['output_tokens_per_s']:,} per second"
    yield f"{facts['elapsed_s']:,.1f} s, after {facts['loading_s']:,.1f} s of loading"
    if counts.block_waits:
        share = f"in {counts.block_waits:,} of {counts.steps:,} steps"
        hint = "enlarge it with --kv-cache-gib or --memory-fraction"
        yield f"rows waited for blocks of the KV cache {share}: {hint}"
