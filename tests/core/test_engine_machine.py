"""One state machine for all features of the core, against an oracle and the SlowScheduler.

Requests with shared prefixes run over small pools, in the plain and in the overlapped loop. Runs
include forks, copy-on-write, aborts, priorities, sliding windows and hybrid groups, preemption,
equal prompts in one step, and tiers whose copies are late, fail or are cancelled. After each step
all invariants are checked:

I1 free + used + null = total. I2 a reference count is the number of table entries. I3 a block is
free exactly when its count is 0. I4 the index names only full blocks whose chain matches. I5 a
shared block is never written. I6 the null block is never allocated, hashed or freed. I7 eviction is
least recently used first, tails before heads (tests/core/test_core_machines.py). The fake executor
checks I5, and that each block that a sequence reads was written for exactly its tokens: it finds a
stale, torn or mixed-up block of any tier at the first read. At the end every output is compared. A
SlowScheduler runs the same events, and each step's plan must be the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nanoengine.core.block_pool import NULL_BLOCK
from nanoengine.core.checks import check
from nanoengine.core.policies import make_policy
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import NO_ROW, Request
from nanoengine.core.sequence import Sequence as CoreSequence
from nanoengine.core.tiers.cost import CostModel, LoadCost, Rate
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.settings.params import SamplingParams
from tests.support.fake_disk import FakeDisk
from tests.support.fake_executor import (
    ExecutorFailure,
    FakeExecutor,
    chain,
    expected_output,
    make_engine,
    next_token,
    prefix_hashes,
)
from tests.support.replayed_trace import ReplayedTrace
from tests.support.slow_scheduler import SlowScheduler

# Why so many: a tier only serves a prefix that the device has evicted before it is requested again.
FAMILIES = [[(3 + k * i + i * i) % 43 for i in range(90)] for k in range(7)]
LONGEST = 80

EVENTS: Counter[str] = Counter()
"""Counts of events in all examples of a run, so that a test can check that they occurred."""


class EngineRun:
    """An engine on a fake executor; its methods are the actions of a caller and a device."""

    def __init__(
        self, scheduler_class: type[Scheduler], *, is_checked: bool = True, **options: Any
    ) -> None:
        one = SimpleNamespace(**options)  # one value per option
        # Why more than the seed: Hypothesis prefers few seeds, and the tiers would repeat.
        self.random = Random(
            f"{one.seed} {one.num_blocks} {one.block_size} {one.windows} {one.states} {one.budget}"
            f" {one.admission} {one.late}"
        )
        self.is_checked = is_checked
        self.tiers: TieredPrefixCache | None = None
        self.engine = make_engine(
            one.num_blocks,
            one.block_size,
            windows=one.windows,
            num_states=one.states[0],
            snapshot_every=one.states[1],
            max_num_seqs=one.max_num_seqs,
            max_num_batched_tokens=one.budget if one.chunked else max(one.budget, LONGEST),
            enable_prefix_caching=one.caching,
            chunked_prefill=one.chunked,
            long_prefill_threshold=one.threshold if one.chunked else 0,
            watermark_frac=one.watermark,
            policy=make_policy(one.admission),
            make_tiers=self.make_tiers if one.caching and self.random.random() < 0.85 else None,
            overlap=one.late,
            debug_checks=False,  # `holds` checks after each step
            scheduler_class=scheduler_class,
            proposer=self,
        )
        assert isinstance(self.engine.executor, FakeExecutor)
        self.executor = self.engine.executor
        self.executor.token_s = 1 / 30_000
        self.executor.row_errors = lambda row: "NaN" if row.seq_id in self.broken else None
        self.scheduler = self.engine.scheduler
        self.manager = self.scheduler.block_manager
        # Why this bound: no request is refused, so every output equals the oracle's.
        self.max_total = max(n for n in range(1, LONGEST) if self.manager.can_ever_allocate(n))
        # Why not for both: a SlowScheduler's plans are the same. Why a third: replays take time.
        is_traced = is_checked and one.seed % 3 == 0
        self.trace = ReplayedTrace(self.engine) if is_traced else None
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.broken: set[int] = set()
        self.given: dict[int, list[int]] = {}  # seq_id of a fork -> initial output
        self.finished: list[str] = []
        self.events = Counter({"examples": 1, "late examples": one.late})

    def make_tiers(self, executor: FakeExecutor) -> TieredPrefixCache:
        random = Random(self.random.random())
        self.disk = FakeDisk(executor.host, random)
        cost = CostModel(
            host=LoadCost(1, 0.001, random.choice(["auto", "load", "load", "load"])),
            disk=LoadCost(1, 0.001, random.choice(["auto", "load", "load", "load", "recompute"])),
        )
        if random.random() < 0.5:  # otherwise nothing is measured, and auto loads
            cost.prefill = Rate(random.choice([1.0, 2000.0, 1e6]), 1.0)
            cost.host.rate, cost.disk.rate = Rate(500.0, 1.0), Rate(500.0, 1.0)
        self.tiers = TieredPrefixCache(
            executor.layout,
            num_host_blocks=random.choice([1, 4, 8, 16, 40, 40]),
            cost=cost,
            disk=None if executor.layout.num_states or random.random() < 0.2 else self.disk,
            num_host_states=random.choice([1, 3, 20]) if executor.layout.num_states else 0,
            num_disk_blocks=random.choice([5, 40, 200, 200]),
        )
        return self.tiers

    # --- actions of a caller ------------------------------------------------------------------

    # Why a seed instead of a strategy for each value: Hypothesis prefers small values and short
    # runs, but pressure on the pool needs many long requests.
    def add(self, seed: int, count: int) -> None:
        random = Random(seed ^ self.random.getrandbits(20))
        for _ in range(count):
            number = len(self.requests)
            prompt = random.choice(FAMILIES)[: random.choice([0, 3, 8, 17, 33, 60])]
            prompt = prompt + [1 + number % 40] * random.choice([0, 1, 5, 12])
            if self.requests and random.random() < 0.3:
                prompt = self.requests[-1].prompt_token_ids
            prompt = (prompt or [5])[: self.max_total - 1]
            max_tokens = min(random.choice([1, 6, 14, 30]), self.max_total - len(prompt))
            params = SamplingParams(
                n=random.choice([1, 1, 1, 2, 3, 5]),
                max_tokens=max_tokens,
                min_tokens=random.choice([0, 0, min(5, max_tokens)]),
                ignore_eos=random.choice([True, False]),
                prompt_logprobs=random.choice([None, None, None, None, None, 0]),
                prompt_logprobs_start=random.choice([0, 0, 9]),
            )
            if params.prompt_logprobs is not None and params.n == 1 and number % 5 == 3:
                params = replace(params, max_tokens=0, min_tokens=0)
            request = self.engine.add_request(
                str(number),
                list(prompt),
                params,
                priority=random.choice([0, 0, 0, 0, -1, 1]),
                cache_salt=random.choice([None, None, None, None, None, "salt"]),
            )
            self.requests.append(request)

    def step(self) -> None:
        self.finished += [request.request_id for request in self.engine.step()]
        self.events["steps"] += 1

    def needs_tokens(self) -> bool:
        return self.random.random() < 0.3

    def propose(self, sequences: Sequence[CoreSequence]) -> list[tuple[int, ...]]:
        if self.random.random() < (0.1 if self.executor.layout.num_states else 0.7):
            return [()] * len(sequences)
        return [self.drafts(seq) for seq in sequences]

    def drafts(self, seq: CoreSequence) -> tuple[int, ...]:
        prefix, drafts = prefix_hashes(seq.token_ids)[-1], []
        for _ in range(self.random.randrange(5)):
            good = self.random.random() < (0.7 if self.executor.layout.num_states else 0.8)
            drafts.append(next_token(prefix, seq.seed) if good else 1)
            prefix = chain(prefix, drafts[-1])
        self.events["late drafts" if self.engine.overlap else "drafts"] += len(drafts)
        return tuple(drafts)

    def steps(self, count: int, seed: int) -> None:
        """Runs several steps, with random events between them at the rate of a long run."""
        # Why mixed: Hypothesis repeats few seeds, more often when it reads constants from more
        # loaded modules, and some events then never occurred.
        random = Random(seed ^ self.random.getrandbits(20))
        for _ in range(count):
            self.step()
            self.holds()
            if random.random() < 0.05:
                often = [self.abort, self.abort, self.break_one, self.lose_file, self.reset]
                random.choice([*often, self.fork_one])(random)
                self.holds()

    def abort(self, random: Random) -> None:
        if self.requests:
            request_id = random.choice(self.requests[-6:]).request_id
            if self.engine.abort(request_id) is not None:
                self.aborted.add(request_id)
                self.events["aborts"] += 1
            assert self.engine.abort(request_id) is None

    def break_one(self, random: Random) -> None:
        if self.scheduler.running:
            self.broken.add(random.choice(self.scheduler.running).seq_id)
            self.events["broken rows"] += 1

    def lose_file(self, random: Random) -> None:
        if self.tiers is not None and self.disk.files:
            del self.disk.files[random.choice(list(self.disk.files))]
            self.events["lost files"] += 1

    def reset(self, random: Random) -> None:
        if random.random() < 0.1:
            self.engine.finish_in_flight()
            assert self.engine.reset_prefix_cache() is not bool(self.scheduler.num_running)

    def fork_one(self, random: Random) -> None:
        self.fork(random.getrandbits(20), 1)

    def fork(self, seed: int, count: int) -> None:
        """Forks any unfinished sequence between steps, with the same next token or another one."""
        random = Random(seed)
        self.engine.finish_in_flight()
        for _ in range(count):
            live = [
                seq
                for request in self.requests
                for seq in request.sequences
                if not seq.is_finished and seq.request.request_id not in self.aborted
            ]
            if not live:
                return
            running = [seq for seq in live if seq.row != NO_ROW]
            parent = random.choice(running if running and random.random() < 0.8 else live)
            token_id = random.choice([None, None, random.randrange(50)])
            if not parent.num_output_tokens:
                token_id = None
            child = self.engine.fork(
                parent.request.request_id, index=parent.index, next_token_id=token_id
            )
            given = parent.output_token_ids
            self.given[child.seq_id] = given if token_id is None else [*given[:-1], token_id]
            self.events["forks between steps"] += 1

    def abort_all(self) -> None:
        self.engine.abort_all()
        self.forget_all()
        self.no_block_is_in_use()
        self.events["aborts of all"] += 1

    def fail(self, where: str) -> None:
        if not self.engine.has_unfinished():
            return
        self.executor.fail_at = where
        with pytest.raises(ExecutorFailure):
            self.run_until_failure()
        self.forget_all()
        assert self.manager.pool.counts()["empty"] == self.manager.pool.num_usable
        self.events["failed steps"] += 1

    def run_until_failure(self) -> None:
        for _ in range(3):  # Why: an overlapped step fails when its result is awaited
            self.finished += [request.request_id for request in self.engine.step()]

    def disk_is_full(self) -> None:
        if self.tiers is not None:
            self.disk.can_write = False

    # --- invariants ---------------------------------------------------------------------------

    def holds(self) -> None:
        if self.is_checked:
            check(self.scheduler)
        counts = self.manager.pool.counts()
        assert sum(counts.values()) == self.manager.pool.num_usable
        assert self.scheduler.num_running <= self.scheduler.max_num_seqs

    def forget_all(self) -> None:
        self.aborted |= {r.request_id for r in self.requests} - set(self.finished)
        assert not self.engine.has_unfinished() and not self.scheduler.has_unfinished

    def no_block_is_in_use(self) -> None:
        """Checks that no block is in use, on the device or for a step's copy in the host tier."""
        assert self.manager.pool.num_active == 0
        if self.tiers is not None:
            held = self.tiers.host.counts()["active"]
            assert held == len(self.tiers.disk.copied_host_ids()), "a step's copy is never released"

    def finish(self) -> None:
        """Steps until nothing is left; then checks that every output equals the oracle's."""
        for _ in range(5_000):
            if not self.engine.has_unfinished():
                break
            self.step()
            self.holds()
        assert not self.engine.has_unfinished(), "requests are left over"
        assert not self.scheduler.has_unfinished
        assert sorted(self.finished + sorted(self.aborted), key=int) == [
            request.request_id for request in self.requests
        ]
        for request in self.requests:
            self.has_the_expected_output(request)
        self.no_block_is_in_use()
        if self.trace is not None:
            self.events["steps replayed from a trace"] += self.trace.check(self.requests)
        self.count_events()
        assert self.engine.reset_prefix_cache()
        assert self.manager.pool.counts()["empty"] == self.manager.pool.num_usable
        self.engine.close()
        if self.tiers is not None:
            assert self.disk.files == {} and not self.disk.queue

    def has_the_expected_output(self, request: Request) -> None:
        for seq in request.sequences:
            expected = expected_output(
                request.prompt_token_ids,
                seq.seed,
                request.params.max_tokens or 0,
                seq.stop_ids,
                request.params.min_tokens,
                self.given.get(seq.seq_id, []),
            )
            output = seq.output_token_ids
            if seq.finish_reason in ("stop", "length"):
                assert output == expected, (seq, self.given.get(seq.seq_id))
            else:
                broken = seq.finish_reason == "error" and seq.seq_id in self.broken
                assert broken or request.request_id in self.aborted, request.error
                assert output == expected[: len(output)], seq

    def count_events(self) -> None:
        stats, plans = self.engine.stats(), self.executor.plans
        self.events["preemptions"] += stats.preemptions
        self.events["hit tokens"] += stats.cache_hit_tokens
        self.events["evicted blocks"] += stats.evicted_blocks
        self.events["states read in the step that writes them"] += self.executor.num_shared_states
        if self.executor.layout.num_states:
            hits = [bool(new.num_cached_tokens) for plan in plans for new in plan.admitted]
            self.events["hits at a snapshot"] += sum(hits)
            self.events["rejected drafts with states"] += (
                stats.drafted_tokens - stats.accepted_tokens
            )
            self.events["accepted drafts with states"] += stats.accepted_tokens
        self.events["copy-on-write copies"] += self.executor.num_copies
        self.events["blocks read in the step that writes them"] += self.executor.num_shared_reads
        self.events["forks for n > 1"] += sum(
            count == 0 for plan in plans for count in plan.num_scheduled_tokens
        )
        self.events["window drops"] += sum(
            update.block_ids.count(NULL_BLOCK)
            for plan in plans
            for update in plan.table_updates
            if update.start or len(set(update.block_ids)) == 1
        )
        for tier in stats.tiers:
            self.events[f"{tier.name} loads"] += tier.loaded_blocks
            self.events[f"{tier.name} stores"] += tier.stored_blocks
            self.events[f"{tier.name} failures"] += tier.failed_copies


