"""Policies that hold sequences back: Hysteresis and Predictive; `make_policy` names them.

A sequence that is admitted too early is preempted later, and what it had computed is lost. These
look ahead in two ways: at how full the pool is, and at how full it will be. `waiting.py` has the
protocol, and their order.

Chosen by build.py, asked by the Scheduler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from nanoengine.core.block_manager import Admission, BlockManager
from nanoengine.core.sequence import Sequence
from nanoengine.core.waiting import AdmissionPolicy, Ended

Ints = NDArray[np.int64]


MAX_TIMES = 32
"""Moments at which a prediction adds the blocks up; between two of them few sequences end."""


class Hysteresis(AdmissionPolicy):
    """Stops admitting at a pressure of `preempt_above`, starts again under `admit_below`.

    Pressure is active blocks over usable ones; cached blocks can be evicted and count as free.
    """

    def __init__(self, preempt_above: float = 0.95, admit_below: float = 0.80) -> None:
        self.preempt_above = preempt_above
        self.admit_below = admit_below
        self._closed = False

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether the gate is open; the blocks of `seq` count when it is about to close."""
        usable = manager.pool.num_usable
        active = usable - manager.pool.num_free
        if self._closed:
            self._closed = active >= self.admit_below * usable
        else:
            self._closed = active + admission.num_needed_blocks > self.preempt_above * usable
        return not self._closed


class Predictive(AdmissionPolicy):
    """Admits while the predicted peak of all running sequences and the new one fits the pool.

    A sequence is expected to end at its max_tokens if nothing else can end it; else at the mean
    length of those finished sequences that got further than it has; if there are none, at its
    max_tokens. From now to then it holds a block for each `block_size` tokens, then none. Blocks
    that it shares count once, as if held to the end.

    The last few that wait are admitted longest first: a run ends with the sequence that was
    admitted last or is longest, so these should not be the same.

    Source: LightLLM's past-future scheduler: lengths of finished requests predict the running ones,
    and the peak of their memory decides. Longest first: Graham's rule for list scheduling (1969).
    """

    def __init__(self) -> None:
        self._ended, self._num_seen = Ended(), 0
        self._sorted: list[int] = []
        self._lengths: dict[int, int | None] = {}
        self._refused: int | None = None
        # Priority -> the last arrival of those that are being admitted longest first.
        self._last_arrival: dict[int, int] = {}

    def watch(self, ended: Ended) -> None:
        """Learns from what ends, when it is asked next."""
        self._ended = ended

    def _learn(self) -> None:
        if self._ended.count != self._num_seen:
            self._num_seen, self._refused = self._ended.count, None
            self._lengths.clear()
            self._sorted = sorted(self._ended.lengths)

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """The one expected to run longest of those that waited when the first of them was chosen.

        Why not of all: new ones could overtake a short one for ever. One that was preempted goes
        first, as it has waited before.
        """
        first = waiting[0]
        if first.num_preempted_tokens:
            return first
        priority = first.request.priority
        peers = [seq for seq in waiting if seq.request.priority == priority]
        if first.request.arrival > self._last_arrival.get(priority, -1):
            self._last_arrival[priority] = max(seq.request.arrival for seq in peers)
        last = self._last_arrival[priority]
        among = [seq for seq in peers if seq.request.arrival <= last]
        return max(among, key=self.num_expected_tokens)

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether the peak fits."""
        self._learn()
        # Why: until a sequence ends, the prediction only comes true; asking again is wasted time.
        if seq.seq_id == self._refused:
            return False
        # Why before: a large batch would predict all of its sequences at each admission.
        fits = self._most(seq, admission, running, manager) <= manager.pool.num_usable
        fits = fits or self._peak(seq, admission, running, manager) <= manager.pool.num_usable
        self._refused = None if fits else seq.seq_id
        return fits

    def num_expected_tokens(self, seq: Sequence) -> int:
        """Tokens that the sequence is expected to generate from now on, at least one."""
        self._learn()
        at_most = seq.max_num_tokens - seq.num_tokens
        if seq.stop_ids or seq.params.stop:
            done = seq.num_tokens - seq.num_prompt_tokens
            length = self._length_beyond(done)
            if length is not None:
                at_most = min(at_most, length - done)
        return max(at_most, 1)

    def _length_beyond(self, done: int) -> int | None:
        """Expected length of a sequence that has generated `done` tokens; None: no idea."""
        if done not in self._lengths:
            longer = self._sorted[bisect_right(self._sorted, done) :]
            self._lengths[done] = int(np.mean(longer)) if longer else None
        return self._lengths[done]

    @staticmethod
    def _most(
        seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> int:
        """No peak is higher: all grow to their max_tokens in each group, and nobody ends."""
        pool, left = manager.pool, seq.max_num_tokens - seq.num_tokens
        for other in running:
            left += other.max_num_tokens - other.num_tokens
        active = pool.num_usable - pool.num_free + admission.num_needed_blocks
        grown = left // manager.block_size + len(running) + 1
        return active + grown * len(manager.layout.groups)

    def _peak(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> int:
        """Most blocks in use at once from now on, as predicted."""
        size, pool = manager.block_size, manager.pool
        everyone = [*running, seq]
        known = np.array([s.num_tokens for s in everyone])
        left = np.array([self.num_expected_tokens(s) for s in everyone])
        cached = [s.num_cached_tokens // size for s in running]
        shared = np.array([*cached, admission.num_cached_tokens // size])
        own = _blocks(known, manager) - shared
        active = pool.num_usable - pool.num_free + admission.num_needed_blocks
        times = np.unique(left)  # Why these: blocks in use are most just before a sequence ends.
        if len(times) > MAX_TIMES:
            times = times[np.linspace(0, len(times) - 1, MAX_TIMES).astype(int)]
        # [sequences, times]; the last token sampled is never stored.
        later = _blocks(known[:, None] + times - 1, manager) - shared[:, None]
        return int(active - own.sum() + (later * (left[:, None] >= times)).sum(axis=0).max())


def _blocks(num_tokens: Ints, manager: BlockManager) -> Ints:
    """Blocks that sequences of these lengths hold, over all groups."""
    size, whole = manager.block_size, -(-num_tokens // manager.block_size)
    if not manager.layout.has_groups:
        return whole
    from nanoengine.core.groups.rules import num_needed_blocks

    total = np.zeros_like(whole)
    for group in manager.layout.groups:
        at_most = num_needed_blocks(group, 2**40, manager.max_chunk, size)
        total += np.minimum(whole, at_most)
    return total


def make_policy(
    name: str, preempt_above: float | None = None, admit_below: float | None = None
) -> AdmissionPolicy | None:
    """The policy that a setting names; the two bounds belong to "hysteresis"."""
    if name == "hysteresis":
        bounds = {"preempt_above": preempt_above, "admit_below": admit_below}
        return Hysteresis(**{bound: at for bound, at in bounds.items() if at is not None})
    return Predictive() if name == "predictive" else None
