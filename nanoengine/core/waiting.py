"""WaitingQueue: sequences that wait for admission, by priority and arrival; LookAhead: one pass.

The first of the queue may be too large to be admitted yet. It would block all behind it, so a few
of these are tried; and because each sequence is overtaken a bounded number of times, it does not
starve. Used by the Scheduler; knows no blocks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanoengine.core.block_manager import Admission, BlockManager
from nanoengine.core.sequence import Sequence, Status

MAX_LOOK_AHEAD = 8
"""Most waiting sequences that one step passes over because they do not fit yet."""
MAX_OVERTAKEN = 16
"""Times that a waiting sequence may be overtaken; then no other passes it until it is admitted."""


@dataclass(slots=True)
class Ended:
    """What has ended in a scheduler: `count` sequences; of the latest that ended by themselves, the
    `lengths` of their outputs [tokens]."""

    count: int = 0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=256))


class AdmissionPolicy:
    """May hold back a sequence whose blocks fit right now: policies.py.

    A sequence that is admitted too early is preempted later, and what it had computed is lost. The
    Scheduler asks its policy at each admission, but not when nothing runs, so no policy can stop an
    engine. Without one whoever fits is admitted; the block manager keeps a few blocks back.
    """

    def watch(self, ended: Ended) -> None:
        """Called once, with what the scheduler keeps up to date."""

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """Which of the last few waiting sequences, given in order, is tried next."""
        return waiting[0]

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether to admit `seq`, whose blocks fit, beside those that run."""
        return True


class WaitingQueue:
    """A heap of sequences. One that ends while it waits stays in the heap until its turn; only
    `num_waiting` is one less at once."""

    def __init__(self) -> None:
        self.heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self.num_waiting = 0

    def push(self, seq: Sequence) -> None:
        """Queues a sequence at its place in the order."""
        seq.status = Status.WAITING
        self.num_waiting += 1
        heapq.heappush(self.heap, (seq.order, seq))

    def pop(self) -> Sequence:
        """The first sequence still waiting; those that have ended are dropped on the way."""
        while True:
            _, seq = heapq.heappop(self.heap)
            if seq.status is Status.WAITING:
                self.num_waiting -= 1
                return seq

    def pop_next(self, policy: AdmissionPolicy) -> Sequence:
        """The one that a policy wants next of those still waiting; walks all of them."""
        waiting = [seq for _, seq in sorted(self.heap) if seq.status is Status.WAITING]
        first = policy.next_to_admit(waiting)
        self.heap = [(seq.order, seq) for seq in waiting if seq is not first]  # sorted: a heap
        self.num_waiting -= 1
        return first


class LookAhead:
    """One step's pass over the queue, from its head.

    Up to MAX_LOOK_AHEAD sequences that do not fit yet are passed over, each of them MAX_OVERTAKEN
    times at most. Where few wait, a policy's `next_to_admit` says which of them is tried next.
    """

    def __init__(self, queue: WaitingQueue, policy: AdmissionPolicy | None) -> None:
        self._queue = queue
        self._policy = policy
        self.passed_over: list[Sequence] = []
        self._waits: list[tuple[int, str]] = []

    def next(self, few: int) -> Sequence | None:
        """Takes the next sequence to try out of the queue: by order, or, where no more than `few`
        wait, as the policy says. None if the queue is empty, or none may go before those passed
        over."""
        is_far = len(self.passed_over) > MAX_LOOK_AHEAD
        if (
            not self._queue.num_waiting
            or is_far
            or any(seq.num_overtaken >= MAX_OVERTAKEN for seq in self.passed_over)
        ):
            return None
        if self._policy is not None and self._queue.num_waiting <= few:
            return self._queue.pop_next(self._policy)
        return self._queue.pop()

    def pass_over(self, seq: Sequence, lacks: str) -> None:
        """Puts a sequence aside that can't be admitted now, because it lacks a "row", its last
        "token" from the step under way, "blocks", the "read" of a tier, the "budget", or consent of
        the "policy"."""
        self.passed_over.append(seq)
        self._waits.append((seq.seq_id, lacks))

    def overtake(self) -> None:
        """Counts for those passed over that one behind them has been admitted."""
        for seq in self.passed_over:
            seq.num_overtaken += 1

    def end(self) -> list[tuple[int, str]]:
        """Queues those passed over again, at their places; returns what each lacked."""
        for seq in self.passed_over:
            self._queue.push(seq)
        return self._waits
