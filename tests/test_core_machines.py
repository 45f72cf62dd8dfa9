"""Hypothesis state machines: the pool against a plain model, the engine against an oracle.

Invariants: I1 free + used + null = total. I2 a reference count is the number of table entries. I3
free if and only if the count is 0. I4 the index names only full blocks whose chain matches. I5 a
shared block is never written. I6 the null block is never allocated, hashed or freed. I7 eviction is
least recently used first, tails before heads. I5 is checked by the FakeExecutor, slot by slot.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoengine.core.admission import make_policy
from nanoengine.core.block_pool import BlockPool
from nanoengine.core.prefixes import Prefix
from nanoengine.core.sequence import Request
from nanoengine.core.tiers import NoTiers, Tiers
from nanoengine.sampling_params import SamplingParams
from tests.fake_executor import (
    ExecutorFailure,
    FakeExecutor,
    chain,
    expected_output,
    make_engine,
    next_token,
    prefix_hashes,
)

Content = tuple[int, Prefix]
CONTENTS = st.tuples(
    st.sampled_from([0, 1]), st.sampled_from([Prefix(bytes([i]), None, (i,)) for i in range(8)])
)


class PoolMachine(RuleBasedStateMachine):
    """A BlockPool beside lists and dicts that do the same the slow way."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, num_groups=2)
        self.tables: list[list[int]] = []
        self.contents: dict[int, Content] = {}
        self.lru: list[int] = []

    def refs(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table if block_id)

    def num_empty(self) -> int:
        return self.NUM_BLOCKS - 1 - len(self.lru) - len(self.refs())

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_empty = self.num_empty()
        count = data.draw(st.integers(0, num_empty + len(self.lru)))
        got = self.pool.allocate(count)
        assert len(set(got)) == count and 0 not in got
        evicted = self.lru[: max(0, count - num_empty)]
        assert got[num_empty:] == evicted, "empty blocks first, then the oldest cached ones"
        assert not set(got[:num_empty]) & (self.contents.keys() | self.refs().keys())
        self.lru = self.lru[len(evicted) :]
        for block_id in evicted:
            del self.contents[block_id]
        self.tables.append(got)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        with_null = [0, *table]
        self.pool.share(with_null)
        self.tables.append(with_null)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))
        left = self.refs()
        for block_id in reversed(table):
            if block_id and not left[block_id] and block_id in self.contents:
                self.lru.append(block_id)

    @rule(data=st.data(), content=CONTENTS)
    def register(self, data: st.DataObject, content: Content) -> None:
        blank = sorted(self.refs().keys() - self.contents.keys())
        if not blank:
            return
        block_id = data.draw(st.sampled_from(blank))
        self.pool.register(block_id, *content)
        self.contents[block_id] = content

    @rule(content=CONTENTS, revive=st.booleans())
    def lookup(self, content: Content, revive: bool) -> None:
        hit = self.pool.lookup(*content)
        holders = [block_id for block_id, held in self.contents.items() if held == content]
        assert (hit in holders) if holders else hit is None
        if hit is not None and revive:
            self.pool.touch(hit)
            self.tables.append([hit])
            if hit in self.lru:
                self.lru.remove(hit)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def evict(self, block_ids: list[int]) -> None:
        evicted = {block_id for block_id in block_ids if block_id in self.lru}
        assert self.pool.evict(block_ids) == len(evicted)
        self.lru = [block_id for block_id in self.lru if block_id not in evicted]
        for block_id in evicted:
            del self.contents[block_id]

    @rule()
    def reset(self) -> None:
        in_use = bool(self.refs())
        assert self.pool.reset() is not in_use
        if not in_use:
            self.lru, self.contents = [], {}

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def free_twice(self, block_id: int) -> None:
        if block_id and not self.refs()[block_id]:
            with pytest.raises(ValueError, match="freed twice"):
                self.pool.free([block_id])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check(self.tables)
        cached, active = len(self.lru), len(self.refs())
        empty = self.num_empty()
        assert self.pool.counts() == {"empty": empty, "cached": cached, "active": active}
        assert self.pool.num_free == empty + cached
        held = {block.block_id for block in self.pool.blocks if block.prefix is not None}
        assert held == self.contents.keys()