OPTIONS: dict[str, list[Any]] = {
    "num_blocks": [9, 14, 21, 33, 49],
    "block_size": [2, 4, 4, 8],
    "windows": [(None,), (None,), (5,), (None, 4), (3, None, 9)],
    "states": [*[(0, 1)] * 4, (2, 1), (4, 2), (9, 1), (20, 3)],
    "max_num_seqs": [1, 2, 3, 4, 5, 6],
    "budget": [6, 9, 16, 64],
    "caching": [True, True, True, False],
    "chunked": [True, True, False],
    "threshold": [0, 3, 8],
    "watermark": [0.0, 0.1],
    "late": [False, True],
    "admission": ["watermark", "predictive"],
    "seed": list(range(2**10)),
}


class ComparedRuns:
    """Two engines with the same events: one with the fast path for decodes, one without.

    Their plans must be equal in each step. All other checks run on the fast one.
    """

    def __init__(self, **options: Any) -> None:
        self.fast = EngineRun(Scheduler, **options)
        self.plain = EngineRun(SlowScheduler, is_checked=False, **options)
        self.num_compared = 0

    def do(self, name: str, *args: Any) -> None:
        for run in (self.fast, self.plain):
            getattr(run, name)(*args)
        fast, plain = self.fast.executor.plans, self.plain.executor.plans
        for one, other in zip_longest(fast[self.num_compared :], plain[self.num_compared :]):
            assert one == other, f"with the fast path:\n{one}\nwithout it:\n{other}"
        self.num_compared = len(plain)

    def finish(self) -> None:
        self.do("finish")
        EVENTS.update(self.fast.events)


