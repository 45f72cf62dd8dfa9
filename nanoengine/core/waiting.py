"""WaitingQueue: waiting sequences by priority and arrival; LookAhead: one pass over the queue.

The first waiting sequence may be too large to be admitted yet, and would block all later ones. So a
few sequences are passed over. Each sequence is overtaken a bounded number of times, so it does not
starve. Used by the Scheduler; does not depend on blocks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanoengine.core.block_manager import Admission, BlockManager
from nanoengine.core.sequence import Sequence, Status

MAX_LOOK_AHEAD = 8
"""Maximum number of waiting sequences that one step passes over because they do not fit yet."""
MAX_OVERTAKEN = 16
"""How often a waiting sequence may be overtaken; no other is admitted before it after that."""


@dataclass(slots=True)
class FinishedStats:
    """The ended sequences of a scheduler: their `count`, and the output `lengths` [tokens] of the
    latest ones that ended by a stop or by their length."""

    count: int = 0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=256))


class AdmissionPolicy:
    """May delay a sequence whose blocks fit right now; see policies.py.

    A sequence that is admitted too early is preempted later, and its computed tokens are lost. The
    Scheduler calls its policy at each admission, but not when nothing runs, so no policy can stop
    an engine. Without a policy every sequence that fits is admitted; the block manager then keeps
    the watermark free.
    """

    def watch(self, finished: FinishedStats) -> None:
        """Called once, with the statistics that the scheduler keeps up to date."""

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """Selects which of the last few waiting sequences, given in order, is tried next."""
        return waiting[0]

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether to admit `seq`, whose blocks fit, in addition to the running sequences."""
        return True


class WaitingQueue:
    """A heap of sequences. A sequence that ends while it waits stays in the heap until it is
    popped; only `num_waiting` decreases at once."""

    def __init__(self) -> None:
        self.heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self.num_waiting = 0

    def push(self, seq: Sequence) -> None:
        """Queues a sequence at its place in the order."""
        seq.status = Status.WAITING
        self.num_waiting += 1
        heapq.heappush(self.heap, (seq.order, seq))

    def pop(self) -> Sequence:
        """Removes and returns the first waiting sequence; drops ended ones before it."""
        while True:
            _, seq = heapq.heappop(self.heap)
            if seq.status is Status.WAITING:
                self.num_waiting -= 1
                return seq

    def pop_next(self, policy: AdmissionPolicy) -> Sequence:
        """Removes and returns the waiting sequence that a policy selects; visits all of them."""
        waiting = [seq for _, seq in sorted(self.heap) if seq.status is Status.WAITING]
        first = policy.next_to_admit(waiting)
        self.heap = [(seq.order, seq) for seq in waiting if seq is not first]  # sorted: a heap
        self.num_waiting -= 1
        return first


class LookAhead:
    """One step's pass over the queue, from its head.

    Up to MAX_LOOK_AHEAD sequences that do not fit yet are passed over, each of them at most
    MAX_OVERTAKEN times. If few wait, a policy's `next_to_admit` selects the next one to try.
    """

    def __init__(self, queue: WaitingQueue, policy: AdmissionPolicy | None) -> None:
        self._queue = queue
        self._policy = policy
        self.passed_over: list[Sequence] = []
        self._waits: list[tuple[int, str]] = []

    def next(self, max_reordered: int) -> Sequence | None:
        """Removes and returns the next sequence to try: the first one, or, if at most
        `max_reordered` wait, the one that the policy selects. None if the queue is empty, or if no
        sequence may overtake the ones passed over."""
        is_past_limit = len(self.passed_over) > MAX_LOOK_AHEAD
        if (
            not self._queue.num_waiting
            or is_past_limit
            or any(seq.num_overtaken >= MAX_OVERTAKEN for seq in self.passed_over)
        ):
            return None
        if self._policy is not None and self._queue.num_waiting <= max_reordered:
            return self._queue.pop_next(self._policy)
        return self._queue.pop()

    def pass_over(self, seq: Sequence, missing: str) -> None:
        """Passes over a sequence that can't be admitted now.

        `missing` is one of: a "row", its last "token" from the step in flight, "blocks", the
        "read" of a tier, the "budget", or the consent of the "policy".
        """
        self.passed_over.append(seq)
        self._waits.append((seq.seq_id, missing))

    def count_overtaken(self) -> None:
        """Counts an admission of a later sequence for all sequences passed over."""
        for seq in self.passed_over:
            seq.num_overtaken += 1

    def requeue(self) -> list[tuple[int, str]]:
        """Queues the sequences passed over again, in order; returns what was missing for each."""
        for seq in self.passed_over:
            self._queue.push(seq)
        return self._waits
