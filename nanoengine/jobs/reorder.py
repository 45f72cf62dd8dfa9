"""The order of tasks, within windows, so that sorting needs bounded memory.

Results don't depend on it. Consecutive rows with a common prefix hit the prefix cache before it is
evicted. At the end of a job long rows go first, so that none is left running alone.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from nanoengine.jobs.rows import Task
from nanoengine.text.prompt_forms import PAUSE, Pause

WINDOW_ROWS = 4096
WINDOW_BYTES = 64 << 20
MOST_WAIT_S = 0.2
"""Longest wait for further rows of a window while no others can be read [s]."""

MIN_PREFIX = 64
"""Characters of the common prefix that rows of one group share; a few blocks."""

CHARS_PER_TOKEN = 4


def windows(tasks: Iterable[Task | Pause]) -> Iterator[tuple[list[Task], bool] | Pause]:
    """Groups tasks into windows; True marks the last one. A window ends early if no more come."""
    window: list[Task] = []
    size, began = 0, 0.0
    for task in tasks:
        if task is PAUSE:
            if window and time.monotonic() - began >= MOST_WAIT_S:
                yield window, False
                window = []
            else:
                yield PAUSE
            continue
        if len(window) >= WINDOW_ROWS or (window and size >= WINDOW_BYTES):
            yield window, False
            window = []
        if not window:
            size, began = 0, time.monotonic()
        window.append(task)
        size += task.size
    if window:
        yield window, True


def text_of(prompt: Any) -> str:
    """Approximate text of a prompt, for its beginning and its length, without a chat template."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        if "messages" in prompt:
            return f"{prompt.get('tools', '')}{prompt['messages']}"
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
    return prompt if isinstance(prompt, str) else str(prompt)


def ordered(tasks: Iterable[Task | Pause]) -> Iterator[Task | Pause]:
    """The tasks, window by window, in the fastest order."""
    for found in windows(tasks):
        if found is PAUSE:
            yield PAUSE
            continue
        window, is_last = found
        rows = sorted((text_of(task.prompt), task.row, task) for task in window)
        if not is_last:
            yield from (task for _, _, task in rows)
            continue
        # Rows with the same beginning stay together.
        neighbours = itertools.groupby(rows, key=lambda row: row[0][:MIN_PREFIX])
        groups = [sorted(group, key=_work, reverse=True) for _, group in neighbours]
        for group in sorted(groups, key=lambda group: _work(group[0]), reverse=True):
            yield from (task for _, _, task in group)


def _work(row: tuple[str, int, Task]) -> float:
    """Approximate number of tokens that a row may need."""
    text, _, task = row
    most = task.params.max_tokens
    # Why //: a row may ask for more tokens than a float can hold.
    return math.inf if most is None else len(text) // CHARS_PER_TOKEN + most
