"""ProgressBar: finished requests and tokens per second of one call, as a tqdm bar on stderr.

An `Observer`, which `showing` adds to an engine for the length of a call. It reads the scheduler's
counters and nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.stats import SchedulerStats
from nanoengine.engine import LLMEngine
from nanoengine.errors import RequestError
from nanoengine.settings.checks import check_value

REFRESH_S = 0.2
"""Seconds between two updates of the speeds; steps are far shorter."""


class ProgressBar:
    """One bar; speeds are means since it was made.

    Args:
        bar: tqdm's, or another with its methods.
        stats: the scheduler's counters; as they are now they are the zero of this bar.
    """

    def __init__(self, bar: Any, stats: SchedulerStats) -> None:
        self._bar, self._stats, self._zero = bar, stats, replace(stats)
        self._finished = stats.finished_requests
        self._started = self._shown = time.perf_counter()

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Shows the new numbers, now and then."""
        now = time.perf_counter()
        if now - self._shown >= REFRESH_S:
            self._shown = now
            self._show()

    def close(self) -> None:
        """Shows the last numbers and leaves the bar on the screen."""
        self._show()
        self._bar.close()

    def _show(self) -> None:
        stats, zero = self._stats, self._zero
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        prefill = (stats.prefill_tokens - zero.prefill_tokens) / elapsed
        output = (stats.output_tokens - zero.output_tokens) / elapsed
        self._bar.update(stats.finished_requests - self._finished)
        # Why without: vectors and scores have no output tokens.
        told = f", output {output:,.0f} tok/s" * (output > 0)
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s{told}")
        self._finished = stats.finished_requests


@contextlib.contextmanager
def showing(
    progress: bool | Callable[..., Any], engine: LLMEngine, total: int | None
) -> Iterator[None]:
    """Shows a bar, if asked for, while something runs.

    Args:
        progress: True: tqdm's; False: none; else what makes one, with tqdm's keywords.

    Raises:
        RequestError: it is none of these.
    """
    if not check_value(progress, bool | Callable, "use_tqdm", RequestError):
        yield
        return
    if not callable(progress):
        from tqdm import tqdm as progress  # Why here: who asks for no bar needs none.
    made = progress(total=total, desc="Requests", unit="req", dynamic_ncols=True)
    bar = ProgressBar(made, engine.scheduler.stats)
    engine.observers.append(bar)
    try:
        yield
    finally:
        engine.observers.remove(bar)
        bar.close()
