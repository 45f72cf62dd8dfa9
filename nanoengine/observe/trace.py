"""Trace: an Observer that writes one JSON line a step, to plot or question the run later.

Enters `LLMEngine.observers`; reads plans, results and the scheduler's counts, changes nothing.

| key | what |
|---|---|
| step, time_s | number of the step; seconds since the trace was opened, after the commit |
| waiting, running | requests in the queue, sequences with a row, after the step |
| tokens | sequence id -> [position of its first token, tokens computed] |
| sampled | sequence id -> the tokens it sampled |
| admitted | [sequence id, known tokens, of them cached] |
| forked | [sequence id, parent's sequence id] |
| chosen | [sequence id, position, token]: chosen outside the sampler since the last step |
| preempted | [sequence id, computed tokens lost, reason] |
| finished | [sequence id, reason] of the requests that this step finished |
| released | sequences whose row was taken back since the last step, finished ones included |
| errors | sequence id -> why it has no valid token |
| blocks | tier -> counts of empty, cached and active blocks |
| copies, transfers | [from, to]; [kind, tier, blocks] |
| reasons | the scheduler's words for anything unusual |
| times_ms | schedule, prepare, forward, sample, commit |
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from nanoengine.core.plan import StepPlan, StepResult, StepTimes


class Trace:
    """Writes the record of each step to a JSON-lines file. A context manager; `close` flushes it.

    A plan names rows, which sequences take and leave. The trace follows which sequence holds which
    row, because its records name sequences; so it must watch from the engine's first step.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "trace.jsonl")
    >>> with Trace(path) as trace:
    ...     trace.on_step(StepPlan(step=1), StepResult(token_ids=[]), object())
    >>> json.loads(open(path).read())["step"]
    1
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._start_s = time.perf_counter()
        self._sequence: dict[int, int] = {}

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Writes one line."""
        record = {
            "step": plan.step,
            "time_s": round(time.perf_counter() - self._start_s, 6),
            "waiting": getattr(scheduler, "num_waiting", None),
            "running": getattr(scheduler, "num_running", None),
            **self._sequences(plan, result, scheduler),
            "blocks": block_counts(scheduler),
            "copies": [list(copy) for copy in plan.block_copies],
            "transfers": [[t.kind, t.tier, len(t.device_ids)] for t in plan.transfers],
            "reasons": plan.reasons,
            "times_ms": {
                name.removesuffix("_s"): round(1e3 * getattr(result.times, name), 4)
                for name in StepTimes.__dataclass_fields__
            },
        }
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def _sequences(self, plan: StepPlan, result: StepResult, scheduler: object) -> dict[str, Any]:
        """The part of the record that names sequences; follows rows in the plan's order."""
        name = self._sequence
        released = [name.pop(row) for row in plan.released if row in name]
        for new in plan.admitted:
            name[new.row] = new.seq_id
        forked = []
        for fork in plan.forks:
            forked.append([fork.seq_id, name[fork.parent_row]])
            name[fork.row] = fork.seq_id
        chosen = [[name[c.row], c.position, c.token_id] for c in plan.chosen_tokens]
        ids = [name[row] for row in plan.rows]
        spans = zip(plan.starts, plan.num_scheduled_tokens, strict=True)
        return {
            "tokens": dict(zip(ids, map(list, spans), strict=True)),
            "sampled": {i: t for i, t in zip(ids, result.token_ids, strict=True) if t},
            "admitted": [[a.seq_id, len(a.token_ids), a.num_cached_tokens] for a in plan.admitted],
            "forked": forked,
            "chosen": chosen,
            "preempted": [list(preemption) for preemption in plan.preempted],
            "released": released,
            "finished": [
                [seq.seq_id, seq.finish_reason]
                for request in getattr(scheduler, "last_finished", ())
                for seq in request.sequences
            ],
            "errors": {ids[index]: message for index, message in result.errors.items()},
        }


def block_counts(scheduler: object) -> dict[str, dict[str, int]]:
    """Tier -> how many of its blocks are empty, cached and active."""
    manager = getattr(scheduler, "block_manager", None)
    if manager is None:
        return {}
    counts = {"device": manager.pool.counts()}
    for tier in manager.prefix_cache.tier_stats():
        counts[tier.name] = {
            "empty": tier.empty_blocks,
            "cached": tier.cached_blocks,
            "active": tier.active_blocks,
        }
    return counts
