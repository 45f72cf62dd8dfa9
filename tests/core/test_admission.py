"""Admission policies: which sequences wait, and that none waits forever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.core.policies import Predictive, make_policy
from nanoengine.core.waiting import MAX_OVERTAKEN
from nanoengine.errors import ConfigError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_engine, run


def exactly(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


# --- prediction -----------------------------------------------------------------------------------


def test_sequences_of_known_length_are_never_preempted():
    # Each request starts with 2 blocks and ends with 5: all 9 fit at first, only 4 at the peak.
    prompts = [[i + 1] * 8 for i in range(9)]
    preemptions = {}
    for policy in (None, Predictive()):
        engine = make_engine(
            num_blocks=21, max_num_seqs=9, enable_prefix_caching=False, policy=policy,
            max_num_batched_tokens=128,
        )  # fmt: skip
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, exactly(13))
        engine.step()
        preemptions[type(policy), "first step"] = engine.stats().num_running
        run(engine)
        preemptions[type(policy)] = engine.stats().preemptions
    assert preemptions[type(None), "first step"] == 9
    assert preemptions[Predictive, "first step"] == 4
    assert preemptions[type(None)] > 0
    assert preemptions[Predictive] == 0


class Bounded(Predictive):
    """Compares each prediction with the upper bound that is computed before it."""

    num_compared, num_saved = 0, 0

    def _upper_bound(self, seq, admission, running, manager):
        bound, peak = (
            predict(seq, admission, running, manager)
            for predict in (super()._upper_bound, self._peak)
        )
        assert peak <= bound
        self.num_compared += 1
        self.num_saved += bound <= manager.pool.num_usable
        return bound


@settings(max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=2, max_size=12),
    num_blocks=st.integers(15, 80),
    ignore_eos=st.booleans(),
)
def test_no_predicted_peak_exceeds_its_upper_bound(sizes, num_blocks, ignore_eos):
    policy = Bounded()
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=8, policy=policy, eos_token_ids=(0,))
    for i, (prompt, output) in enumerate(sizes):
        params = SamplingParams(max_tokens=output, ignore_eos=ignore_eos)
        engine.add_request(str(i), [1] * prompt, params)
    run(engine)
    assert policy.num_compared


def test_a_pool_that_fits_all_needs_no_prediction():
    policy = Bounded()
    engine = make_engine(num_blocks=80, policy=policy, enable_prefix_caching=False)
    for i in range(4):
        engine.add_request(str(i), [i + 1] * 8, exactly(8))
    run(engine)
    assert policy.num_saved == policy.num_compared == 3


def test_blocks_freed_by_a_short_sequence_count_for_a_longer_one():
    # The short one ends before the long one needs its blocks, so both are admitted at once.
    engine = make_engine(num_blocks=9, enable_prefix_caching=False, policy=Predictive())
    engine.add_request("long", [1] * 4, exactly(25))  # ends with 7 of 8 blocks
    engine.add_request("short", [2] * 4, exactly(4))  # ends with 2 when the long one has 2
    engine.step()
    assert engine.stats().num_running == 2
    run(engine)
    assert engine.stats().preemptions == 0


def test_expected_lengths_come_from_finished_sequences():
    policy = Predictive()
    engine = make_engine(policy=policy, num_blocks=200, eos_token_ids=(0,), max_num_seqs=2)
    request = engine.add_request("0", [1], SamplingParams(max_tokens=90))
    (seq,) = request.sequences
    assert policy.num_expected_tokens(seq) == 90, (
        "no length is known yet, so max_tokens is expected"
    )
    for length in (2, 4, 6):
        engine.add_request(f"end {length}", [5], exactly(length), priority=-1)
    engine.step()
    while engine.num_unfinished > 1:
        engine.step()
    num_output = seq.num_output_tokens
    longer = [length for length in (2, 4, 6) if length > num_output]
    expected = sum(longer) // len(longer) - num_output if longer else 90 - num_output
    assert policy.num_expected_tokens(seq) == expected


def test_aborted_sequences_do_not_change_expected_lengths():
    policy = Predictive()
    engine = make_engine(max_num_seqs=1, policy=policy)
    for length in (2, 6):
        engine.add_request(str(length), [1], exactly(length))
        run(engine)
    engine.add_request("aborted", [1], exactly(40))
    engine.step()
    engine.abort("aborted")
    seq = engine.add_request("next", [1], SamplingParams(max_tokens=90)).sequences[0]
    assert policy.num_expected_tokens(seq) == 4


def test_shared_blocks_count_once():
    # Eight requests share a prefix of 8 blocks; counted separately they would not fit in 40 blocks.
    prefix = list(range(1, 33))
    engine = make_engine(num_blocks=41, policy=Predictive(), max_num_batched_tokens=256)
    for i in range(8):
        engine.add_request(str(i), [*prefix, 40 + i, 40 + i], exactly(4))
    engine.step()
    assert engine.stats().num_running == 8


def test_a_windowed_sequence_is_predicted_to_hold_its_window_only():
    engine = make_engine(
        num_blocks=25, windows=(8,), policy=Predictive(), max_num_batched_tokens=16, max_num_seqs=4
    )
    for i in range(3):  # 60 tokens are 15 blocks; a window of 8 and its chunk need 7
        engine.add_request(str(i), [i + 1] * 4, exactly(56))
    engine.step()
    assert engine.stats().num_running == 3
    run(engine)
    assert engine.stats().preemptions == 0


def test_the_last_waiting_sequences_are_admitted_longest_first():
    order = {}
    for policy in (None, Predictive()):
        engine = make_engine(num_blocks=100, max_num_seqs=3, policy=policy)
        for i, length in enumerate((4, 6, 2, 9, 3, 3, 8)):
            engine.add_request(str(i), [i + 1], exactly(length))
        run(engine)
        plans = engine.executor.plans
        order[type(policy)] = [new.seq_id for plan in plans for new in plan.admitted]
    assert order[type(None)] == [0, 1, 2, 3, 4, 5, 6]
    # Two run while the last two wait, and the later one is longer.
    assert order[Predictive] == [0, 1, 2, 3, 4, 6, 5]


def test_longer_sequences_that_are_newer_or_less_urgent_do_not_overtake():
    policy, engine = Predictive(), make_engine(num_blocks=100)

    def add(name: str, length: int, priority: int = 0):
        return engine.add_request(name, [1], exactly(length), priority=priority).sequences[0]

    short, long, later = add("short", 2), add("long", 8), add("later", 20, priority=1)
    assert policy.next_to_admit([short, long, later]) is long
    newcomer = add("newcomer", 30)
    assert policy.next_to_admit([short, newcomer, later]) is short, (
        "it came after the choice was made"
    )
    assert policy.next_to_admit([newcomer, later]) is newcomer
    short.num_preempted_tokens = 1
    assert policy.next_to_admit([short, long]) is short, "it has been admitted before"
    assert policy.next_to_admit([later]) is later


def test_admission_settings_are_checked():
    with pytest.raises(ConfigError, match="admission"):
        EngineConfig(model="m", admission="optimistic")


# --- no starvation --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8)), min_size=1, max_size=12),
    newcomers=st.integers(0, 2),
    num_blocks=st.sampled_from([11, 16, 24]),
    policy=st.sampled_from(["watermark", "predictive"]),
    max_num_seqs=st.integers(1, 6),
)
def test_every_request_finishes_in_a_bounded_number_of_steps(
    lengths, newcomers, num_blocks, policy, max_num_seqs
):
    """With equal priorities, request i ends within (i + 1) * (2 * rows + overtakers + 1) * longest.

    Proof: the first running sequence in order computes one token per step and is never preempted.
    If the first unfinished request waits, three sets of requests end one after another, at most
    `longest` steps each: the running ones; the MAX_OVERTAKEN that may pass it; and, where the last
    few run longest first, the ones that waited with it (at most as many as ran). Then it runs and
    ends. New requests arrive all the time.
    """
    engine = make_engine(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=8,
        policy=make_policy(policy), watermark_frac=0.05,
    )  # fmt: skip
    for i, (prompt, output) in enumerate(lengths):
        engine.add_request(str(i), [1 + i] * prompt, exactly(output))
    longest = max(prompt + output for prompt, output in [*lengths, (2, 2)])
    left = {str(i) for i in range(len(lengths))}
    step = 0
    while left:
        for j in range(newcomers):
            engine.add_request(f"new {step} {j}", [41 + j] * 2, exactly(2))
        for request in engine.step():
            left.discard(request.request_id)
        step += 1
        first = min(map(int, left), default=len(lengths))
        assert step < (first + 1) * (2 * max_num_seqs + MAX_OVERTAKEN + 1) * longest
