"""How far a job is: a live line on a terminal, lines of a log elsewhere, a table at the end.

An `Observer` of the engine. All of it goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from nanoengine.jobs.work import Counts

if TYPE_CHECKING:
    from nanoengine.core.engine_stats import EngineStats

LIVE_S, LOGGED_S = 0.25, 30.0


class Progress:
    """The state of a job in one line.

    Args:
        counts: those of this process, read as they change.
        num_rows: of the whole job; None: unknown.
        num_resumed: rows that were done before.
        stats: the engine's.
        out: where to; a terminal has its line rewritten.
    """

    def __init__(
        self,
        counts: Counts,
        num_rows: int | None,
        num_resumed: int,
        stats: Callable[[], EngineStats],
        *,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counts = counts
        self._num_rows = num_rows
        self._num_resumed = num_resumed
        self._stats = stats
        self._out = out or sys.stderr
        self._clock = clock
        self._is_live = self._out.isatty()
        self._tokens_before = stats().output_tokens
        self._started = self._shown = clock()
        self._width = 0

    def on_step(self, plan: object, result: object, scheduler: object) -> None:
        """Shows the new numbers, now and then."""
        now = self._clock()
        if now - self._shown >= (LIVE_S if self._is_live else LOGGED_S):
            self._shown = now
            self._show(self.line())

    def line(self) -> str:
        """Rows, speed, time left, and the engine's state."""
        counts, stats = self._counts, self._stats()
        num_tokens = stats.output_tokens - self._tokens_before
        speed = num_tokens / max(self._clock() - self._started, 1e-9)
        total = "" if self._num_rows is None else f"/{self._num_rows:,}"
        words = [f"{self._num_resumed + counts.answered + counts.failed:,}{total} rows"]
        words += [f"{counts.failed:,} failed"] if counts.failed else []
        words += [f"{self._num_resumed:,} resumed"] if self._num_resumed else []
        words.append(f"{speed:,.0f} output tok/s")
        left_s = self._left_s(num_tokens - counts.output_tokens, speed)
        words += [f"{_clock_time(left_s)} left"] if left_s is not None else []
        words.append(f"{stats.num_running} running, {stats.num_waiting} waiting")
        used = stats.active_blocks
        words.append(f"KV {used / (used + stats.empty_blocks + stats.cached_blocks):.0%}")
        words.append(f"hits {stats.cache_hit_rate:.0%}")
        return ", ".join(words)

    def _left_s(self, num_running_tokens: int, speed: float) -> float | None:
        """Time for the tokens that are to come, if rows have as many as those that have ended."""
        counts = self._counts
        if self._num_rows is None or not counts.answered or not speed:
            return None
        left = self._num_rows - self._num_resumed - counts.answered - counts.failed
        tokens = left * counts.output_tokens / counts.answered - num_running_tokens
        return max(tokens, 0.0) / speed

    def _show(self, line: str) -> None:
        if self._is_live:
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def close(self) -> None:
        """Takes the live line away."""
        if self._is_live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._out.flush()


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(
    counts: Counts,
    *,
    num_rows: int | None,
    num_resumed: int,
    num_failed_before: int,
    elapsed_s: float,
    ended: str,
) -> dict[str, Any]:
    """What a job came to; `--summary-json` writes it."""
    prompt = counts.prompt_tokens
    return {
        "ended": ended,
        "rows": num_rows,
        "resumed": num_resumed,
        "answered": counts.answered,
        "failed": counts.failed,
        "failed_before": num_failed_before,
        "prompt_tokens": prompt,
        "cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "elapsed_s": round(elapsed_s, 3),
        "output_tokens_per_s": round(counts.output_tokens / max(elapsed_s, 1e-9), 1),
        "cache_hit_rate": round(counts.cached_tokens / prompt, 4) if prompt else 0.0,
    }


def table(facts: dict[str, Any]) -> str:
    """The summary for people."""
    lines = []
    for name, value in facts.items():
        if value is None:
            continue
        shown = f"{value:,}" if isinstance(value, int | float) else str(value)
        lines.append(f"  {name.replace('_', ' '):<20} {shown:>14}")
    return "\n".join(lines)
