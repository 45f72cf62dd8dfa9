"""Watch: draws the pool and the running sequences on a terminal while they change.

It is an `Observer` that replaces the progress line. rich draws; the state is read from the
scheduler at most ten times per second.

    3/8 rows, 210 output tok/s
    0████▒▒▒▒▒▒····
    · 4 empty   ▒ 6 cached   █ 4 active
    request 0   ██████████▓▓▓·····   prompt 40 of 40, output 12 of 32, 4 blocks
    waiting 2: request 5 first, because too few blocks were free
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from nanoengine.core.block_pool import Block, BlockPool
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence
from nanoengine.observe.explain import REASONS

REFRESH_S = 0.1
POOL_LINES = 4
LANE_WIDTH = 32
STYLES = {"█": "green", "▒": "blue", "·": "dim", "0": "dim"}
"""Active, cached, empty and null blocks. The signs differ, so colours are optional."""


class Watch:
    """Draws on stderr until it is closed, then erases the picture.

    Args:
        title: returns the first line.
        console: where to draw; None: stderr.
    """

    def __init__(self, title: Callable[[], str], *, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._shown_s = 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: Scheduler) -> None:
        """Draws the state, at most ten times per second."""
        now = time.perf_counter()
        if now - self._shown_s >= REFRESH_S:
            self._shown_s = now
            self._live.update(self._picture(plan, scheduler), refresh=True)

    def close(self) -> None:
        """Erases the picture; may be called twice."""
        self._live.stop()

    def _picture(self, plan: StepPlan, scheduler: Scheduler) -> Group:
        width, height = self._console.size
        lines = [Text(f"step {plan.step}: {self._title()}", no_wrap=True)]
        lines += _pool(scheduler.block_manager.pool, width)
        num_lanes = max(1, height - len(lines) - 3)
        running = scheduler.running
        lines += [_lane(seq) for seq in running[:num_lanes]]
        if len(running) > num_lanes:
            lines.append(Text(f"and {len(running) - num_lanes} more", style="dim"))
        if scheduler.num_waiting:
            first = ""
            if plan.waits:
                seq_id, reason = plan.waits[0]
                first = f": sequence {seq_id} first, {REASONS[reason].why}"
            lines.append(Text(f"waiting {scheduler.num_waiting}{first}", no_wrap=True))
        return Group(*lines)


def _pool(pool: BlockPool, width: int) -> list[Text]:
    """One sign per block; a pool with too many blocks shows one of every few."""
    every = -(-pool.num_blocks // (POOL_LINES * width))
    signs = "".join(map(_sign, pool.blocks[::every]))
    lines = []
    for start in range(0, len(signs), width):
        line = Text(signs[start : start + width], no_wrap=True)
        for sign, style in STYLES.items():
            line.highlight_words([sign], style)
        lines.append(line)
    signs_of = {"empty": "·", "cached": "▒", "active": "█"}
    counts = "   ".join(f"{signs_of[state]} {n} {state}" for state, n in pool.counts().items())
    thinned = f"   one block of {every} is drawn" if every > 1 else ""
    return [*lines, Text(f"{counts}{thinned}", style="dim", no_wrap=True)]


def _sign(block: Block) -> str:
    if block.block_id == 0:
        return "0"
    return "█" if block.ref_count else "▒" if block.prefix is not None else "·"


def _lane(seq: Sequence) -> Text:
    """The progress of a sequence: computed, uncomputed, sampled and possible further tokens."""
    prompt, output = seq.num_prompt_tokens, seq.num_output_tokens
    total = max(seq.max_num_tokens, 1)
    computed = min(seq.num_computed_tokens, prompt)
    marks = [LANE_WIDTH * count // total for count in (computed, prompt, prompt + output)]
    spans = zip("█░▓·", [0, *marks], [*marks, LANE_WIDTH], strict=True)
    bar = "".join(sign * (end - start) for sign, start, end in spans)
    max_output = seq.max_num_tokens - prompt
    fork = f"/{seq.index}" if seq.index else ""
    text = f"prompt {computed} of {prompt}, output {output} of {max_output}"
    blocks = sum(map(len, seq.block_tables))
    return Text(f"request {seq.request.request_id}{fork:<4} {bar} {text}, {blocks} blocks",
                no_wrap=True)  # fmt: skip
