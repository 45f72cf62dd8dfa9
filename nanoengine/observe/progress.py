"""ProgressBar: finished requests and tokens per second of one call, as a tqdm bar on stderr.

It is an `Observer`, which `progress_bar` adds to an engine during a call. It only reads the
scheduler's counters.
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
"""Seconds between two updates; steps are far shorter."""


class ProgressBar:
    """One bar; speeds are means since its creation.

    Args:
        bar: a tqdm bar, or an object with the same methods.
        stats: the scheduler's counters; their current values are the zero of this bar.
    """

    def __init__(self, bar: Any, stats: SchedulerStats) -> None:
        self._bar, self._stats, self._zero = bar, stats, replace(stats)
        self._finished = stats.finished_requests
        self._started = self._shown = time.perf_counter()

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Shows the new numbers at intervals."""
        now = time.perf_counter()
        if now - self._shown >= REFRESH_S:
            self._shown = now
            self._show()

    def close(self) -> None:
        """Shows the final numbers and leaves the bar on the screen."""
        self._show()
        self._bar.close()

    def _show(self) -> None:
        stats, zero = self._stats, self._zero
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        prefill = (stats.prefill_tokens - zero.prefill_tokens) / elapsed
        output = (stats.output_tokens - zero.output_tokens) / elapsed
        self._bar.update(stats.finished_requests - self._finished)
        # Why not always: embeddings and scores have no output tokens.
        output_speed = f", output {output:,.0f} tok/s" * (output > 0)
        self._bar.set_postfix_str(f"prefill {prefill:,.0f} tok/s{output_speed}")
        self._finished = stats.finished_requests


@contextlib.contextmanager
def progress_bar(
    progress: bool | Callable[..., Any], engine: LLMEngine, total: int | None
) -> Iterator[None]:
    """Shows a progress bar inside the context, if one was requested.

    Args:
        progress: True: tqdm's; False: none; else a function that takes tqdm's keywords.

    Raises:
        RequestError: it is none of these.
    """
    if not check_value(progress, bool | Callable, "use_tqdm", RequestError):
        yield
        return
    if not callable(progress):
        from tqdm import tqdm as progress  # Why here: only bars need tqdm.
    tqdm_bar = progress(total=total, desc="Requests", unit="req", dynamic_ncols=True)
    bar = ProgressBar(tqdm_bar, engine.scheduler.stats)
    engine.observers.append(bar)
    try:
        yield
    finally:
        engine.observers.remove(bar)
        bar.close()
