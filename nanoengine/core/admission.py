"""AdmissionPolicy: when to hold back a sequence although its blocks would fit right now.

    None            whoever fits is admitted; the block manager keeps a few blocks back
    Hysteresis      closes when the pool is nearly full, opens again when it has emptied
    Predictive      admits while the blocks of all running sequences will fit at their peak

The last two are in `policies.py`.

A sequence that is admitted too early is preempted later, and what it had computed is lost. The
Scheduler asks its policy at each admission, but not when nothing runs, so no policy can stop an
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from nanoengine.core.block_manager import Admission, BlockManager
from nanoengine.core.sequence import Sequence


@dataclass(slots=True)
class Ended:
    """What has ended in a scheduler: `count` sequences; of the latest that ended by themselves, the
    `lengths` of their outputs [tokens]."""

    count: int = 0
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=256))


class AdmissionPolicy(Protocol):
    """May hold back a sequence that fits."""

    def watch(self, ended: Ended) -> None:
        """Called once, with what the scheduler keeps up to date."""

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """Which of the last few waiting sequences, given in order, is tried next."""

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether to admit `seq`, whose blocks fit, beside those that run."""
