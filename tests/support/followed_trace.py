"""A trace of an engine's life, and what the engine had at each step, to hold the fold to it."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from nanoengine.core.block_pool import BlockPool
from nanoengine.core.plan import StepPlan
from nanoengine.core.sequence import Request
from nanoengine.engine import LLMEngine
from nanoengine.observe.trace import content_key, trace_engine
from nanoengine.observe.trace_fold import Fold
from nanoengine.observe.trace_reader import read_trace


def contents(pool: BlockPool) -> dict[int, tuple[int, int]]:
    """Block -> name and group of what it holds."""
    return {
        block.block_id: (content_key(block.prefix.digest), block.group)
        for block in pool.blocks
        if block.prefix is not None
    }


class FollowedTrace:
    """Traces an engine, and looks at its scheduler whenever it has planned a step."""

    def __init__(self, engine: LLMEngine, *, first: int = 0) -> None:
        handle, self.path = tempfile.mkstemp(suffix=".trace.gz")
        os.close(handle)
        self.trace = trace_engine(engine, self.path, steps=(first, None))
        engine.observers.append(self)
        self.first = first
        self.scheduler = engine.scheduler
        self.pool = self.scheduler.block_manager.pool
        self.planned: dict[int, Any] = {}  # step -> tables and counts once it was planned
        self.held: dict[int, Any] = {}  # step -> contents before the next one was planned
        self.committed: list[int] = []
        self.schedule = self.scheduler.schedule
        self.scheduler.schedule = self.look_and_schedule  # type: ignore[method-assign]

    def look_and_schedule(self) -> StepPlan:
        self.held.setdefault(self.scheduler.stats.steps - 1, contents(self.pool))
        plan = self.schedule()
        tables = {
            seq.seq_id: [list(table) for table in seq.block_tables]
            for seq in self.scheduler.running
        }
        self.planned[plan.step] = tables, [block.ref_count for block in self.pool.blocks]
        return plan

    def on_step(self, plan: StepPlan, result: object, scheduler: object) -> None:
        self.committed.append(plan.step)
        if self.scheduler.stats.steps == plan.step + 1:
            self.held[plan.step] = contents(self.pool)

    def check(self, requests: list[Request]) -> int:
        """Folds the trace and compares; returns how many steps were compared."""
        self.trace.close()
        recording = read_trace(self.path)
        os.unlink(self.path)
        assert not recording.is_torn
        num_compared = 0
        planned_before = recording.state.planned if recording.state else -1
        fold = Fold(recording.header, recording.state)
        for step, fold, _ in Fold.follow(recording):
            if step.step <= planned_before:
                continue
            tables, refs = self.planned[step.step]
            name = f"step {step.step}"
            assert {s.seq_id: s.block_tables for s in fold.running.values()} == tables, name
            assert fold.refs == refs, name
            assert fold.content["device"] == self.held[step.step], name
            num_compared += 1
        traced = [step.step for step in recording.steps]
        assert traced == self.committed[len(self.committed) - len(traced) :]
        for request in requests:
            for seq in request.sequences:
                if seq.seq_id in fold.sequences:
                    told = fold.sequences[seq.seq_id]
                    assert told.output_token_ids == seq.output_token_ids, (seq, told)
                    assert told.finish_reason == seq.finish_reason, seq
                    assert told.request_id == request.request_id
                else:
                    assert self.first or not seq.output_token_ids, f"{seq} is not told of"
        return num_compared