class EngineMachine(RuleBasedStateMachine):
    """Lets Hypothesis choose the events, and shrink a failing run."""

    @initialize(**{name: st.sampled_from(values) for name, values in OPTIONS.items()})
    def start(self, **options: Any) -> None:
        self.runs = ComparedRuns(**options)

    @rule(seed=st.integers(0, 2**20), count=st.integers(1, 8))
    def add(self, seed: int, count: int) -> None:
        self.runs.do("add", seed, count)

    @rule()
    def step(self) -> None:
        self.runs.do("step")

    @rule(count=st.integers(4, 40), seed=st.integers(0, 2**20))
    def steps(self, count: int, seed: int) -> None:
        self.runs.do("steps", count, seed)

    @rule(seed=st.integers(0, 2**20), count=st.integers(1, 4))
    def fork(self, seed: int, count: int) -> None:
        self.runs.do("fork", seed, count)

    @rule(dice=st.integers(0, 15))
    def abort_all(self, dice: int) -> None:
        if dice == 7:
            self.runs.do("abort_all")

    @rule(where=st.sampled_from(["start", "rows", "end"]), dice=st.integers(0, 7))
    def fail(self, where: str, dice: int) -> None:
        if dice == 5:
            self.runs.do("fail", where)

    @rule(dice=st.integers(0, 20))
    def disk_is_full(self, dice: int) -> None:
        if dice == 19:
            self.runs.do("disk_is_full")

    @invariant()
    def holds(self) -> None:
        self.runs.fast.holds()

    def teardown(self) -> None:
        if hasattr(self, "runs"):
            self.runs.finish()


