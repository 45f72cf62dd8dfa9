"""WaitingQueue: sequences that wait for admission, by priority and arrival; LookAhead: one pass.

The head of the queue that does not fit yet lets a few behind it go first, a bounded number of
times, so that it neither blocks nor starves. Used by the Scheduler; knows no blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from nanoengine.core.sequence import Sequence, Status

MAX_LOOK_AHEAD = 8
"""Waiting sequences that do not fit yet and are passed over in one step."""
MAX_OVERTAKEN = 16
"""Times that a waiting sequence may be overtaken; then nobody passes it until it is admitted."""


Choose = Callable[[SequenceOf[Sequence]], Sequence]
"""Takes one of several sequences, which it is given in order."""


class WaitingQueue:
    """A heap of sequences; one that ends while it waits stays in it until its turn."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, seq: Sequence) -> None:
        """Queues a sequence in its place."""
        seq.status = Status.WAITING
        self._num_waiting += 1
        heapq.heappush(self._heap, (seq.order, seq))

    def pop(self) -> Sequence:
        """The first sequence still waiting; those that have ended are dropped on the way."""
        while True:
            _, seq = heapq.heappop(self._heap)
            if seq.status is Status.WAITING:
                self._num_waiting -= 1
                return seq

    def pop_chosen(self, choose: Choose) -> Sequence:
        """The one that `choose` takes of those still waiting; walks all of them."""
        waiting = [seq for _, seq in sorted(self._heap) if seq.status is Status.WAITING]
        chosen = choose(waiting)
        self._heap = [(seq.order, seq) for seq in waiting if seq is not chosen]  # sorted: a heap
        self._num_waiting -= 1
        return chosen

    def discount(self) -> None:
        """One of those that wait is about to end."""
        self._num_waiting -= 1

    def check(self) -> None:
        """Raises AssertionError if the count is not that of the sequences still waiting."""
        waiting = sum(seq.status is Status.WAITING for _, seq in self._heap)
        assert waiting == self._num_waiting, (waiting, self._num_waiting)


class LookAhead:
    """One step's pass over the queue, from its head.

    Up to MAX_LOOK_AHEAD sequences that do not fit yet are passed over, each of them MAX_OVERTAKEN
    times at most. Where few wait, `choose` says which of them is tried next.
    """

    def __init__(self, queue: WaitingQueue, choose: Choose) -> None:
        self._queue = queue
        self._choose = choose
        self.passed_over: list[Sequence] = []

    def next(self, few: int) -> Sequence | None:
        """The next sequence to try; None if there is none, or none may go before the others."""
        is_far = len(self.passed_over) > MAX_LOOK_AHEAD
        if not self._queue or is_far or any(map(_waits_long, self.passed_over)):
            return None
        if len(self._queue) <= few:
            return self._queue.pop_chosen(self._choose)
        return self._queue.pop()

    def pass_over(self, seq: Sequence) -> None:
        """It can't be admitted now."""
        self.passed_over.append(seq)

    def overtake(self) -> None:
        """One behind those passed over has been admitted."""
        for seq in self.passed_over:
            seq.num_overtaken += 1

    def end(self) -> None:
        """Those passed over wait on, in their places."""
        for seq in self.passed_over:
            self._queue.push(seq)


def _waits_long(seq: Sequence) -> bool:
    return seq.num_overtaken >= MAX_OVERTAKEN
