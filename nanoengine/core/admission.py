"""Admission policies: when to hold back a sequence although its blocks would fit right now.

    WatermarkOnly   whoever fits is admitted; the block manager keeps a few blocks back
    Hysteresis      closes when the pool is nearly full, opens again when it has emptied
    Predictive      admits while the blocks of all running sequences will fit at their peak

The last two are in `policies.py`.

A sequence that is admitted too early is preempted later, and what it had computed is lost. The
Scheduler asks its policy at each admission, but not when nothing runs, so no policy can stop an
engine.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from nanoengine.core.sequence import Sequence

if TYPE_CHECKING:
    from nanoengine.core.block_manager import Admission, BlockManager


class AdmissionPolicy(Protocol):
    """May hold back a sequence that fits; is told of each one that ends."""

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """Which of the last few waiting sequences, given in order, is tried next."""

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Whether to admit `seq`, whose blocks fit, beside those that run."""

    def on_finish(self, seq: Sequence) -> None:
        """A sequence has ended: its blocks are free and its length is known."""


class WatermarkOnly:
    """Admits whoever fits: the block manager's watermark is all that is kept back."""

    def next_to_admit(self, waiting: SequenceOf[Sequence]) -> Sequence:
        """The first in order."""
        return waiting[0]

    def may_admit(
        self, seq: Sequence, admission: Admission, running: list[Sequence], manager: BlockManager
    ) -> bool:
        """Always."""
        return True

    def on_finish(self, seq: Sequence) -> None:
        """Learns nothing."""