def run_random_events(seed: int) -> None:
    """Runs a long sequence of events, chosen by a pseudorandom generator."""
    random = Random(seed)
    runs = ComparedRuns(**{name: random.choice(values) for name, values in OPTIONS.items()})
    for _ in range(10):
        runs.do("add", random.getrandbits(20), random.randint(1, 8))
        runs.do("steps", random.randint(4, 40), random.getrandbits(20))
        if random.random() < 0.3:
            runs.do("fork", random.getrandbits(20), random.randint(1, 4))
        if random.random() < 0.03:
            runs.do("abort_all")
        if random.random() < 0.03:
            runs.do("fail", random.choice(["start", "rows", "end"]))
    runs.finish()


QUICK = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(QUICK, max_examples=100, stateful_step_count=50, derandomize=False)
SOAK_STEPS = 50_000
NUM_RANDOM_RUNS = 16

MIN_EVENTS = {
    "late examples": 5,
    "steps replayed from a trace": 500,
    "preemptions": 100,
    "evicted blocks": 1000,
    "copy-on-write copies": 50,
    "blocks read in the step that writes them": 100,
    "forks for n > 1": 50,
    "forks between steps": 20,
    "window drops": 200,
    "hits at a snapshot": 25,
    "states read in the step that writes them": 10,
    "accepted drafts with states": 100,
    "rejected drafts with states": 100,
    "drafts": 100,
    "late drafts": 100,
    "aborts": 10,
    "aborts of all": 2,
    "broken rows": 5,
    "failed steps": 1,
    "lost files": 1,
    "host loads": 100,
    "host stores": 500,
    "disk loads": 25,
    "disk stores": 200,
    "disk failures": 20,
}
"""Minimum count per event in a run of the suite; with fewer events the test shows little.

The pseudorandom runs are always the same and have nearly all events. Hypothesis alone had 0 to 600
disk loads: it draws constants from all loaded modules, so each run is a new sample.
"""


def test_machine():
    EVENTS.clear()
    for seed in range(NUM_RANDOM_RUNS):
        run_random_events(seed)
    run_state_machine_as_test(EngineMachine, settings=QUICK)
    rare = {name: EVENTS[name] for name, minimum in MIN_EVENTS.items() if EVENTS[name] < minimum}
    assert not rare, f"these events are too rare: {rare}"


@pytest.mark.soak
def test_machine_for_long(capsys):
    EVENTS.clear()
    started = time.monotonic()
    while EVENTS["steps"] < SOAK_STEPS:
        run_state_machine_as_test(EngineMachine, settings=SOAK)
    with capsys.disabled():
        print(f"\n{EVENTS['steps']:,} steps in {time.monotonic() - started:.0f} s")
        for name, count in sorted(EVENTS.items()):
            print(f"{count:10,}  {name}")
    assert all(EVENTS[name] >= minimum for name, minimum in MIN_EVENTS.items())
