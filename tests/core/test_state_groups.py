"""State groups: which recurrent states are kept as snapshots, hits on them, and the pool size."""

from __future__ import annotations

import pytest

from nanoengine.core.checks import check_pool
from nanoengine.core.groups.pool import StatePool
from nanoengine.core.prefix_tree import Prefix, pack
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import (
    assert_outputs,
    make_engine,
    next_token,
    prefix_hashes,
    run,
    run_late,
)

PROMPT = [(3 + 5 * i + i * i) % 43 for i in range(60)]


def engine_of(num_states: int = 20, snapshot_every: int = 4, **options):
    """Creates an engine with blocks of 4 tokens and a regular snapshot every 16 tokens."""
    return make_engine(129, 4, num_states=num_states, snapshot_every=snapshot_every, **options)


def ask(engine, prompt: list[int], loop=run, **params):
    """Runs one prompt alone and checks its outputs against the oracle."""
    defaults = {"max_tokens": 1, "ignore_eos": True}
    number = str(len(engine.executor.plans))
    request = engine.add_request(number, prompt, SamplingParams(**(defaults | params)))
    loop(engine)
    assert_outputs(request)
    return request


def max_states(engine, steps: int = 1000) -> int:
    """Runs to the end; returns the maximum number of active states between two steps."""
    highest = 0
    for _ in range(steps):
        if not engine.has_unfinished():
            return highest
        engine.step()
        pool = engine.scheduler.block_manager.pool
        highest = max(highest, pool.queues[1].counts()["active"])
    raise AssertionError(f"requests are unfinished after {steps} steps")


@pytest.mark.parametrize("loop", [run, run_late])
def test_a_prompt_starts_from_the_deepest_snapshot(loop):
    engine = engine_of()
    ask(engine, PROMPT[:50], loop)
    # Regular snapshots after 16, 32 and 48 tokens; the last full block of the prompt ends at 48.
    assert ask(engine, PROMPT[:50], loop).num_cached_tokens == 48
    assert ask(engine, PROMPT[:40], loop).num_cached_tokens == 32
    assert ask(engine, PROMPT[:15], loop).num_cached_tokens == 0


def test_a_snapshot_is_kept_at_the_end_of_a_prompt():
    engine = engine_of(snapshot_every=100)
    ask(engine, PROMPT[:47])
    assert ask(engine, PROMPT[:47]).num_cached_tokens == 44
    assert ask(engine, [*PROMPT[:47], 1, 2, 3, 4, 5, 6]).num_cached_tokens == 44


def test_the_third_prompt_starts_where_the_first_two_branch():
    """The first prompt stores no snapshot there, because no branch is known. The second one hits
    its KV blocks and stores one."""
    engine = engine_of(snapshot_every=100)
    found = [ask(engine, [*PROMPT[:30], number] * 2).num_cached_tokens for number in (1, 2, 3)]
    assert found == [0, 0, 28]


def test_prompts_of_one_step_share_a_snapshot():
    engine = engine_of(max_num_batched_tokens=256)
    prompts = [[*PROMPT[:48], 40 + i] for i in range(3)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [engine.add_request(str(i), p, params) for i, p in enumerate(prompts)]
    run(engine)
    assert [request.num_cached_tokens for request in requests] == [0, 48, 48]
    assert engine.executor.num_shared_states == 2
    assert_outputs(*requests)


def test_chunks_need_not_end_at_a_block_boundary():
    engine = engine_of(long_prefill_threshold=7)
    ask(engine, PROMPT[:50])
    assert ask(engine, PROMPT[:40]).num_cached_tokens == 32


class Drafts:
    """Drafts `count` tokens per step; the first `num_right` of them are right."""

    def __init__(self, count: int, num_right: int) -> None:
        self.count, self.num_right = count, num_right

    def needs_tokens(self) -> bool:
        return True

    def propose(self, sequences):
        found = []
        for seq in sequences:
            known = list(seq.token_ids)
            for _ in range(self.num_right):
                known.append(next_token(prefix_hashes(known)[-1], seq.seed))
            drafts = known[len(seq.token_ids) :] + [1] * (self.count - self.num_right)
            found.append(tuple(drafts))
        return found


@pytest.mark.parametrize("loop", [run, run_late])
@pytest.mark.parametrize(("count", "num_right"), [(1, 1), (3, 2), (4, 4), (7, 6), (9, 9)])
def test_snapshots_between_accepted_drafts_are_kept(count, num_right, loop):
    engine = engine_of(snapshot_every=2, num_states=30, proposer=Drafts(count, num_right))
    output = ask(engine, PROMPT[:9], loop, max_tokens=40).sequences[0].output_token_ids
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < 40 and stats.saved_steps == stats.accepted_tokens
    # A snapshot after every second block, in spite of drafts.
    assert ask(engine, [*PROMPT[:9], *output[:33]]).num_cached_tokens == 40
    assert ask(engine, [*PROMPT[:9], *output[:22]]).num_cached_tokens == 24


def test_drafts_leave_the_states_that_other_sequences_need():
    """Three forks each copy the state of the prompt; their drafts get the remaining ones."""
    engine = engine_of(num_states=6, max_num_seqs=3, proposer=Drafts(3, 3))
    ask(engine, PROMPT[:9], n=3, max_tokens=30)
    stats = engine.stats()
    assert stats.accepted_tokens > 0 and stats.preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_decode_of_any_length_holds_one_state(caching):
    engine = engine_of(num_states=8, enable_prefix_caching=caching)
    for i in range(3):
        engine.add_request(str(i), [i + 1], SamplingParams(max_tokens=70, ignore_eos=True))
    counts = []
    while engine.has_unfinished():
        engine.step()
        counts.append(engine.scheduler.block_manager.pool.queues[1].counts()["active"])
    # Two per sequence in the step after a snapshot, which reads it and writes another state.
    assert counts.count(3) > 60 and max(counts) <= 6
    assert engine.executor.num_copies == 0
    if not caching:
        assert max(counts) == 3


def test_a_snapshot_is_dropped_instead_of_a_preemption():
    engine = engine_of(num_states=3, snapshot_every=1, max_num_seqs=3)
    requests = [
        engine.add_request(
            str(i), PROMPT[i : i + 9], SamplingParams(max_tokens=30, ignore_eos=True)
        )
        for i in range(3)
    ]
    assert max_states(engine) == 3
    assert engine.scheduler.stats.preemptions == 0
    assert_outputs(*requests)


def test_blocks_and_states_are_allocated_separately():
    pool = StatePool(4, 2, num_states=2)
    prefix = Prefix(b"a", None, pack([1]))
    assert (pool.allocate(3), pool.allocate(2, states=True)) == ([1, 2, 3], [4, 5])
    pool.register([4], 1, [prefix])
    pool.free([5, 1, 4])
    check_pool(pool, [[2, 3]])
    assert pool.counts() == {"empty": 1, "cached": 0, "active": 2}
    assert pool.queues[1].counts() == {"empty": 1, "cached": 1, "active": 0}
    assert (pool.num_free, pool.num_free_states, pool.next_evicted(9)) == (1, 2, [4])
    assert pool.lookup(1, prefix) == 4
    assert pool.reset() is False
    assert pool.allocate(2, states=True) == [5, 4]
    assert pool.lookup(1, prefix) is None
    pool.free([5, 4, 3, 2])
    assert pool.reset()
