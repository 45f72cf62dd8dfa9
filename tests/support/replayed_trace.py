"""A trace of an engine with its plans and states, to compare with the trace's replay."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from nanoengine.core.plan import StepPlan
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.engine import LLMEngine
from nanoengine.observe.hooks import Hooks
from nanoengine.observe.trace import trace_engine
from nanoengine.observe.trace_reader import read_trace


def planned(plan: StepPlan) -> str:
    """A plan without fields that decide nothing: parameters, seeds and banned words."""
    admitted = [(a.row, a.seq_id, a.token_ids, a.num_cached_tokens) for a in plan.admitted]
    forks = [fork[:3] for fork in plan.forks]
    rest = [getattr(plan, name) for name in plan.__slots__ if name not in ("admitted", "forks")]
    return repr((admitted, forks, rest))


def held(scheduler: Scheduler) -> Any:
    """Running sequences with their tables, all blocks, and the measured costs of loads."""
    cache = scheduler.block_manager.prefix_cache
    pools, measured = [cache.pool], None
    if isinstance(cache, TieredPrefixCache):
        measured = repr(cache.cost)
        pools += [cache.host, cache.disk.pool][: len(cache.tier_stats())]
    return (
        scheduler.num_waiting,
        measured,
        [(s.seq_id, s.row, s.num_computed_tokens, s.block_tables) for s in scheduler.running],
        [[(b.ref_count, b.group, b.prefix and b.prefix.digest) for b in p.blocks] for p in pools],
    )


def ended(seq: Sequence) -> Any:
    return seq.seq_id, seq.token_ids, seq.finish_reason, seq.stop_reason, seq.request.error


class ReplayedTrace:
    """Traces an engine, and records its scheduler after each planned or committed step."""

    def __init__(self, engine: LLMEngine) -> None:
        handle, self.path = tempfile.mkstemp(suffix=".trace.gz")
        os.close(handle)
        self.scheduler = engine.scheduler
        self.trace = trace_engine(engine, self.path)
        self.seen: list[tuple[str, int, str, str]] = []
        self.hooks = Hooks((self.scheduler, "schedule", self.schedule),
                         (self.scheduler, "commit", self.commit))  # fmt: skip

    def schedule(self, call: Any) -> StepPlan:
        plan: StepPlan = call()
        self.seen.append(("plan", plan.step, planned(plan), repr(held(self.scheduler))))
        return plan

    def commit(self, call: Any, plan: StepPlan, result: object) -> Any:
        finished = call(plan, result)
        self.seen.append(("step", plan.step, planned(plan), repr(held(self.scheduler))))
        return finished

    def check(self, requests: list[Request]) -> int:
        """Replays the trace and compares; returns the number of compared plans and steps."""
        self.hooks.remove()
        self.trace.close()
        recording = read_trace(self.path)
        os.unlink(self.path)
        assert not recording.is_torn
        again = Again(recording.replay())
        again.replay.run(again)
        for before, now in zip(self.seen, again.seen, strict=True):
            assert before == now
        for request, replayed in zip(requests, again.requests, strict=True):
            assert request.request_id == replayed.request_id
            sequences = zip(request.sequences, replayed.sequences, strict=True)
            for seq, other in sequences:
                assert ended(seq) == ended(other)
        return len(self.seen)


class Again:
    """Records from a replay what a ReplayedTrace records from the run."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay
        self.requests: list[Request] = []
        self.seen: list[tuple[str, int, str, str]] = []

    def on_request(self, request: Request) -> None:
        self.requests.append(request)

    def on_plan(self, plan: StepPlan) -> None:
        self.seen.append(("plan", plan.step, planned(plan), repr(held(self.replay.scheduler))))

    def on_step(self, plan: StepPlan, result: object, scheduler: Scheduler) -> None:
        self.seen.append(("step", plan.step, planned(plan), repr(held(scheduler))))
