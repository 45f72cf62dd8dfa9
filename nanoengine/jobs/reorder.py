"""Sorts tasks into a fast order, within windows, which bound the memory.

Results don't depend on the order. Consecutive rows with a common prefix hit the prefix cache before
the prefix is evicted. In the last window long rows run first, so that none runs alone at the end.
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
MAX_WAIT_S = 0.2
"""How long a window waits for more rows while the input has none [s]."""

MIN_PREFIX_CHARS = 64
"""Rows with a common prefix of this length (a few KV blocks) stay together in the last window."""

CHARS_PER_TOKEN = 4


def windows(tasks: Iterable[Task | Pause]) -> Iterator[tuple[list[Task], bool] | Pause]:
    """Groups tasks into windows; True marks the last one. A window ends early if tasks pause."""
    window: list[Task] = []
    size, start = 0, 0.0
    for task in tasks:
        if task is PAUSE:
            if window and time.monotonic() - start >= MAX_WAIT_S:
                yield window, False
                window = []
            else:
                yield PAUSE
            continue
        if len(window) >= WINDOW_ROWS or (window and size >= WINDOW_BYTES):
            yield window, False
            window = []
        if not window:
            size, start = 0, time.monotonic()
        window.append(task)
        size += task.size
    if window:
        yield window, True


def text_of(prompt: Any) -> str:
    """Approximate text of a prompt, without the chat template, to compare prefixes and lengths."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        if "messages" in prompt:
            return f"{prompt.get('tools', '')}{prompt['messages']}"
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
    return prompt if isinstance(prompt, str) else str(prompt)


def reordered(tasks: Iterable[Task | Pause]) -> Iterator[Task | Pause]:
    """The tasks, sorted within each window."""
    for item in windows(tasks):
        if item is PAUSE:
            yield PAUSE
            continue
        window, is_last = item
        rows = sorted((text_of(task.prompt), task.row, task) for task in window)
        if not is_last:
            yield from (task for _, _, task in rows)
            continue
        # Rows with a common prefix stay together.
        by_prefix = itertools.groupby(rows, key=lambda row: row[0][:MIN_PREFIX_CHARS])
        groups = [sorted(group, key=_max_tokens, reverse=True) for _, group in by_prefix]
        for group in sorted(groups, key=lambda group: _max_tokens(group[0]), reverse=True):
            yield from (task for _, _, task in group)


def _max_tokens(row: tuple[str, int, Task]) -> float:
    """Approximate maximum number of tokens of a row, prompt and output."""
    text, _, task = row
    max_tokens = task.params.max_tokens
    # Why //: max_tokens may be larger than any float.
    return math.inf if max_tokens is None else len(text) // CHARS_PER_TOKEN + max_tokens
