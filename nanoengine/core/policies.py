"""Predictive: the admission policy that delays sequences until their blocks will fit.

A sequence that is admitted too early is preempted later, and its computed tokens are lost. The
interface and the queue order are in `waiting.py`.

Created by build.py, called by the Scheduler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from nanoengine.core.block_manager import Admission, BlockManager
from nanoengine.core.sequence import Sequence
from nanoengine.core.waiting import AdmissionPolicy, FinishedStats

Ints = NDArray[np.int64]


MAX_TIMES = 32
"""Number of times at which a prediction sums the blocks; few sequences end between two times."""


class Predictive(AdmissionPolicy):
    """Admits while the predicted peak of all running sequences and the new one fits the pool.

    A sequence that only max_tokens can end is expected to reach its max_tokens. Other sequences are
    expected to end at the mean length of the finished sequences with longer outputs, or at
    max_tokens if there are none. Until then a sequence holds one block per `block_size` tokens.
    Blocks that it shares count once, as if they were held to the end.

    The last few waiting sequences are admitted longest first. A run ends with the sequence that was
    admitted last or with the longest one, so these two should differ.

    Source: LightLLM's past-future scheduler: lengths of finished requests predict the running ones,
    and the peak of their memory decides. Longest first: Graham's rule for list scheduling (1969).
    """

    def __init__(self) -> None:
        self._finished, self._num_seen = FinishedStats(), 0
        self._sorted: list[int] = []
        self._lengths: dict[int, int | None] = {}
        self._refused_id: int | None = None
        # Priority -> the last arrival of the sequences that are being admitted longest first.
        self._last_arrival: dict[int, int] = {}

    def watch(self, finished: FinishedStats) -> None:
        """Stores the statistics of ended sequences, which are read at the next call."""
        self._finished = finished

    def _learn(self) -> None:
        if self._finished.count != self._num_seen:
            self._num_seen, self._refused_id = self._finished.count, None
            self._lengths.clear()
            self._sorted = sorted(self._finished.lengths)

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """The sequence with the longest expected output, of a fixed set of waiting sequences.

        Why a fixed set: otherwise new ones could overtake a short one forever. A preempted
        sequence goes first, because it has waited before.
        """
        first = waiting[0]
        if first.num_preempted_tokens:
            return first
        priority = first.request.priority
        peers = [seq for seq in waiting if seq.request.priority == priority]
        if first.request.arrival > self._last_arrival.get(priority, -1):
            self._last_arrival[priority] = max(seq.request.arrival for seq in peers)
        last = self._last_arrival[priority]
        candidates = [seq for seq in peers if seq.request.arrival <= last]
        return max(candidates, key=self.num_expected_tokens)

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether the predicted peak fits the pool."""
        self._learn()
        # Why: until a sequence ends the prediction does not change, so it is not computed again.
        if seq.seq_id == self._refused_id:
            return False
        # Why a bound first: with large batches, predicting all sequences per admission is slow.
        fits = self._upper_bound(seq, admission, running, manager) <= manager.pool.num_usable
        fits = fits or self._peak(seq, admission, running, manager) <= manager.pool.num_usable
        self._refused_id = None if fits else seq.seq_id
        return fits

    def num_expected_tokens(self, seq: Sequence) -> int:
        """Number of tokens that the sequence is expected to generate from now on, at least one."""
        self._learn()
        num_left = seq.max_num_tokens - seq.num_tokens
        if seq.stop_ids or seq.params.stop:
            num_output = seq.num_tokens - seq.num_prompt_tokens
            length = self._expected_length(num_output)
            if length is not None:
                num_left = min(num_left, length - num_output)
        return max(num_left, 1)

    def _expected_length(self, num_output: int) -> int | None:
        """Expected output length after `num_output` tokens; None if no longer one has finished."""
        if num_output not in self._lengths:
            longer = self._sorted[bisect_right(self._sorted, num_output) :]
            self._lengths[num_output] = int(np.mean(longer)) if longer else None
        return self._lengths[num_output]

    @staticmethod
    def _upper_bound(
        seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> int:
        """An upper bound of the peak: all sequences grow to max_tokens in each group, none ends."""
        pool, left = manager.pool, seq.max_num_tokens - seq.num_tokens
        for other in running:
            left += other.max_num_tokens - other.num_tokens
        active = pool.num_usable - pool.num_free + admission.num_needed_blocks
        grown = left // manager.block_size + len(running) + 1
        return active + grown * len(manager.layout.groups)

    def _peak(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> int:
        """The largest number of blocks predicted to be in use at once."""
        size, pool = manager.block_size, manager.pool
        sequences = [*running, seq]
        known = np.array([s.num_tokens for s in sequences])
        left = np.array([self.num_expected_tokens(s) for s in sequences])
        cached = [s.num_cached_tokens // size for s in running]
        shared = np.array([*cached, admission.num_cached_tokens // size])
        own = _blocks(known, manager) - shared
        active = pool.num_usable - pool.num_free + admission.num_needed_blocks
        times = np.unique(left)  # Why: block use peaks just before a sequence ends.
        if len(times) > MAX_TIMES:
            times = times[np.linspace(0, len(times) - 1, MAX_TIMES).astype(int)]
        # [sequences, times]; the last token sampled is never stored.
        later = _blocks(known[:, None] + times - 1, manager) - shared[:, None]
        return int(active - own.sum() + (later * (left[:, None] >= times)).sum(axis=0).max())


def _blocks(num_tokens: Ints, manager: BlockManager) -> Ints:
    """Number of blocks of sequences with these lengths, over all groups."""
    size, num_blocks = manager.block_size, -(-num_tokens // manager.block_size)
    if not manager.layout.has_groups:
        return num_blocks
    from nanoengine.core.groups.rules import num_needed_blocks

    total = np.zeros_like(num_blocks)
    for group in manager.layout.groups:
        max_blocks = num_needed_blocks(group, 2**40, manager.max_chunk, size)
        total += np.minimum(num_blocks, max_blocks)
    return total


def make_policy(name: str) -> AdmissionPolicy | None:
    """The policy that the setting `admission` selects; None: "watermark"."""
    return Predictive() if name == "predictive" else None