FAMILIES = [[7 + i % 40 for i in range(90)], [3 + i * i % 43 for i in range(90)]]


class EngineMachine(RuleBasedStateMachine):
    """Requests with shared prefixes over small pools; in the plain and in the overlapped loop."""

    families = FAMILIES

    @initialize(
        num_blocks=st.sampled_from([9, 14, 21, 33, 49]),
        block_size=st.sampled_from([2, 4, 8]),
        windows=st.sampled_from([(None,), (None,), (5,), (None, 4), (3, None, 9)]),
        max_num_seqs=st.integers(3, 6),
        budget=st.sampled_from([6, 9, 16, 64]),
        caching=st.sampled_from([True, True, False]),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 3, 8]),
        watermark=st.sampled_from([0.0, 0.1]),
        late=st.booleans(),
        admission=st.sampled_from(["watermark", "watermark", "hysteresis", "predictive"]),
        seed=st.integers(0, 3),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...],
        max_num_seqs: int,
        budget: int,
        caching: bool,
        chunked: bool,
        threshold: int,
        watermark: float,
        late: bool,
        admission: str,
        seed: int,
    ) -> None:
        self.random = Random(seed)
        spare = num_blocks - 1 - int(watermark * (num_blocks - 1))
        # Why this bound: nothing is ever refused, so that every output is the oracle's.
        self.max_total = min(80, spare // len(windows) * block_size)
        self.engine = make_engine(
            num_blocks,
            block_size,
            windows=windows,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else max(budget, self.max_total),
            enable_prefix_caching=caching,
            chunked_prefill=chunked,
            long_prefill_threshold=threshold if chunked else 0,
            watermark_frac=watermark,
            policy=make_policy(admission),
            overlap=late,
            make_tiers=self.make_tiers if caching else None,
        )
        assert isinstance(self.engine.executor, FakeExecutor)
        self.executor = self.engine.executor
        self.executor.row_errors = lambda row: "NaN" if row.seq_id in self.broken else None
        self.scheduler = self.engine.scheduler
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.broken: set[int] = set()
        self.given: dict[int, list[int]] = {}  # seq_id of a fork -> the output it starts with
        self.finished: list[str] = []

    def make_tiers(self, executor: FakeExecutor) -> Tiers | NoTiers:
        return NoTiers()

    def num_usable(self) -> int:
        return self.scheduler.block_manager.pool.num_usable

    # --- rules --------------------------------------------------------------------------------

    # Why a seed instead of a strategy for each value: Hypothesis prefers small values and short
    # runs, and pressure on the pool comes from many and long requests.
    @rule(seed=st.integers(0, 2**20), count=st.integers(1, 8))
    def add(self, seed: int, count: int) -> None:
        random = Random(seed)
        for _ in range(count):
            self.add_one(random)

    def add_one(self, random: Random) -> None:
        number = len(self.requests)
        prompt = random.choice(self.families)[: random.choice([0, 3, 8, 17, 33, 60])]
        prompt = prompt + [1 + number % 40] * random.choice([0, 1, 5, 12])
        prompt = (prompt or [5])[: self.max_total - 1]
        max_tokens = min(random.choice([1, 6, 14, 30]), self.max_total - len(prompt))
        params = SamplingParams(
            n=random.choice([1, 1, 1, 2, 3]),
            max_tokens=max_tokens,
            min_tokens=random.choice([0, 0, min(5, max_tokens)]),
            ignore_eos=random.choice([True, False]),
            prompt_logprobs=random.choice([None, None, None, None, 0]),
        )
        request = self.engine.add_request(
            str(number),
            prompt,
            params,
            priority=random.choice([0, 0, 0, 0, -1, 1]),
            cache_salt=random.choice([None, None, None, "salt"]),
        )
        self.requests.append(request)

    @rule()
    def step(self) -> None:
        if self.random.random() < 0.3:
            self.propose()
        self.finished += [request.request_id for request in self.engine.step()]

    def propose(self) -> None:
        for seq in self.scheduler.running:
            if seq.num_computed_tokens == seq.num_tokens - 1:
                prefix, drafts = prefix_hashes(seq.token_ids)[-1], []
                for _ in range(self.random.randrange(5)):
                    good = self.random.random() < 0.8
                    drafts.append(next_token(prefix, seq.seed) if good else 1)
                    prefix = chain(prefix, drafts[-1])
                seq.draft_token_ids = tuple(drafts)

    @rule(count=st.integers(2, 16))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.holds()

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.requests[-6:])).request_id
        if self.engine.abort(request_id) is not None:
            self.aborted.add(request_id)
        assert self.engine.abort(request_id) is None

    @rule(seed=st.integers(0, 2**20), count=st.integers(1, 4))
    def fork(self, seed: int, count: int) -> None:
        """Between steps, of any unfinished sequence, with the same next token or another one."""
        random = Random(seed)
        self.engine.settle()
        for _ in range(count):
            live = [
                seq
                for request in self.requests
                for seq in request.sequences
                if not seq.is_finished and seq.request.request_id not in self.aborted
            ]
            if not live:
                return
            parent = random.choice(live)
            token_id = random.choice([None, None, random.randrange(50)])
            if not parent.num_output_tokens:
                token_id = None
            child = self.engine.fork(
                parent.request.request_id, index=parent.index, next_token_id=token_id
            )
            given = parent.output_token_ids
            self.given[child.seq_id] = given if token_id is None else [*given[:-1], token_id]

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.running)
    def break_one(self, data: st.DataObject) -> None:
        self.broken.add(data.draw(st.sampled_from(self.scheduler.running)).seq_id)

    @rule()
    def reset(self) -> None:
        assert self.engine.reset_prefix_cache() is not bool(self.scheduler.num_running)

    @rule(where=st.sampled_from(["start", "rows", "end"]), dice=st.integers(0, 2))
    def fail(self, where: str, dice: int) -> None:
        if dice or self.random.random() < 0.5:
            return
        if not self.engine.has_unfinished():
            return
        self.executor.fail_at = where
        with pytest.raises(ExecutorFailure):
            self.run_three_steps()  # Why three: a step that overlaps fails when it is waited for
        self.forget_all()
        assert self.scheduler.block_manager.pool.counts()["empty"] == self.num_usable()

    @rule()
    @precondition(lambda self: len(self.requests) % 5 == 4 and self.random.random() < 0.2)
    def abort_all(self) -> None:
        self.engine.abort_all()
        self.forget_all()

    def run_three_steps(self) -> None:
        for _ in range(3):
            self.finished += [request.request_id for request in self.engine.step()]

    def forget_all(self) -> None:
        done = set(self.finished)
        self.aborted |= {r.request_id for r in self.requests} - done
        assert not self.engine.has_unfinished() and not self.scheduler.has_unfinished

    # --- what holds ---------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()
        counts = self.scheduler.block_manager.pool.counts()
        assert sum(counts.values()) == self.num_usable()
        assert self.scheduler.num_running <= self.scheduler.max_num_seqs

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
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
            self.has_the_right_output(request)
        assert self.scheduler.block_manager.pool.counts()["active"] == 0
        assert self.engine.reset_prefix_cache()
        assert self.scheduler.block_manager.pool.counts()["empty"] == self.num_usable()

    def has_the_right_output(self, request: Request) -> None:
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


QUICK = settings(
    max_examples=70,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(QUICK, max_examples=1_500, stateful_step_count=50, derandomize=False)
MACHINES = pytest.mark.parametrize("machine", [PoolMachine, EngineMachine])


@MACHINES
def test_machine(machine):
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.soak
@MACHINES
def test_machine_for_long(machine):
    run_state_machine_as_test(machine, settings=SOAK)
